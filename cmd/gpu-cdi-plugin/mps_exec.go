package main

import (
	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/mps"
)

// mpsExec is the verb by which serve runs itself to become the MPS control program.
const mpsExec = "mps-exec"

func mpsExecCommand() *cobra.Command {
	var e mps.Entry
	cmd := &cobra.Command{
		Use:    mpsExec + " DIR PROGRAM [NAME=VALUE]...",
		Hidden: true,
		Short:  "Become the MPS control program of a GPU (serve does this)",
		Long: `Is run by serve. It becomes PROGRAM with those variables: the control daemon with --start, and otherwise the program
that gives it commands. Before that it gives up what the program does not need: it has namespaces of its own, a
read-only root directory with the GPU's directories, in which no link is followed, and few capabilities.`,
		Example: `  gpu-cdi-plugin mps-exec --start --driver 580.126.09 -- /run/gpu-cdi-mps/GPU-... \
    /usr/bin/nvidia-cuda-mps-control CUDA_VISIBLE_DEVICES=GPU-...`,
		Annotations:       cli.Statuses(exit.Failure, exit.Usage),
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(_ *cobra.Command, args []string) error {
			e.Dir, e.Program, e.Env = args[0], args[1], args[2:]
			return mps.Enter(e)
		},
	}
	cmd.Flags().BoolVar(&e.Start, "start", false, "become the daemon")
	cmd.Flags().StringVar(&e.Driver, "driver", "", "`version` of the driver that the program is of")
	cmd.Flags().StringVar(&e.DriverRoot, "driver-dir", "", "`directory` that the driver is installed in (default: /)")
	return cmd
}
