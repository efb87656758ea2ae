package main

import (
	"context"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/nvml"
)

// app has what all verbs share: their options, their input and their output.
type app struct {
	*cli.Program
	*config.Common
	plugin  *config.Plugin
	config  *config.Config // the whole configuration
	timeout time.Duration  // of calls into the driver
	hangups chan os.Signal // of serve, which reloads its configuration at each SIGHUP
}

// newApp returns an app with the default configuration.
func newApp() *app {
	c, defaults := config.Default(), config.Default()
	return &app{
		Program: cli.New(cli.Options{
			Name: "gpu-cdi-plugin", EnvPrefix: "GPU_CDI_", Errors: errorTable, Statuses: statuses,
			Config: &c, Default: &defaults, Keys: config.Keys, Common: &c.Common, Service: &c.Plugin,
			Schema:     "specs/config.schema.json",
			ConfigFile: "/etc/gpu-cdi-plugin/config.yaml",
			HintFlags:  map[string][]string{"cdi generate ": {"capabilities", "extras"}},
			GoneFlags: map[string]string{
				"runners-up": "this flag was removed: topology explain shows the chosen GPUs and why, and no others",
			},
		}),
		Common: &c.Common, plugin: &c.Plugin, config: &c, timeout: nvml.DefaultTimeout,
	}
}

// run does everything except ending the process. It returns the exit status.
func run(ctx context.Context, args, env []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := newApp()
	a.Env, a.Stdin, a.Stdout, a.Stderr = env, stdin, stdout, stderr
	return a.Run(ctx, args, a.rootCommand()) //nolint:contextcheck // the verbs get ctx from cobra
}

func (a *app) rootCommand() *cobra.Command {
	return a.Command(&cobra.Command{
		Short: "Gives containers their GPUs through CDI",
		Long: `Lists the GPUs of a node, writes a CDI spec for them, keeps it up to date, and gives the GPUs to containers.

Options come from flags, then from the environment (--cdi-dir is GPU_CDI_CDI_DIR), then from the file of --config
(cdi-dir: DIR). gpu-cdi-plugin config default prints a file with all of them.`,
		Example: `  gpu-cdi-plugin devices
  gpu-cdi-plugin cdi generate --write
  gpu-cdi-plugin doctor`,
	},
		a.devicesCommand(),
		a.deviceCommand(),
		a.claimsCommand(),
		a.topologyCommand(),
		a.cdiCommand(),
		a.hookCommand(),
		a.serveCommand(),
		a.mpsCommand(),
		a.doctorCommand(),
		// Verbs of earlier versions.
		cli.Moved("manager", "device-manager serve", cli.Moved("checkpoint", "device-manager checkpoint")),
		cli.Moved("admit", "device-manager admit"),
		cli.Moved("release", "device-manager release for a pod, gpu-cdi-plugin device release for the driver"),
		cli.Moved("checkpoint", "device-manager checkpoint"),
		cli.Moved("pods", "device-manager pods"),
		cli.Moved("node", "device-manager node"),
		cli.Moved("conformance", "device-manager conformance"),
	)
}
