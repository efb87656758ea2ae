package main

import (
	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/mps"
)

// mpsExec is the verb with which serve runs this program so that it becomes the MPS control program.
const mpsExec = "mps-exec"

func mpsExecCommand() *cobra.Command {
	var e mps.Entry
	cmd := &cobra.Command{
		Use:    mpsExec + " DIR PROGRAM [NAME=VALUE]...",
		Hidden: true,
		Short:  "Become the MPS control program of a GPU (used by serve)",
		Long: `Used by serve. Replaces itself by PROGRAM with these environment variables: with --start the control
daemon, otherwise the client that sends it commands. Before that it confines itself to namespaces of its own, to a
read-only root directory with the GPU's directories, in which links are not followed, and to few capabilities.`,
		Example: `  gpu-cdi-plugin mps-exec --start --driver 580.126.09 -- /run/gpu-cdi-plugin/mps/GPU-... \
    /usr/bin/nvidia-cuda-mps-control CUDA_VISIBLE_DEVICES=GPU-...`,
		Annotations:       cli.Statuses(cli.Failure, cli.Usage),
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(_ *cobra.Command, args []string) error {
			e.Dir, e.Program, e.Env = args[0], args[1], args[2:]
			return mps.Enter(e)
		},
	}
	cmd.Flags().BoolVar(&e.Start, "start", false, "become the daemon")
	cmd.Flags().StringVar(&e.Driver, "driver", "", "`version` of the program's driver")
	cmd.Flags().StringVar(&e.DriverRoot, "driver-dir", "", "`directory` in which the driver is installed (default: /)")
	return cmd
}
