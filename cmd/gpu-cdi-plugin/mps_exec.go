package main

import (
	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/internal/cli"
)

// mpsExec is the verb with which serve runs this program so that it becomes the MPS control program.
const mpsExec = "mps-exec"

func mpsExecCommand() *cobra.Command {
	return &cobra.Command{
		Use:    mpsExec + " ARGUMENT",
		Hidden: true,
		Short:  "Become the MPS control program of a GPU (used by serve)",
		Long: `Used by serve. Replaces itself by nvidia-cuda-mps-control: a GPU's daemon, or the client that sends it
commands, as ARGUMENT says. Before that it confines itself to namespaces of its own, to a read-only root directory with
the GPU's directories, in which links are not followed, and to few capabilities.`,
		Example: "  gpu-cdi-plugin mps-exec " +
			`'{"Dir": "/run/gpu-cdi-plugin/mps/GPU-...", "Daemon": true, "Program": {...}}'`,
		Annotations:       cli.Statuses(cli.Failure, cli.Usage),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(_ *cobra.Command, args []string) error { return mps.Enter(args[0]) },
	}
}
