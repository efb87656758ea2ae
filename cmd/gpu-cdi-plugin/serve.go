package main

import (
	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/agent/kubeapi"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/node"
)

func (a *app) serveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve this host's GPUs to the kubelet",
		Long: `Runs the device plugin: it advertises the GPUs to the kubelet and allocates them to containers. It writes
their CDI spec to --cdi-dir and keeps it up to date; devices are in the spec before they are advertised.

It runs until SIGTERM or SIGINT, then ends open calls and removes its sockets; the spec stays. It waits for the kubelet
and its directory, registers again when the kubelet restarts, and restarts itself when the driver was replaced. SIGHUP
reads the configuration again; an invalid one is logged, and the old one stays in use. Under systemd it reports
readiness and status, and notifies the watchdog (Type=notify).

With --take-over it takes the place of another serve, as in a rolling update: it reads the driver and registers with
the kubelet before the other one ends its plugin. If it cannot use the driver, the other one is not disturbed. It waits
while the other one resets a GPU or has released the driver. The other one then only reports health until SIGTERM; if
this one ends before that, the other one exits with status 1, so that its supervisor starts it again.

With --leave=unused it offers no devices by any door, so that the host can be cleaned up. It goes on to unprepare
ResourceClaims, and containers that have devices can restart. Its log and /readyz name who has devices. When nobody has
any, it exits with status 0; SIGTERM before that is an error. --leave=unprepared only waits for ResourceClaims, and not
for containers that got devices from the device plugin.

A container finds a description of each of its devices in ` + node.DescriptorsPath + `: UUID.json with index, model,
PCI address, NUMA node, memory and how the device is shared.

With sharing.mps (experimental) containers share GPUs by CUDA's multi-process service. Each such GPU needs a control
daemon: see gpu-cdi-plugin mps. While it is not ready, the GPU's devices are unhealthy.

Each extra that containers get besides GPUs (extras, imex) has its own spec file. The file stays when the extra is no
longer configured, since running containers may need it to restart; cdi remove removes it.

The hook, the driver's library and the directories that serve writes to must belong to root, with all directories above
them. Otherwise serve does not start, unless --insecure-paths allows it.

A device whose UUID another CDI spec file also defines is unhealthy; the log and /readyz name that file. If other files
define all devices, as the vendor's own spec does, serve does not start.

A GPU that does not answer is unhealthy after --gpu-timeout; the others are served. Without a driver serve exits, or
waits for one with --fail-on-init-error=false.

At the socket control.sock in --runtime-dir, root and the user of serve can take devices out of service, reset them and
release the driver: see gpu-cdi-plugin device.

In a pod, --report-health reports the health of the devices to the API server: events are Events about the Node, and
node-condition is its condition ` + kubeapi.ConditionType + `. The node's name comes from the variable NODE_NAME.

--listen serves /metrics, /healthz and /readyz. Ready means that all resources are registered and watched, and that the
devices can be given to containers unless the GPUs themselves are at fault.`,
		Example: `  gpu-cdi-plugin serve
  gpu-cdi-plugin serve --config /etc/gpu-cdi-plugin/config.yaml --listen 127.0.0.1:9400
  gpu-cdi-plugin serve --mig-strategy mixed --strategy cdi-cri,device-specs`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.NoDriver, cli.Locked, cli.Unreachable,
			cli.Interrupted),
		PersistentPreRunE: a.startService,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.runService(cmd, agent.Serve) },
	}
	cmd.Flags().AddFlagSet(a.ServiceFlags)
	return cmd
}
