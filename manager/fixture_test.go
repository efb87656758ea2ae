package manager_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	gpu = "example.com/gpu"
	nic = "example.com/nic"
)

// node is a device manager with its directories, which stay over restarts.
type node struct {
	*testing.T
	o    manager.Options
	m    *manager.Manager
	stop context.CancelFunc
	done chan error // has the result of Run
}

// newNode starts a device manager. change changes its options first.
func newNode(t *testing.T, change ...func(*manager.Options)) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{T: t, o: manager.Options{
		Dir:       filepath.Join(dir, "plugins"),
		StateFile: filepath.Join(dir, "state"),
	}}
	for _, f := range change {
		f(&n.o)
	}
	n.start()
	t.Cleanup(func() {
		n.stop()
		_ = n.end()
	})
	return n
}

func (n *node) start() {
	n.Helper()
	m, err := manager.New(n.o)
	testenv.Must(n, err)
	ctx, cancel := context.WithCancel(context.Background())
	n.m, n.stop, n.done = m, cancel, make(chan error, 1)
	go func() { n.done <- m.Run(ctx) }()
}

// end waits until Run returns, and returns its error. Later calls return the same.
func (n *node) end() error {
	err := <-n.done
	n.done <- err
	return err
}

// restart ends the manager and starts it again with the same files.
func (n *node) restart() {
	n.Helper()
	n.stop()
	if err := n.end(); err != nil {
		n.Fatal("the manager ended with", err)
	}
	n.start()
}

// plugin serves a plugin and registers it. It waits until the manager has its devices.
func (n *node) plugin(resource string, devices ...*v1beta1.Device) *plugintest.Plugin {
	n.Helper()
	return n.pluginWith(resource, plugintest.Behaviour{}, devices...)
}

func (n *node) pluginWith(resource string, b plugintest.Behaviour, devices ...*v1beta1.Device) *plugintest.Plugin {
	n.Helper()
	p := plugintest.New(resource, devices...)
	p.Behave(b)
	n.serve(p, fmt.Sprintf("%s.sock", filepath.Base(resource)))
	n.register(p)
	return p
}

func (n *node) serve(p *plugintest.Plugin, socket string) {
	n.Helper()
	testenv.Must(n, p.Serve(filepath.Join(n.o.Dir, socket)))
	n.Cleanup(p.Stop)
}

// register registers a plugin that serves, and waits until the resource is connected with a list.
func (n *node) register(p *plugintest.Plugin) {
	n.Helper()
	testenv.Must(n, p.Register(n.Context(), filepath.Join(n.o.Dir, "kubelet.sock")))
	n.until(p.Resource+" is connected", func() bool {
		r := n.resource(p.Resource)
		return r.Connected && r.Capacity > 0
	})
}

// back restarts a plugin, and waits until the manager has so many devices of it that can be given to pods.
func (n *node) back(p *plugintest.Plugin, allocatable int) {
	n.Helper()
	p.Stop()
	n.until(p.Resource+" is disconnected", func() bool { return !n.resource(p.Resource).Connected })
	n.serve(p, filepath.Base(p.Resource)+".sock")
	n.register(p)
	n.until(fmt.Sprintf("%s has %d allocatable", p.Resource, allocatable), func() bool {
		return n.m.Counts()[p.Resource].Allocatable == allocatable
	})
}

// until waits for something that an event announces.
func (n *node) until(what string, happened func() bool) {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.Context(), time.Minute)
	defer cancel()
	events := n.m.Watch(ctx)
	for !happened() {
		if _, ok := <-events; !ok {
			n.Fatalf("it did not happen that %s; the resources are %+v", what, n.m.Resources())
		}
	}
}

func (n *node) resource(name string) manager.Resource {
	for _, r := range n.m.Resources() {
		if r.Name == name {
			return r
		}
	}
	return manager.Resource{}
}

// free are the healthy devices of a resource that no pod holds.
func (n *node) free(resource string) []string {
	var ids []string
	for _, d := range n.resource(resource).Devices {
		if d.Health == manager.Healthy && d.Pod == "" {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

// awaitCount waits until a resource has that count.
func (n *node) awaitCount(resource string, want manager.Count) {
	n.Helper()
	n.until(fmt.Sprintf("%s has %+v", resource, want), func() bool { return n.m.Counts()[resource] == want })
}

func (n *node) admit(p model.Pod) model.Placement {
	n.Helper()
	placement, err := n.m.Admit(n.Context(), p, model.Caller{})
	if err != nil {
		n.Fatalf("admit %s: %v", p.UID, err)
	}
	return placement
}

// admitMany admits pods of one device each at the same time.
func (n *node) admitMany(count int) {
	n.Helper()
	var pods sync.WaitGroup
	for i := range count {
		pods.Go(func() {
			if _, err := n.m.Admit(n.Context(), pod(fmt.Sprint(i), wants("main", gpu, 1)), model.Caller{}); err != nil {
				n.Error(err)
			}
		})
	}
	pods.Wait()
}

// refuses checks the message in the status of a pod that is rejected, and what the rejection wraps.
func (n *node) refuses(p model.Pod, message string, wraps ...error) {
	n.Helper()
	placement, err := n.m.Admit(n.Context(), p, model.Caller{})
	rejected, ok := errors.AsType[*manager.RejectedError](err)
	if !ok {
		n.Fatalf("admit %s: got the placement %+v and the error %v, want a rejection", p.UID, placement, err)
	}
	if want := "Allocate failed due to " + message + ", which is unexpected"; rejected.Message != want ||
		rejected.Reason != manager.ReasonUnexpected {
		n.Errorf("pod %s is rejected with\n%s: %s\nwant\n%s: %s", p.UID,
			rejected.Reason, rejected.Message, manager.ReasonUnexpected, want)
	}
	for _, err := range wraps {
		if !errors.Is(rejected, err) {
			n.Errorf("the rejection of pod %s does not wrap %q", p.UID, err)
		}
	}
}

func (n *node) release(uid string) {
	n.Helper()
	testenv.Must(n, n.m.Release(n.Context(), uid))
}

// pod is a pod with containers.
func pod(uid string, containers ...model.Container) model.Pod {
	return model.Pod{UID: uid, Namespace: "default", Name: "pod-" + uid, Containers: containers}
}

// wants is a container that asks for devices of a resource.
func wants(name, resource string, count int) model.Container {
	return model.Container{Name: name, Limits: map[string]int{resource: count}}
}

// ids are the devices of a container of a placement.
func ids(p model.Placement, container, resource string) []string {
	for _, a := range p.Allocations {
		if a.Container == container && a.Resource == resource {
			return a.IDs
		}
	}
	return nil
}
