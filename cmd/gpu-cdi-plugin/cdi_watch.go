package main

import (
	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/internal/cli"
)

func (a *app) watchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Keep the CDI spec up to date on a host without a kubelet",
		Long: `Writes the CDI spec of this host's GPUs to --cdi-dir, as cdi generate --write does, and keeps it up to
date until SIGTERM or SIGINT: for podman, docker and containerd without Kubernetes. It writes a new spec when GPUs or
MIG devices come or go, when the driver was replaced, and when the spec was changed or removed. The spec remains when
cdi watch ends. Where a GPU has runtime power management on and nothing uses a GPU, the driver is closed until something
changes, so that the GPU can suspend.

Metrics, SIGHUP and systemd (Type=notify) work as for serve. Ready means that the driver was read and that the spec is
written, if the host has GPUs. serve keeps the spec up to date as well, so only one of the two can run for the same
spec.`,
		Example: `  gpu-cdi-plugin cdi watch
  gpu-cdi-plugin cdi watch --fail-on-init-error=false --listen 127.0.0.1:9400`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.NoDriver, cli.Locked,
			cli.Interrupted),
		PersistentPreRunE: a.startService,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.runService(cmd, agent.Watch) },
	}
	for _, name := range []string{"listen", "gpu-timeout", "fail-on-init-error"} {
		cmd.Flags().AddFlag(a.ServiceFlags.Lookup(name))
	}
	a.addExtras(cmd)
	return cmd
}
