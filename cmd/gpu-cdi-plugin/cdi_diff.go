package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/wording"
)

// diffOptions are the options of the verb cdi diff.
type diffOptions struct {
	cli.Output
	// Capabilities are the capabilities for which the spec was written.
	Capabilities *driver.Capabilities
}

func (a *app) diffCommand() *cobra.Command {
	var opts diffOptions
	cmd := &cobra.Command{
		Use:   "diff [FILE]",
		Short: "Compare a written spec with this host",
		Long: `Compares a spec file with the spec that this host should have now, and lists the differences: an
upgraded driver, a GPU that is gone or new, changed MIG devices, moved files, a hook that users other than root can
change. Without FILE it compares the specs that generate --write has written, including those of configured extras. Use
the --capabilities, --cdi-kind, --hook-path and --no-hook with which the spec was written. A spec that another program
wrote is not compared.`,
		Example: `  gpu-cdi-plugin cdi diff || gpu-cdi-plugin cdi generate --write
  gpu-cdi-plugin cdi diff /etc/cdi/nvidia.yaml -o json`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Partial, cli.Differs, cli.NoDriver,
			cli.NoGPU, cli.Interrupted),
		Args:              cli.OneFile,
		ValidArgsFunction: cli.CompleteFile("json", "yaml"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.cdiDiff(cmd.Context(), args, opts)
		},
	}
	opts.AddFlags(cmd, "table", "json", "yaml")
	opts.Capabilities = addCapabilitiesFlag(cmd.Flags())
	a.addTimeout(cmd)
	a.addExtras(cmd)
	return cmd
}

// comparison is the result of cdi diff for one file, as JSON.
type comparison struct {
	Path        string           `json:"path"`
	Differences []cdi.Difference `json:"differences"`
}

// Reasons why a file is not compared.
const (
	notThere = "the file does not exist"
	notOurs  = "not written by this program"
)

func (a *app) cdiDiff(ctx context.Context, args []string, opts diffOptions) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	g, err := a.generate(ctx, h, *opts.Capabilities)
	if err != nil {
		return err
	}
	if err := g.checkDevices(); err != nil {
		return err
	}
	files := g.files(a.ownSpec(), a.CDIKind)
	if len(args) > 0 {
		files = []specFile{expectedFor(files, args[0])}
	}
	c := comparison{Path: files[0].path, Differences: []cdi.Difference{}}
	var paths []string // of the files that differ
	hint := ""         // empty if another program wrote the spec
	dirs := cdi.Load(a.specDirs(h)...)
	for _, f := range files {
		list, err := a.differences(f, dirs)
		if err != nil {
			return cli.With(cli.Failure, a.renewHint(f.path), err)
		}
		if len(list) > 0 {
			paths = append(paths, f.path)
		}
		for _, d := range list {
			if d.What != notOurs {
				hint = a.renewHint(c.Path)
			}
			if f.kind != a.CDIKind {
				d.Where = f.kind + " " + d.Where
			}
			c.Differences = append(c.Differences, d)
		}
	}
	if err := opts.Print(a.Stdout, comparisonView(c)); err != nil {
		return err
	}
	if n := len(c.Differences); n > 0 {
		return cli.With(cli.Differs, hint,
			fmt.Errorf("%s does not match this host: %s", strings.Join(paths, ", "), wording.Count(n, "difference")))
	}
	a.warnMissing(g.findings)
	return g.checkComplete()
}

// expectedFor returns the expected spec for a file: the spec that has the kind of the file's spec, or else the first,
// which is that of the GPUs.
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

// differences compares a file with the expected spec. It also checks that only root can change the spec's hooks.
func (a *app) differences(f specFile, dirs *cdi.SpecDirs) ([]cdi.Difference, error) {
	written, err := cdi.ReadFile(f.path)
	missing := errors.Is(err, fs.ErrNotExist)
	what := ""
	switch {
	case missing && f.spec == nil:
		return nil, nil
	case missing:
		what = notThere
	case err != nil:
		return nil, err
	case !cdi.WrittenHere(written):
		what = notOurs
	case f.spec == nil:
		what = "this host should have none"
	}
	if what != "" {
		return []cdi.Difference{{Where: "spec", What: what}}, nil
	}
	list := cdi.Diff(written, f.spec)
	if len(list) > 0 { // serve leaves out names that another file in the directory defines
		list = cdi.Diff(written, cdi.Without(f.spec, dirs.Conflicts(f.path, f.spec)))
	}
	for _, p := range a.unsafeParts(f.path, written) {
		list = append(list, cdi.Difference(p))
	}
	return list, nil
}

func comparisonView(c comparison) cli.View {
	t := cli.Table{Header: []string{"WHERE", "DIFFERENCE"}}
	for _, d := range c.Differences {
		t.Rows = append(t.Rows, []string{d.Where, d.What})
	}
	if len(c.Differences) == 0 {
		t = cli.Table{Legend: c.Path + " matches this host\n"}
	}
	return cli.View{Data: c, Table: t}
}
