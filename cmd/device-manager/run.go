package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/manager/config"
)

// app has what all verbs share: options, input and output.
type app struct {
	*cli.Program
	*config.Config
}

// newApp returns an app with the default configuration.
func newApp() *app {
	c, defaults := config.Default(), config.Default()
	return &app{
		Program: cli.New(cli.Options{
			Name: "device-manager", EnvPrefix: "DEVICE_MANAGER_", OldEnvPrefix: "GPU_CDI_",
			Errors: errorTable, Statuses: statuses,
			Config: &c, Default: &defaults, Keys: config.Keys, Common: &c.Common, Service: &c.Serve,
			Schema: "specs/device-manager.schema.json", ConfigFile: config.DefaultFile,
		}),
		Config: &c,
	}
}

// run does everything except ending the process. It returns the exit status.
func run(ctx context.Context, args, env []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := newApp()
	a.Env, a.Stdin, a.Stdout, a.Stderr = env, stdin, stdout, stderr
	return a.Run(ctx, args, a.rootCommand()) //nolint:contextcheck // cobra passes ctx to the verbs
}

// runAsLeaseProgram is run for gpu-run.
func runAsLeaseProgram(ctx context.Context, args, env []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := newApp()
	a.Env, a.Stdin, a.Stdout, a.Stderr = env, stdin, stdout, stderr
	return a.Run(ctx, args, a.leaseProgramCommand()) //nolint:contextcheck // cobra passes ctx to the command
}

func (a *app) rootCommand() *cobra.Command {
	return a.Command(
		&cobra.Command{
			Short: "Gives pods the devices of device plugins, without a kubelet",
			Long: `Does what a kubelet does for device plugins: plugins register with it, pods get devices, and their
containers get run options. It also checks device plugins against the rules of the API. It communicates with plugins
only through their sockets.

Options come from flags, then from the environment (--state-dir is DEVICE_MANAGER_STATE_DIR), then from the file of
--config (state-dir: DIR). device-manager config default prints a file with all of them.`,
			Example: `  device-manager run --gpus 1 -- python3 train.py
  device-manager leases
  device-manager admit -f pod.yaml`,
		},
		a.serveCommand(),
		a.admitCommand(),
		a.releaseCommand(),
		a.podsCommand(),
		a.nodeCommand(),
		a.runCommand(),
		a.leasesCommand(),
		a.leaseCommand(),
		a.checkpointCommand(),
		a.conformanceCommand(),
	)
}
