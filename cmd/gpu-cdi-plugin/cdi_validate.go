package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/spf13/cobra"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
)

func (a *app) validateCommand() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "validate [FILE...]",
		Short: "Check that spec files are valid on this host",
		Long: `Checks spec files against the rules of CDI and against this host: the files to mount exist, nodes are
device nodes, hooks can be executed and only root can change them, and the driver has the GPUs and MIG
devices that are named by UUID. If the driver cannot be used, a warning is logged in place of that last
check. Without a file it checks the one that generate --write has written, and those of configured extras
that exist.`,
		Example: `  gpu-cdi-plugin cdi validate
  gpu-cdi-plugin cdi validate /etc/cdi/*.yaml -o json`,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Differs),
		ValidArgsFunction: completeSpecFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.cdiValidate(cmd.Context(), args, out)
		},
	}
	out.addFlags(cmd, "table", "json", "yaml")
	a.addExtras(cmd)
	a.addTimeout(cmd)
	return cmd
}

// completeSpecFiles completes the names of spec files.
func completeSpecFiles(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return []string{"json", "yaml"}, cobra.ShellCompDirectiveFilterFileExt
}

// verdict is the result for one file.
type verdict struct {
	Path     string        `json:"path"`
	Valid    bool          `json:"valid"`
	Problems []cdi.Problem `json:"problems"`
}

func (a *app) cdiValidate(ctx context.Context, files []string, out output) error {
	if len(files) == 0 {
		files = append([]string{a.ownSpec()}, a.extraFiles()...)
	}
	stale, err := a.staleDevices(ctx, files)
	if err != nil {
		return err
	}
	verdicts, unread := a.validateFiles(files, stale)
	if len(verdicts) > 0 {
		if err := out.print(a.stdout, verdictsView(verdicts)); err != nil {
			return err
		}
	}
	if errors.Is(unread, fs.ErrNotExist) && slices.Equal(files, []string{a.ownSpec()}) {
		return cli.With(cli.Failure, a.renewHint(a.ownSpec()), unread)
	}
	if unread != nil {
		return cli.With(cli.Failure, "gpu-cdi-plugin cdi list shows the spec files that there are", unread)
	}
	return a.invalid(verdicts)
}

// validateFiles checks each file. The error is about those that cannot be read.
func (a *app) validateFiles(files []string, stale map[string][]cdi.Problem) (verdicts []verdict, unread error) {
	for _, file := range files {
		problems, err := cdi.ValidateFile(file)
		if err != nil {
			unread = errors.Join(unread, err)
			continue
		}
		problems = append(append([]cdi.Problem{}, problems...), stale[file]...)
		if spec, err := cdi.ReadFile(file); err == nil {
			problems = append(problems, a.unsafeParts(file, spec)...)
		}
		verdicts = append(verdicts, verdict{file, len(problems) == 0, problems})
	}
	return verdicts, unread
}

// invalid returns an error if some of the files are not valid.
func (a *app) invalid(verdicts []verdict) error {
	var bad []string
	for _, v := range verdicts {
		if !v.Valid {
			bad = append(bad, v.Path)
		}
	}
	if len(bad) == 0 {
		return nil
	}
	hint := a.mendHint(bad[0])
	if spec, err := cdi.ReadFile(bad[0]); err == nil && !cdi.WrittenHere(spec) {
		hint = bad[0] + " was " + notOurs
	}
	return cli.With(cli.Differs, hint,
		fmt.Errorf("not valid on this host: %d of %s", len(bad), plural(len(verdicts), "spec file")))
}

// staleDevices returns the problems of devices that the driver does not have, by file. It reads the devices only if a
// file names some by UUID. Files that cannot be read are left to validateFiles.
func (a *app) staleDevices(ctx context.Context, files []string) (map[string][]cdi.Problem, error) {
	named := map[string]*specs.Spec{}
	for _, file := range files {
		if spec, err := cdi.ReadFile(file); err == nil && cdi.NamesGPUs(spec) {
			named[file] = spec
		}
	}
	stale := map[string][]cdi.Problem{}
	if len(named) == 0 {
		return stale, nil
	}
	h, err := a.host()
	if err != nil {
		return nil, err
	}
	s, err := a.readDevices(ctx, h)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if errors.Is(err, errNoGPU) {
		s, err = &gpu.Snapshot{}, nil
	}
	if err != nil {
		why := oneLine(err)
		if hint := cli.HintOf(classify(err)); hint != "" {
			why += "; " + hint
		}
		a.log.Warn("the devices of the specs are not checked: " + why)
		return stale, nil
	}
	for file, spec := range named {
		stale[file] = cdi.ValidateDevices(spec, s)
	}
	return stale, nil
}

func verdictsView(verdicts []verdict) view {
	t := table{header: []string{"FILE", "RESULT"}}
	for _, v := range verdicts {
		if v.Valid {
			t.rows = append(t.rows, []string{v.Path, "valid"})
		}
		for _, p := range v.Problems {
			t.rows = append(t.rows, []string{v.Path, p.String()})
		}
	}
	return view{data: map[string][]verdict{"files": verdicts}, table: t}
}
