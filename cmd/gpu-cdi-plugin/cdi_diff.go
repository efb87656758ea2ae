package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/cli"
)

// diffOptions are the options of the verb cdi diff.
type diffOptions struct {
	output
	// Capabilities are those that the spec was written with.
	Capabilities *driver.Capabilities
}

func (a *app) diffCommand() *cobra.Command {
	var opts diffOptions
	cmd := &cobra.Command{
		Use:   "diff [FILE]",
		Short: "Compare a written spec with this host",
		Long: `Compares a spec file with the spec that this host should have now, and lists the differences: an upgraded
driver, a GPU that is gone or new, changed MIG devices, moved files, a hook that users other than root can
change. Without a file it compares those that generate --write has written, including those of configured
extras. Give it the --capabilities, --cdi-kind and --hook-path that the spec was written with. A spec that
another program wrote is not compared.`,
		Example: `  gpu-cdi-plugin cdi diff || gpu-cdi-plugin cdi generate --write
  gpu-cdi-plugin cdi diff /etc/cdi/nvidia.yaml -o json`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Partial, cli.Differs, cli.NoDriver,
			cli.NoGPU, cli.Interrupted),
		Args:              oneFile,
		ValidArgsFunction: completeSpecFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.cdiDiff(cmd.Context(), args, opts)
		},
	}
	opts.addFlags(cmd, "table", "json", "yaml")
	opts.Capabilities = addCapabilities(cmd.Flags())
	a.addTimeout(cmd)
	a.addExtras(cmd)
	return cmd
}

func oneFile(_ *cobra.Command, args []string) error {
	if len(args) > 1 {
		return fmt.Errorf("want one file, got %d", len(args))
	}
	return nil
}

// comparison is the verb's output as JSON.
type comparison struct {
	Path        string           `json:"path"`
	Differences []cdi.Difference `json:"differences"`
	foreign     []string         // files that another program wrote
}

func (a *app) cdiDiff(ctx context.Context, args []string, opts diffOptions) error {
	if len(args) > 0 { // a file that cannot be compared is reported even without a driver
		_, why, err := readWritten(args[0])
		if err != nil {
			return cli.With(cli.Failure, a.renewHint(args[0]), err)
		}
		if why != "" {
			c := comparison{Path: args[0], Differences: []cdi.Difference{{Where: "spec", What: why}}}
			if why == notOurs {
				c.foreign = args
			}
			return a.report(c, opts)
		}
	}
	h, err := a.host()
	if err != nil {
		return err
	}
	g, err := a.generate(ctx, h, *opts.Capabilities)
	if err != nil {
		return err
	}
	if err := g.checkDevices(h); err != nil {
		return err
	}
	files := g.files(a.ownSpec(), a.CDIKind)
	if len(args) > 0 {
		files = []specFile{expectedFor(files, args[0])}
	}
	c := comparison{Path: files[0].path, Differences: []cdi.Difference{}}
	dirs := cdi.Load(a.specDirs(h)...)
	for _, f := range files {
		more, err := a.differences(f)
		if less := f.yielding(dirs); err == nil && len(more) > 0 && less.spec != f.spec {
			more, err = a.differences(less)
		}
		if err != nil {
			return cli.With(cli.Failure, a.renewHint(f.path), err)
		}
		for _, d := range more {
			if d.What == notOurs {
				c.foreign = append(c.foreign, f.path)
			}
			if f.kind != a.CDIKind {
				d.Where = f.kind + " " + d.Where
			}
			c.Differences = append(c.Differences, d)
		}
	}
	return cmp.Or(a.report(c, opts), g.checkComplete())
}

// report prints the differences. It returns an error if there are any.
func (a *app) report(c comparison, opts diffOptions) error {
	if err := opts.print(a.stdout, comparisonView(c)); err != nil {
		return err
	}
	switch n := len(c.Differences); {
	case n > 0 && n == len(c.foreign):
		return cli.With(cli.Differs, "", fmt.Errorf("%s: %s", notOurs, strings.Join(c.foreign, ", ")))
	case n > 0:
		return cli.With(cli.Differs, a.mendHint(c.Path),
			fmt.Errorf("%s is not what this host should have: %s", c.Path, plural(n, "difference")))
	}
	return nil
}

// Reasons why a file cannot be compared. There is no advice for another program's spec.
const (
	notOurs  = "not written by this program"
	notThere = "the file does not exist"
)

// expectedFor is what a file should be: the spec of its kind, or else that of the GPUs, which is the first.
func expectedFor(files []specFile, path string) specFile {
	f := files[0]
	if spec, err := cdi.ReadFile(path); err == nil {
		if i := slices.IndexFunc(files, func(f specFile) bool { return f.kind == spec.Kind }); i >= 0 {
			f = files[i]
		}
	}
	f.path = path
	return f
}

// readWritten reads a spec file of this program, or returns why it cannot be compared.
func readWritten(path string) (written *specs.Spec, why string, err error) {
	written, err = cdi.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, notThere, nil
	case err != nil:
		return nil, "", err
	case !cdi.WrittenHere(written):
		return nil, notOurs, nil
	}
	return written, "", nil
}

// differences compares a file with what it should be. Only root may be able to change its hooks.
func (a *app) differences(f specFile) ([]cdi.Difference, error) {
	written, why, err := readWritten(f.path)
	switch {
	case err != nil:
		return nil, err
	case why == notThere && f.spec == nil:
		return nil, nil
	case why != "":
		return []cdi.Difference{{Where: "spec", What: why}}, nil
	case f.spec == nil:
		return []cdi.Difference{{Where: "spec", What: "this host should have none"}}, nil
	}
	list := cdi.Diff(written, f.spec)
	for _, p := range a.unsafeParts(f.path, written) {
		list = append(list, cdi.Difference(p))
	}
	return list, nil
}

// yielding is the file as serve writes it: without the names that other files of its directory define.
func (f specFile) yielding(dirs *cdi.SpecDirs) specFile {
	return specFile{f.path, f.kind, cdi.Without(f.spec, dirs.Conflicts(f.path, f.spec), cdi.Conflict.LeftToOther)}
}

func comparisonView(c comparison) view {
	t := table{header: []string{"WHERE", "DIFFERENCE"}}
	for _, d := range c.Differences {
		t.rows = append(t.rows, []string{d.Where, d.What})
	}
	if len(c.Differences) == 0 {
		t.header = []string{c.Path + " is what this host should have"}
	}
	return view{data: c, table: t}
}
