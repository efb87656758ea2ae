package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/sdnotify"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// Watch keeps the CDI spec of all GPUs up to date until ctx ends. NeedsRestart says for which errors the process must
// restart.
func Watch(ctx context.Context, o *Options) error {
	w := &watcher{opts: o, metrics: metrics.New(o.Build), changed: wake.New()}
	offer := func() resource.Config { return w.offer(&o.Config) }
	options := nodeOptions(o, files{spec: ownSpec(&o.Config)}, offer, w.metrics, nil)
	options.Rest = w.rest
	w.node = node.New(options)
	d := &daemon{
		opts: o, role: w, node: w.node, metrics: w.metrics, changed: w.changed, systemd: sdnotify.New(o.Env),
	}
	return d.run(ctx)
}

// watcher is the role of Watch, which only keeps the spec up to date.
type watcher struct {
	opts    *Options
	node    *node.Reconciler
	metrics *metrics.Metrics
	changed wake.Chan
}

var _ role = (*watcher)(nil)

func (w *watcher) publish(state node.State) {
	w.metrics.Advertised(state)
	w.changed.Wake()
}

func (w *watcher) check(fresh *Options) error {
	return fresh.Trust.CheckDir("cdi-dir", fresh.Config.CDIDir)
}

// offer returns all GPUs and MIG devices, whatever the configuration says.
func (w *watcher) offer(*config.Config) resource.Config {
	return resource.Config{Resource: config.Default().Resource, MIGStrategy: resource.MIGMixed}
}

// use does nothing, since all devices are in the spec whatever the configuration says.
func (w *watcher) use(*config.Config) {}

// rest closes the driver if a GPU may suspend: one that nothing uses would otherwise stay awake for as long as the
// service runs. The spec needs no driver until something changes.
func (w *watcher) rest(ctx context.Context) bool {
	s := w.node.State().Snapshot
	return slices.ContainsFunc(s.Devices, func(d gpu.Device) bool {
		return host.MaySuspend(w.opts.Host, d.PCIBusID)
	}) && w.opts.Driver.CloseIdle(ctx)
}

// ready returns an error if the node has devices and there is no spec. Whether containers can get the devices of a
// spec is reported by State.Ready.
func (w *watcher) ready() error {
	s := w.node.State()
	if s.Snapshot == nil || s.Spec != nil {
		return nil
	}
	if err := cmp.Or(s.Err, s.Snapshot.Unreadable()); err != nil {
		return fmt.Errorf("there is no CDI spec: %w", err)
	}
	for _, r := range s.Resources {
		if len(r.Devices) > 0 {
			return fmt.Errorf("there is no CDI spec: %s: %s", r.Devices[0].UUID, r.Devices[0].Reason)
		}
	}
	return nil
}

// summary says how many of the node's devices containers can get, such as "7 of 8 devices in PATH".
func (w *watcher) summary() []string {
	all, healthy := 0, 0
	for _, r := range w.node.State().Resources {
		all += len(r.Devices)
		for i := range r.Devices {
			if r.Devices[i].Healthy {
				healthy++
			}
		}
	}
	return []string{fmt.Sprintf("%d of %s in %s", healthy, wording.Count(all, "device"), ownSpec(&w.opts.Config))}
}

func (w *watcher) remarks() []node.Remark { return nil }

func (w *watcher) keepOpen(context.Context) (until string, opened <-chan struct{}) { return "", nil }

func (w *watcher) run(ctx context.Context, node actor) error {
	return errors.Join(node(ctx), w.node.Unlock())
}
