package kubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

// simDir is the simulation's own directory in a node, and in the containers on it.
const simDir = "/run/gpu-sim"

// gpuName is the resource of whole GPUs.
const gpuName = "nvidia.com/gpu"

// fixture is the node that all tests share, with a machine's GPUs and the plugin under test.
type fixture struct {
	*Node
	gpus   *sim.Node
	plugin *Daemon
}

// setUp gives the shared node a machine's GPUs and starts the plugin with the flags. Tests that use it run one at a
// time; each begins on a node without pods and without a plugin.
func setUp(t *testing.T, machine string, flags ...string) *fixture {
	t.Helper()
	return setUpOn(t, simtest.Node(t, machine), flags...)
}

// setUpOn does the same with a machine that exists.
func setUpOn(t *testing.T, gpus *sim.Node, flags ...string) *fixture {
	t.Helper()
	f := &fixture{gpus: gpus}
	program := shared.Program(t, "gpu-cdi-plugin")
	if node == nil {
		node = start(t)
	}
	f.Node = node
	f.plugin = f.serveAs(t, program, flags...)
	t.Cleanup(func() { f.tearDown(t) })
	return f
}

// serve starts the plugin on the machine's GPUs.
func (f *fixture) serve(t *testing.T, flags ...string) *Daemon {
	t.Helper()
	return f.serveAs(t, shared.Program(t, "gpu-cdi-plugin"), flags...)
}

// serveAs starts the program at a path as the plugin.
func (f *fixture) serveAs(t *testing.T, program string, flags ...string) *Daemon {
	t.Helper()
	// The machine's files are under /tmp, which all users can write to.
	args := append([]string{program, "--root", f.gpus.Root(), "--insecure-paths", "serve"}, flags...)
	d := f.NewDaemon("plugin", args...)
	testenv.Must(t, d.Start())
	return d
}

// copyOfPlugin copies the plugin's programs to another place and returns the path of the plugin there.
func (f *fixture) copyOfPlugin(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(f.gpus.Root(), "upgraded")
	testenv.Must(t, image.Copy(filepath.Dir(shared.Program(t, "gpu-cdi-plugin")), dir))
	return filepath.Join(dir, "gpu-cdi-plugin")
}

// writeConfig writes a configuration file for the plugin and returns the flag that names it.
func writeConfig(t *testing.T, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	testenv.Must(t, os.WriteFile(file, []byte(content), 0o644))
	return "--config=" + file
}

// tearDown stops the plugin and removes the pods. If the test failed it logs the ends of the daemons' logs.
func (f *fixture) tearDown(t *testing.T) {
	ctx := context.Background() // the test's own has ended
	if t.Failed() {
		t.Logf("the end of the plugin's log:\n%s\nthe end of the kubelet's log:\n%s",
			kubenode.Tail(f.plugin.Log(), 60), kubenode.Tail(f.Kubelet.Log(), 40))
	}
	for _, d := range []*Daemon{f.Containerd, f.Kubelet} {
		if !d.Running() {
			t.Errorf("%s has ended:\n%s", d.Name, kubenode.Tail(d.Log(), 30))
		}
	}
	if err := errors.Join(f.plugin.Kill(), os.Remove(f.plugin.LogFile), f.RemovePods(ctx)); err != nil {
		t.Error(err)
	}
}

// awaitDevices waits until exactly these devices of a resource are healthy for the kubelet.
func (f *fixture) awaitDevices(t *testing.T, resource string, want []string) {
	t.Helper()
	want = slices.Sorted(slices.Values(want))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err := kubenode.Wait(ctx, time.Minute, "the kubelet has the devices", func() error {
		if len(want) > 0 && f.plugin != nil && !f.plugin.Running() {
			cancel()
			return errors.New("the plugin has ended")
		}
		all, err := f.Allocatable(t.Context())
		if err != nil {
			return err
		}
		if diff := cmp.Diff(want, slices.Clip(all[resource])); diff != "" && len(want)+len(all[resource]) > 0 {
			return fmt.Errorf("healthy devices of %s (-want +got):\n%s", resource, diff)
		}
		return nil
	})
	testenv.Must(t, err)
}

func (f *fixture) snapshot(t *testing.T) *gpu.Snapshot {
	t.Helper()
	s, err := f.gpus.Snapshot()
	testenv.Must(t, err)
	return s
}

// uuids returns the UUIDs of the machine's whole GPUs.
func (f *fixture) uuids(t *testing.T) (list []string) {
	t.Helper()
	for _, d := range f.snapshot(t).Devices {
		list = append(list, d.UUID)
	}
	return list
}

// newPod returns a pod that requests count devices of a resource. A number follows its name: the kubelet starts a
// static pod only after the end of an earlier one of the same name.
func newPod(name, resource string, count int) Pod {
	p := Pod{Name: fmt.Sprintf("%s-%d", name, numbers.Add(1)), Image: gpuImage}
	if count > 0 {
		p.Limits = map[string]int{resource: count}
	}
	return p
}

// expectRefusal applies a pod that the kubelet must refuse for lack of devices.
func (f *fixture) expectRefusal(t *testing.T, p Pod) {
	t.Helper()
	testenv.Must(t, f.Apply(p))
	s, err := f.Await(t.Context(), p.Name, "is refused", func(s PodStatus) bool { return s.Phase == "Failed" })
	testenv.Must(t, err)
	if s.Reason != "UnexpectedAdmissionError" {
		t.Errorf("the pod was refused with the reason %s: %s", s.Reason, s.Message)
	}
}

// launch starts a pod and waits until its container runs. The simulation's directory is mounted into it: there the
// simulated driver finds what has changed since the machine was made. The real one would ask the kernel.
func (f *fixture) launch(t *testing.T, p Pod) PodStatus {
	t.Helper()
	p.Directories = map[string]string{simDir: filepath.Join(f.gpus.Root(), simDir)}
	testenv.Must(t, f.Apply(p))
	s, err := f.Await(t.Context(), p.Name, "runs", func(s PodStatus) bool { return s.Running || s.Phase == "Failed" })
	testenv.Must(t, err)
	if !s.Running || s.Restarts > 0 {
		t.Fatalf("pod %s does not run: %+v", p.Name, s)
	}
	return s
}

// given returns the IDs of the devices that the kubelet allocated to a pod. They must be as many as it requested, and
// nothing else.
func (f *fixture) given(t *testing.T, p Pod) []string {
	t.Helper()
	pods, err := f.Assigned(t.Context())
	testenv.Must(t, err)
	devices, ok := pods[p.Name]
	if !ok {
		t.Fatalf("the kubelet does not list pod %s among %v", p.Name, slices.Sorted(maps.Keys(pods)))
	}
	counts, ids := map[string]int{}, []string{}
	for resource, list := range devices {
		counts[resource] = len(list)
		ids = append(ids, list...)
	}
	if diff := cmp.Diff(p.Limits, counts); diff != "" && len(p.Limits)+len(counts) > 0 {
		t.Fatalf("devices of pod %s (-requested +allocated):\n%s", p.Name, diff)
	}
	slices.Sort(ids)
	return ids
}

// check checks that a running pod sees exactly the devices that the kubelet allocated to it. It returns their IDs.
func (f *fixture) check(t *testing.T, p Pod, s PodStatus) []string {
	t.Helper()
	ids := f.given(t, p)
	if got, want := f.listGPUs(t, s), f.addParents(t, ids); !slices.Equal(got, want) {
		t.Errorf("GPUs in pod %s, which has %v (-want +got):\n%s", p.Name, ids, cmp.Diff(want, got))
	}
	return ids
}

var uuid = regexp.MustCompile(`\(UUID: (\S+)\)`)

// listGPUs returns the UUIDs that nvidia-smi lists in a container, sorted. A container without GPUs has no nvidia-smi;
// it must not have device nodes either.
func (f *fixture) listGPUs(t *testing.T, s PodStatus) []string {
	t.Helper()
	const smi = "/usr/bin/nvidia-smi"
	out := f.inPod(t, s, "sh", "-c", `[ ! -e "$0" ] && ls /dev || exec "$0" -L`, smi)
	list := []string{}
	for _, m := range uuid.FindAllStringSubmatch(out, -1) {
		list = append(list, m[1])
	}
	if len(list) == 0 && strings.Contains(out, "nvidia") {
		t.Errorf("pod %s sees no GPU and has device nodes: %s", s.Name, out)
	}
	slices.Sort(list)
	return list
}

// inPod runs a program in a pod's container and returns its output. The program must succeed.
func (f *fixture) inPod(t *testing.T, s PodStatus, args ...string) string {
	t.Helper()
	res, err := f.Exec(t.Context(), s.Container, args...)
	testenv.Must(t, err)
	if res.Code != 0 {
		t.Fatalf("run %s in pod %s: %v", strings.Join(args, " "), s.Name, res)
	}
	return res.Stdout
}

// addParents returns the UUIDs that nvidia-smi lists for devices: their own, and of MIG devices their GPUs' too.
func (f *fixture) addParents(t *testing.T, ids []string) []string {
	t.Helper()
	parents := map[string]string{}
	for _, d := range f.snapshot(t).Devices {
		for _, m := range d.MIG {
			parents[m.UUID] = d.UUID
		}
	}
	all := []string{}
	for _, id := range ids {
		uuid, _, _ := strings.Cut(id, "::")
		all = append(all, uuid)
		if parent, ok := parents[uuid]; ok {
			all = append(all, parent)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// checkDisjoint checks that no device is in two of the lists.
func checkDisjoint(t *testing.T, lists ...[]string) {
	t.Helper()
	all := slices.Concat(lists...)
	slices.Sort(all)
	if n := len(all); len(slices.Compact(all)) != n {
		t.Errorf("a device was allocated to two pods: %v", lists)
	}
}
