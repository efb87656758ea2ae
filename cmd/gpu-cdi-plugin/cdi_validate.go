package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/wording"
)

func (a *app) validateCommand() *cobra.Command {
	var out cli.Output
	cmd := &cobra.Command{
		Use:   "validate [FILE...]",
		Short: "Check that spec files are valid on this host",
		Long: `Checks spec files against the rules of CDI and against this host: the files to mount and the device
nodes exist, hooks can be executed and only root can change them, and the driver has the GPUs and MIG devices that are
named by UUID. If the driver cannot be used, a warning is logged in place of that last check. Without FILE it checks
the spec that generate --write has written, and the existing specs of configured extras.`,
		Example: `  gpu-cdi-plugin cdi validate
  gpu-cdi-plugin cdi validate /etc/cdi/*.yaml -o json`,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Differs),
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cli.CompleteFiles("json", "yaml"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.cdiValidate(cmd.Context(), args, out)
		},
	}
	out.AddFlags(cmd, "table", "json", "yaml")
	a.addExtras(cmd)
	a.addTimeout(cmd)
	return cmd
}

// verdict is the result for one file.
type verdict struct {
	Path     string        `json:"path"`
	Valid    bool          `json:"valid"`
	Problems []cdi.Problem `json:"problems"`
}

func (a *app) cdiValidate(ctx context.Context, files []string, out cli.Output) error {
	written := len(files) == 0
	if written {
		files = append([]string{a.ownSpec()}, a.extraFiles()...)
	}
	h, err := a.host()
	if err != nil {
		return err
	}
	numbers := driver.ReadNumbers(h)
	devices := sync.OnceValue(func() *gpu.Snapshot { return a.knownDevices(ctx) })
	var verdicts []verdict
	var unread error
	var hintInvalid string
	invalid := 0
	for _, file := range files {
		problems, err := cdi.ValidateFile(file)
		if err != nil {
			unread = errors.Join(unread, err)
			continue
		}
		foreign := false
		var wrong []cdi.Problem
		if spec, err := cdi.ReadFile(file); err == nil { // a file that cannot be parsed has that problem already
			problems = append(problems, a.unsafeParts(file, spec)...)
			wrong = cdi.ValidateNumbers(spec, numbers)
			problems = append(problems, wrong...)
			if cdi.NamesGPUs(spec) && devices() != nil {
				problems = append(problems, cdi.ValidateDevices(spec, devices())...)
			}
			foreign = !cdi.WrittenHere(spec)
		}
		if len(problems) > 0 {
			if invalid++; invalid == 1 && len(wrong) > 0 {
				hintInvalid = "gpu-cdi-plugin device make-nodes makes the device nodes anew"
			} else if invalid == 1 && foreign {
				hintInvalid = file + " was " + notOurs
			} else if invalid == 1 {
				hintInvalid = a.renewHint(file)
			}
		}
		verdicts = append(verdicts, verdict{file, len(problems) == 0, append([]cdi.Problem{}, problems...)})
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if len(verdicts) > 0 {
		if err := out.Print(a.Stdout, verdictsView(verdicts)); err != nil {
			return err
		}
	}
	switch {
	case unread != nil && written:
		return cli.With(cli.Failure, a.renewHint(a.ownSpec()), unread)
	case unread != nil:
		return cli.With(cli.Failure, "gpu-cdi-plugin cdi list shows the spec files that there are", unread)
	case invalid > 0:
		return cli.With(cli.Differs, hintInvalid,
			fmt.Errorf("not valid on this host: %d of %s", invalid, wording.Count(len(verdicts), "spec file")))
	}
	return nil
}

// knownDevices reads the devices of the driver. If that fails, it logs a warning and returns nil.
func (a *app) knownDevices(ctx context.Context) *gpu.Snapshot {
	s, err := a.readHostDevices(ctx)
	if errors.Is(err, errNoGPU) {
		return &gpu.Snapshot{}
	}
	if err != nil {
		why := wording.OneLine(err)
		if hint := cli.HintOf(a.Classify(err)); hint != "" {
			why += "; " + hint
		}
		a.Log.Warn("the devices of the specs are not checked: " + why)
		return nil
	}
	return s
}

func (a *app) readHostDevices(ctx context.Context) (*gpu.Snapshot, error) {
	h, err := a.host()
	if err != nil {
		return nil, err
	}
	return a.readDevices(ctx, h)
}

func verdictsView(verdicts []verdict) cli.View {
	t := cli.Table{Header: []string{"FILE", "RESULT"}}
	for _, v := range verdicts {
		if v.Valid {
			t.Rows = append(t.Rows, []string{v.Path, "valid"})
		}
		for _, p := range v.Problems {
			t.Rows = append(t.Rows, []string{v.Path, p.String()})
		}
	}
	return cli.View{Data: map[string][]verdict{"files": verdicts}, Table: t}
}
