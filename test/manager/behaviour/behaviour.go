// Package behaviour describes what a device manager does, as the plugins and pods of a node see it, in cases that drive
// any implementation through its sockets. They run with this project's device manager and with the kubelet's. Where the
// two differ, the case says how.
//
// The cases mirror the tests of the kubelet's device manager, of its plugin watcher and of its PodResources service,
// and the end-to-end tests of a node that concern devices. Each case names what it mirrors.
package behaviour

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Manager is a device manager that a case drives. Its directory has kubelet.sock and the sockets of the plugins.
type Manager interface {
	// Boot starts the manager in its directory, with the state that it stored there.
	Boot(Boot) error
	// Stop stops the manager. Its state stays.
	Stop() error

	// Admit admits a pod. The text of an error has the reason and the message of the pod's status.
	Admit(context.Context, model.Pod) error
	// Start returns the run options of a container that is about to start.
	Start(ctx context.Context, pod model.Pod, container string) (model.RunOptions, error)
	// Ended records that a container has ended for good.
	Ended(pod model.Pod, container string) error
	// Release records that a pod is no longer active.
	Release(pod model.Pod) error

	// Counts returns the numbers of a resource in the Node's status, or zero for an unknown resource.
	Counts(resource string) Counts
	// Devices returns the IDs of the devices that a container has, by resource, sorted.
	Devices(pod model.Pod, container string) map[string][]string
	// Health returns the health of the devices of a pod's containers, by resource and ID.
	Health(pod model.Pod) map[string]map[string]string
	// HealthChanges returns a channel of UIDs of pods. A pod is sent whenever the health of one of its devices changes.
	HealthChanges() <-chan string
	// PodResources returns the path of the socket of the PodResources service.
	PodResources() string
	// Expire ends the grace period of all plugins that are gone, unless Config sets the period.
	Expire()
	// StateFile returns the path of the file with the placements.
	StateFile() string
}

// Counts are the numbers of a resource's devices in a Node's status.
type Counts struct{ Capacity, Allocatable int }

// Boot is the state of the node in which a manager starts.
type Boot struct {
	// NotReady means that the kubelet has not yet been told all its pods. Managers without a kubelet know their pods.
	NotReady bool
	// Running are the containers that run.
	Running []Container
}

// Container is a container of a pod.
type Container struct{ UID, Name string }

// Config describes the node of a manager.
type Config struct {
	// Dir has the sockets of the plugins, Registry those of the plugin watcher.
	Dir, Registry string
	// NUMANodes are the NUMA nodes of the machine. The default is 0 and 1.
	NUMANodes []int
	// Grace is how long a resource without a plugin keeps its devices. The default is the kubelet's, five minutes.
	Grace time.Duration
	// Policy and Scope configure the Topology Manager. The defaults are none and container.
	Policy, Scope string
}

// Subject is an implementation of a device manager.
type Subject struct {
	Name string
	// New returns a manager that has not been booted.
	New func(testing.TB, Config) Manager
	// Kubelet means that the manager is the kubelet's.
	Kubelet bool
}

// Case is a behaviour.
type Case struct {
	// Name says what the manager does.
	Name string
	// Mirrors is the test of Kubernetes or the fault that the case is about.
	Mirrors string
	// Kubelet and Here say what the kubelet and this project's manager do, if that differs.
	Kubelet, Here string
	// OursOnly means that the case does not run with a kubelet, which would crash or wait for ever.
	OursOnly bool
	// Config describes the node, without its directories.
	Config Config
	Run    func(*Node)
}

// Cases returns all cases.
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
	n.config.Dir = MakeDirectory(t)
	n.config.Registry = filepath.Join(n.config.Dir, "registry")
	testenv.Must(t, os.Mkdir(n.config.Registry, 0o750))
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

// MakeDirectory creates a directory with a short name, since paths of sockets have at most 107 bytes. The kubelet's
// device manager recreates its directory and writes into it shortly after it was stopped.
func MakeDirectory(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dm") //nolint:usetesting // its names are long, and it minds late files
	testenv.Must(t, err)
	t.Cleanup(func() {
		testenv.Eventually(t, dir+" stays removed", func() bool {
			err := os.RemoveAll(dir)
			time.Sleep(20 * time.Millisecond)
			_, stat := os.Stat(dir)
			return err == nil && errors.Is(stat, os.ErrNotExist)
		})
	})
	return dir
}
