package main

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/fileio"
)

func (a *app) removeCommand() *cobra.Command {
	var out cli.Output
	cmd := &cobra.Command{
		Use:   "remove",
		Short: "Remove the specs that generate --write has written",
		Long: `Removes the spec file of --cdi-kind from --cdi-dir, and those of extras that this program wrote there,
even if they are not configured, and prints their paths. It removes no other spec, none of another
kind, and no file of an extra that another program wrote. It also removes the labels that serve has
written (node-labels). If there is no such file, it does nothing.`,
		Example: `  gpu-cdi-plugin cdi remove
  gpu-cdi-plugin cdi remove -o json`,
		RunE: func(*cobra.Command, []string) error { return a.cdiRemove(out) },
	}
	out.AddFlags(cmd, "name", "json", "yaml")
	return cmd
}

func (a *app) cdiRemove(out cli.Output) error {
	path := a.ownSpec()
	if kind := otherKind(path, a.CDIKind); kind != "" {
		return cli.With(cli.Failure, "remove it by hand if it is not needed",
			fmt.Errorf("remove %s: it is a spec of kind %s, not %s", path, kind, a.CDIKind))
	}
	removed := []string{}
	var failed error
	for _, path := range append([]string{path}, a.writtenExtras()...) {
		switch err := fileio.Remove(path); {
		case err == nil:
			removed = append(removed, path)
		case errors.Is(err, fs.ErrNotExist):
			a.Log.Info("there is no spec " + path + " to remove")
		default:
			failed = errors.Join(failed, fmt.Errorf("remove the spec: %w", err))
		}
	}
	a.warnServed(path)
	switch path, err := agent.RemoveLabels(a.config, a); {
	case err != nil:
		failed = errors.Join(failed, err)
	case path != "":
		removed = append(removed, path)
	}
	v := cli.View{Data: map[string][]string{"removed": removed}, Names: removed}
	return errors.Join(out.Print(a.Stdout, v), failed)
}

// otherKind returns the kind of the spec in a file if that is not the expected kind, and otherwise "". A file that
// cannot be read may be replaced: it has the expected name, and is of no use.
func otherKind(path, kind string) string {
	spec, err := cdi.ReadFile(path)
	if err != nil || spec.Kind == kind {
		return ""
	}
	return spec.Kind
}
