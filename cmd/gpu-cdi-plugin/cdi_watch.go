package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/node"
)

func (a *app) watchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Keep the CDI spec true on a host without a kubelet",
		Long: `Writes the CDI spec of this host's GPUs to --cdi-dir, as cdi generate --write does, and keeps it true until
SIGTERM or SIGINT: for podman, docker and containerd without Kubernetes. It writes a new spec when GPUs or MIG devices
come or go, when the driver was replaced, and when the spec was changed or removed. The spec stays at the end.

Metrics, readiness, SIGHUP and systemd (Type=notify) work as for serve. serve keeps the spec true as well, so only one
of the two can run for the same spec.`,
		Example: `  gpu-cdi-plugin cdi watch
  gpu-cdi-plugin cdi watch --fail-on-init-error=false --listen 127.0.0.1:9400`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.NoDriver, cli.Locked,
			cli.Interrupted),
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		PersistentPreRunE: a.startDaemon,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.cdiWatch(cmd) },
	}
	for _, name := range []string{"listen", "gpu-timeout", "fail-on-init-error"} {
		cmd.Flags().AddFlag(a.pluginFlags.Lookup(name))
	}
	a.addExtras(cmd)
	return cmd
}

func (a *app) cdiWatch(cmd *cobra.Command) error {
	var d *daemon
	d, err := a.newDaemon(a.ownSpec(), "", func(state node.State) {
		d.metrics.Advertised(state)
		d.changed.Wake()
	})
	if err != nil {
		return err
	}
	if err := a.checkSafeDir(optionDir{"cdi-dir", a.CDIDir}); err != nil {
		return err
	}
	d.everything = true
	d.summary = func() []string {
		state := d.node.State()
		return []string{fmt.Sprintf("%s has %s", a.ownSpec(), plural(specDevices(&state), "device name"))}
	}
	return d.run(cmd)
}

func specDevices(s *node.State) int {
	if s.Spec == nil {
		return 0
	}
	return len(s.Spec.Devices)
}
