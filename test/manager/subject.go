// Package manager tests the device manager as a whole: its behaviour compared with the kubelet's, its state after it is
// killed, and its work with other projects' device plugins.
package manager

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sync/errgroup"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/podresources"
	"gpu-cdi-plugin/test/manager/behaviour"
)

// Node is this project's device manager on a directory.
type Node struct {
	*manager.Manager

	config  behaviour.Config
	changes chan string
	stop    context.CancelFunc
	done    chan error
}

var _ behaviour.Manager = (*Node)(nil)

// New returns a manager that has not been booted.
func New(_ testing.TB, c behaviour.Config) behaviour.Manager {
	return &Node{config: c, changes: make(chan string, 10_000)}
}

// Boot starts the manager. It ignores the argument, since the manager knows its pods.
func (n *Node) Boot(behaviour.Boot) error {
	m, err := manager.New(manager.Options{
		Dir: n.config.Dir, RegistryDir: n.config.Registry, StateFile: n.StateFile(),
		Topology: admission.Topology{
			Policy: admission.Policy(n.config.Policy), Scope: admission.Scope(n.config.Scope),
			Machine: admission.NodesOf(n.config.NUMANodes...),
		},
		Deadlines: endpoint.Deadlines{Grace: n.config.Grace},
		Log:       slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	n.Manager, n.stop, n.done = m, cancel, make(chan error, 1)
	if err := os.MkdirAll(filepath.Dir(n.PodResources()), 0o750); err != nil {
		cancel()
		return err
	}
	l, err := podresources.Listen(ctx, n.PodResources(), unixsocket.OwnerOnly)
	if err != nil {
		cancel()
		return errors.Join(err, m.Run(ctx))
	}
	events := m.Watch(ctx)
	go func() {
		for e := range events {
			var uids []string
			for _, d := range e.Devices {
				uids = append(uids, d.Pod)
			}
			slices.Sort(uids)
			for _, uid := range slices.Compact(uids) {
				n.changes <- uid
			}
		}
	}()
	var reading errgroup.Group
	reading.Go(func() error { return (&podresources.Server{Manager: m}).Run(ctx, l) })
	go func() {
		err := m.Run(ctx)
		cancel()
		n.done <- errors.Join(err, reading.Wait())
	}()
	return nil
}

// Stop stops the manager.
func (n *Node) Stop() error {
	n.stop()
	err := <-n.done
	n.done <- nil // for a second call
	return err
}

// Admit admits a pod.
func (n *Node) Admit(ctx context.Context, p model.Pod) error {
	_, err := n.Manager.Admit(ctx, p, model.Caller{})
	return err
}

// Start returns a container's run options.
func (n *Node) Start(ctx context.Context, p model.Pod, container string) (model.RunOptions, error) {
	return n.Manager.Start(ctx, p.UID, container)
}

// Ended records that a container has ended.
func (n *Node) Ended(p model.Pod, container string) error {
	return n.Manager.Ended(context.Background(), p.UID, container)
}

// Release releases a pod.
func (n *Node) Release(p model.Pod) error { return n.Manager.Release(context.Background(), p.UID) }

// Counts returns the counts of a resource.
func (n *Node) Counts(resource string) behaviour.Counts {
	c := n.Manager.Counts()[resource]
	return behaviour.Counts{Capacity: c.Capacity, Allocatable: c.Allocatable}
}

// Devices returns the devices of a container's allocations.
func (n *Node) Devices(p model.Pod, container string) map[string][]string {
	devices := map[string][]string{}
	placement, _ := n.Pod(p.UID)
	for _, a := range placement.Allocations {
		if a.Container == container {
			devices[a.Resource] = a.IDs
		}
	}
	return devices
}

// Health returns the health of a pod's devices.
func (n *Node) Health(p model.Pod) map[string]map[string]string {
	health := map[string]map[string]string{}
	for _, r := range n.Resources() {
		for _, d := range r.Devices {
			if d.Pod != p.UID {
				continue
			}
			if health[r.Name] == nil {
				health[r.Name] = map[string]string{}
			}
			health[r.Name][d.ID] = string(d.Health)
		}
	}
	return health
}

// HealthChanges returns the pods of the events about health.
func (n *Node) HealthChanges() <-chan string { return n.changes }

// PodResources returns the path of the service's socket.
func (n *Node) PodResources() string {
	return filepath.Join(n.config.Dir, "pod-resources", "kubelet.sock")
}

// StateFile returns the path of the file with the placements.
func (n *Node) StateFile() string { return filepath.Join(n.config.Dir, "placements.json") }

// Expire does nothing: the cases that need it give the manager a short grace period.
func (n *Node) Expire() {}
