package main

import (
	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
)

func (a *app) cdiCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cdi",
		Short: "Write, check and use CDI specs",
		Long: `Writes the CDI spec of this host's GPUs and keeps it up to date, checks it, compares it with the host, and puts
devices into bundles for runtimes without CDI.`,
		Example: `  gpu-cdi-plugin cdi generate --write
  gpu-cdi-plugin cdi list`,
		Annotations: cli.Statuses(cli.OK, cli.Usage),
		Args:        cli.UnknownVerb,
		RunE:        cli.ShowHelp,
	}
	cmd.AddCommand(
		a.generateCommand(),
		a.watchCommand(),
		a.listCommand(),
		a.validateCommand(),
		a.diffCommand(),
		a.removeCommand(),
		a.injectCommand(),
	)
	return cmd
}
