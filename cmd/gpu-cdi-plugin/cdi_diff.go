package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/exit"
)

// diffOptions are the options of cdi diff.
type diffOptions struct {
	output
	// Capabilities are those that the spec was written with.
	Capabilities *cdi.Capabilities
}

func (a *app) diffCommand() *cobra.Command {
	var opts diffOptions
	cmd := &cobra.Command{
		Use:   "diff [FILE]",
		Short: "Tell whether a written spec is still true",
		Long: `Compares a spec file with the spec that this host should have now, and lists what differs: the driver was upgraded, a
GPU is gone or new, MIG devices have changed, files have moved. Without a file it looks at the one that generate --write
has written. --capabilities, --cdi-kind and --hook-path are to be those that it was written with.`,
		Example: `  gpu-cdi-plugin cdi diff || gpu-cdi-plugin cdi generate --write
  gpu-cdi-plugin cdi diff /etc/cdi/nvidia.yaml -o json`,
		Annotations: statuses(exit.OK, exit.Failure, exit.Usage, exit.Partial, exit.Differs, exit.NoDriver, exit.NoGPU,
			exit.Interrupted),
		Args:              oneFile,
		ValidArgsFunction: completeSpecFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.cdiDiff(cmd.Context(), append(args, a.ownSpec())[0], opts)
		},
	}
	opts.addFlags(cmd, "table", "json", "yaml")
	opts.Capabilities = addCapabilities(cmd.Flags())
	return cmd
}

func oneFile(_ *cobra.Command, args []string) error {
	if len(args) > 1 {
		return fmt.Errorf("want one file, got %d", len(args))
	}
	return nil
}

// comparison is what diff prints as JSON.
type comparison struct {
	Path        string           `json:"path"`
	Differences []cdi.Difference `json:"differences"`
}

func (a *app) cdiDiff(ctx context.Context, path string, opts diffOptions) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	c := comparison{path, []cdi.Difference{}}
	written, err := cdi.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return exit.With(exit.Failure, a.renewHint(path), err)
	}
	g, wantErr := a.generate(ctx, h, *opts.Capabilities)
	if wantErr != nil {
		return wantErr
	}
	if err != nil {
		c.Differences = append(c.Differences, cdi.Difference{Where: "spec", What: "not there"})
	} else {
		c.Differences = append(c.Differences, cdi.Diff(written, g.spec)...)
	}
	if err := opts.print(a.stdout, comparisonView(c)); err != nil {
		return err
	}
	if n := len(c.Differences); n > 0 {
		return exit.With(exit.Differs, a.renewHint(path),
			fmt.Errorf("%s is not what this host should have: %s", path, plural(n, "difference")))
	}
	return unread(g.snapshot)
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
