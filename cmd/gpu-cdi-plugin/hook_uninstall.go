package main

import (
	"github.com/spf13/cobra"

	"gpu-cdi-plugin/hook/install"
	"gpu-cdi-plugin/internal/cli"
)

func (a *app) hookUninstallCommand() *cobra.Command {
	var out cli.Output
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "uninstall [ENGINE...]",
		Short: "Undo hook install",
		Long: `Removes what hook install has written for these engines, or for all for which it is installed. Files that
it made are removed, also if only their comments or layout were changed afterwards. Other files are restored, byte for
byte; if they were changed afterwards, only the entries of hook install are removed. These are errors, and nothing is
changed: one of these files or entries was changed so that it cannot be removed, and gpu-cdi is the default runtime of
an engine, which would not start containers without it. Run this before you remove prestart-hook: podman starts no
container with a hook that does not exist.`,
		Example: `  gpu-cdi-plugin hook uninstall
  gpu-cdi-plugin hook uninstall docker --dry-run`,
		ValidArgsFunction: completeEngines,
		Args:              cobra.ArbitraryArgs,
		RunE: func(_ *cobra.Command, args []string) error {
			return a.locked(dryRun, func() error { return a.hookUninstall(args, out, dryRun) })
		},
	}
	out.AddFlags(cmd, "table", "json", "yaml")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print the difference of each file and change nothing")
	return cmd
}

func (a *app) hookUninstall(engines []string, out cli.Output, dryRun bool) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	if len(engines) == 0 {
		files, err := install.Read(h.Root(), nil, "")
		if err != nil {
			return err
		}
		if engines, err = files.Installed(); err != nil {
			return err
		}
	}
	files, err := install.Read(h.Root(), engines, "")
	if err != nil {
		return err
	}
	p, err := files.Uninstall(engines)
	if err != nil {
		return err
	}
	return a.applyHook(p, out, dryRun)
}
