package main

import (
	"cmp"
	"fmt"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

func (a *app) watchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Keep the CDI spec up to date on a host without a kubelet",
		Long: `Writes the CDI spec of this host's GPUs to --cdi-dir, as cdi generate --write does, and keeps it up to date
until SIGTERM or SIGINT: for podman, docker and containerd without Kubernetes. It writes a new spec when GPUs or MIG
devices come or go, when the driver was replaced, and when the spec was changed or removed. The spec stays at the end.

Metrics, SIGHUP and systemd (Type=notify) work as for serve. Ready means that the driver was read and that the spec is
written, if the host has GPUs. serve keeps the spec up to date as well, so only one of the two can run for the same
spec.`,
		Example: `  gpu-cdi-plugin cdi watch
  gpu-cdi-plugin cdi watch --fail-on-init-error=false --listen 127.0.0.1:9400`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.NoDriver, cli.Locked,
			cli.Interrupted),
		PersistentPreRunE: a.startDaemon,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.cdiWatch(cmd) },
	}
	for _, name := range []string{"listen", "gpu-timeout", "fail-on-init-error"} {
		cmd.Flags().AddFlag(a.ServiceFlags.Lookup(name))
	}
	a.addExtras(cmd)
	return cmd
}

func (a *app) cdiWatch(cmd *cobra.Command) error {
	var d *daemon
	d, err := a.newDaemon(a.ownSpec(), "", "", watchOffer, func(state node.State) {
		d.metrics.Advertised(state)
		d.wake.Wake()
	})
	if err != nil {
		return err
	}
	d.admit = func(fresh *app) error { return fresh.CheckDir("cdi-dir", fresh.CDIDir) }
	d.ready = func() error { return checkSpec(d.node.State()) }
	d.summary = func() []string { return []string{countOffered(d.node.State()) + " in " + a.ownSpec()} }
	return d.run(cmd)
}

// watchOffer is what is offered without a kubelet: all GPUs and MIG devices, whatever the configuration says.
func watchOffer(*app) resource.Config {
	return resource.Config{Resource: config.Default().Resource, MIGStrategy: resource.MIGMixed}
}

// checkSpec returns an error while the node has devices and no spec. State.Ready reports whether the devices of an
// existing spec can be given to containers.
func checkSpec(s node.State) error {
	if s.Snapshot == nil || s.Spec != nil {
		return nil
	}
	if err := cmp.Or(s.Err, unreadableGPUs(s.Snapshot)); err != nil {
		return fmt.Errorf("there is no CDI spec: %w", err)
	}
	for _, r := range s.Resources {
		if len(r.Devices) > 0 {
			return fmt.Errorf("there is no CDI spec: %s: %s", r.Devices[0].UUID, r.Devices[0].Reason)
		}
	}
	return nil
}

// countOffered returns how many of the node's devices can be given to containers: "7 of 8 devices".
func countOffered(s node.State) string {
	all, healthy := 0, 0
	for _, r := range s.Resources {
		all += len(r.Devices)
		for i := range r.Devices {
			if r.Devices[i].Healthy {
				healthy++
			}
		}
	}
	return fmt.Sprintf("%d of %s", healthy, cli.Plural(all, "device"))
}
