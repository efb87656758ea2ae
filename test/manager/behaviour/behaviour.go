// Package behaviour is what a device manager does, as the plugins and the pods of a node see it: cases that drive any
// implementation through its sockets. They run with this project's device manager and with the kubelet's own. Where the
// two differ, the case says how.
//
// The cases mirror the tests of the kubelet's device manager, of its plugin watcher and of its PodResources service,
// and those end-to-end tests of a node that are about devices. Each case names what it mirrors.
package behaviour

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"gpu-cdi-plugin/manager/model"
)

// Manager is a device manager as a case drives it. It has a directory with kubelet.sock and the sockets of the plugins.
type Manager interface {
	// Boot starts the manager in its directory, with what it stored there.
	Boot(Boot) error
	// Stop ends the manager. Its state stays.
	Stop() error

	// Admit admits a pod. The text of an error has the reason and the message of the pod's status.
	Admit(context.Context, model.Pod) error
	// Start returns the run options of a container that is about to start.
	Start(ctx context.Context, pod model.Pod, container string) (model.RunOptions, error)
	// Ended says that a container has ended for good.
	Ended(pod model.Pod, container string) error
	// Release says that a pod is no longer active.
	Release(pod model.Pod) error

	// Counts returns what a Node's status says of a resource. It is zero for a resource that the manager does not know.
	Counts(resource string) Counts
	// Devices returns the IDs of the devices that a container has, by resource, sorted.
	Devices(pod model.Pod, container string) map[string][]string
	// Health returns the health of the devices of a pod's containers, by resource and ID.
	Health(pod model.Pod) map[string]map[string]string
	// HealthChanges returns the UIDs of pods, each when a device of the pod has changed its health.
	HealthChanges() <-chan string
	// PodResources is the path of the socket of the PodResources service.
	PodResources() string
	// Expire makes the grace period of all plugins that are gone end, if it is not that of Config.
	Expire()
	// StateFile is the path of the file with what was placed.
	StateFile() string
}

// Counts are the numbers of a resource's devices in a Node's status.
type Counts struct{ Capacity, Allocatable int }

// Boot is in which state of the node a manager starts.
type Boot struct {
	// NotReady is whether the kubelet has not yet heard of all its pods. Managers without a kubelet know theirs.
	NotReady bool
	// Running are the containers that run.
	Running []Container
}

// Container is a container of a pod.
type Container struct{ UID, Name string }

// Config is the node of a manager.
type Config struct {
	// Dir has the sockets of the plugins, Registry those of the plugin watcher.
	Dir, Registry string
	// NUMANodes are the NUMA nodes of the machine. The default is 0 and 1.
	NUMANodes []int
	// Grace is how long a resource without a plugin keeps its devices. The default is the kubelet's, five minutes.
	Grace time.Duration
	// Policy and Scope are those of the Topology Manager. The defaults are none and container.
	Policy, Scope string
}

// Subject is an implementation of a device manager.
type Subject struct {
	Name string
	// New returns a manager that was not booted.
	New func(testing.TB, Config) Manager
	// Kubelet is whether it is the kubelet's.
	Kubelet bool
}

// Case is a behaviour.
type Case struct {
	// Name says what the manager does.
	Name string
	// Mirrors is the test of Kubernetes or the fault that the case is about.
	Mirrors string
	// Kubelet and Here say what the kubelet and this project's manager do, where that differs.
	Kubelet, Here string
	// OursOnly is whether the case does not run with a kubelet, which would crash or wait for ever.
	OursOnly bool
	// Config is the node, without its directories.
	Config Config
	Run    func(*Node)
}

// Cases are all cases.
func Cases() []Case {
	var all []Case
	for _, group := range [][]Case{
		registration, devices, admission, initContainers, preferred, topology, containers, restarts, health,
		podResources, watcher, faults, hostile,
	} {
		all = append(all, group...)
	}
	return all
}

// Test runs all cases with a subject.
func Test(t *testing.T, s Subject) {
	for _, c := range Cases() {
		if c.OursOnly && s.Kubelet {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			test(t, s, c)
		})
	}
}

func test(t *testing.T, s Subject, c Case) {
	n := &Node{T: t, config: c.Config, differs: c.Kubelet != "" && !c.OursOnly}
	n.kubelet = s.Kubelet && c.Kubelet != ""
	n.config.Dir = makeDirectory(t)
	n.config.Registry = filepath.Join(n.config.Dir, "registry")
	if err := os.Mkdir(n.config.Registry, 0o750); err != nil {
		t.Fatal(err)
	}
	if n.config.NUMANodes == nil {
		n.config.NUMANodes = []int{0, 1}
	}
	if n.config.Policy == "" {
		n.config.Policy = "none"
	}
	if n.config.Scope == "" {
		n.config.Scope = "container"
	}
	n.Manager = s.New(t, n.config)
	n.boot(Boot{})
	t.Cleanup(func() {
		if err := n.Stop(); err != nil {
			t.Errorf("stop the manager: %v", err)
		}
	})
	c.Run(n)
	if n.differs && !n.asked && !t.Failed() && !t.Skipped() {
		t.Error("the case names a difference, and has only one expectation")
	}
}

// makeDirectory makes a directory with a short name, as the paths of sockets have at most 107 bytes. The kubelet's
// device manager writes into its directory shortly after it was stopped, and makes it again for that.
func makeDirectory(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dm") //nolint:usetesting // its names are long, and it minds late files
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
			err := os.RemoveAll(dir)
			time.Sleep(20 * time.Millisecond)
			if _, stat := os.Stat(dir); err == nil && errors.Is(stat, os.ErrNotExist) {
				return
			}
		}
		t.Errorf("%s cannot be removed", dir)
	})
	return dir
}
