package kubelet

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	// verbose makes the plugin log each preparation.
	verbose = "--log-level=debug"
	// clean is a policy that refuses a GPU only for its memory: the plugin sees no processes of a simulated machine.
	clean = "prestart: {policy: clean}"
)

// TestAPodIsRefusedUntilItsGPUIsClean requests all GPUs, one of which has memory in use. The pod's status has the
// cause, and the pod starts by itself when the memory is free.
func TestAPodIsRefusedUntilItsGPUIsClean(t *testing.T) {
	f := setUp(t, "pcie-quad", writeConfig(t, clean))
	all := f.uuids(t)
	f.awaitDevices(t, gpuName, all)
	f.set(t, all[2], map[string]string{"memory-used": "2GiB"})
	p := newPod("waiting", gpuName, len(all))
	testenv.Must(t, f.Apply(p))
	f.awaitNotPrepared(t, p, all[2], "2048 MiB are in use")
	f.set(t, all[2], map[string]string{"memory-used": "default"})
	s, err := f.Await(t.Context(), p.Name, "runs", func(s PodStatus) bool { return s.Running })
	testenv.Must(t, err)
	if s.Restarts > 0 {
		t.Errorf("the container was restarted: %+v", s)
	}
	if ids := f.given(t, p); !slices.Equal(ids, slices.Sorted(slices.Values(all))) {
		t.Errorf("the pod has %v, want %v", ids, all)
	}
}

// TestDevicesArePreparedAgainForARestartedContainer kills a container. The kubelet starts it again with the same GPU,
// which is prepared again, and is refused while it is not clean.
func TestDevicesArePreparedAgainForARestartedContainer(t *testing.T) {
	f := setUp(t, "pcie-quad", verbose, writeConfig(t, clean))
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := newPod("again", gpuName, 1)
	first := f.launch(t, p)
	ids := f.check(t, p, first)
	if n := f.prepared(ids[0]); n != 1 {
		t.Errorf("the GPU was prepared %d times for a container that started once", n)
	}
	f.killContainer(t, first)
	second := f.awaitOther(t, p, first)
	if n := f.prepared(ids[0]); n != 2 {
		t.Errorf("the GPU was prepared %d times for a container that started twice", n)
	}
	f.check(t, p, second)

	f.set(t, ids[0], map[string]string{"memory-used": "1GiB"})
	f.killContainer(t, second)
	f.awaitNotPrepared(t, p, ids[0], "1024 MiB are in use")
	f.set(t, ids[0], map[string]string{"memory-used": "default"})
	third := f.awaitOther(t, p, second)
	if after := f.check(t, p, third); !slices.Equal(after, ids) {
		t.Errorf("the pod had %v and has %v", ids, after)
	}
}

// TestGPUsAreCheckedWithoutAPod has a process use a GPU of a pod, and another one a GPU that no pod has. Only the
// second GPU is unhealthy, and the first one when its pod has ended, before another pod asks for it. Both are healthy
// when their processes have ended.
func TestGPUsAreCheckedWithoutAPod(t *testing.T) {
	f := setUp(t, "pcie-quad", writeConfig(t, clean))
	all := f.uuids(t)
	f.awaitDevices(t, gpuName, all)
	p := newPod("leaves", gpuName, 1)
	ids := f.check(t, p, f.launch(t, p))
	others := slices.DeleteFunc(slices.Clone(all), func(uuid string) bool { return uuid == ids[0] })
	left, foreign := f.leaveProcess(t, ids[0]), f.leaveProcess(t, others[0])
	f.awaitDevices(t, gpuName, append([]string{ids[0]}, others[1:]...))
	testenv.Must(t, foreign.Kill())
	f.awaitDevices(t, gpuName, all)
	testenv.Must(t, f.Remove(t.Context(), p.Name))
	f.awaitDevices(t, gpuName, others)
	f.expectRefusal(t, newPod("early", gpuName, len(all)))
	testenv.Must(t, left.Kill())
	f.awaitDevices(t, gpuName, all)
	next := newPod("next", gpuName, len(all))
	f.check(t, next, f.launch(t, next))
}

// leaveProcess starts a program on the node that uses a GPU.
func (f *fixture) leaveProcess(t *testing.T, uuid string) *Daemon {
	t.Helper()
	d := f.NewDaemon("left", "/bin/sleep", "1000")
	testenv.Must(t, d.Start())
	t.Cleanup(func() { _ = d.Kill() })
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.Pid()))
	testenv.Must(t, err)
	pid := 0 // in the node's PID namespace
	for line := range strings.Lines(string(status)) {
		if pids, ok := strings.CutPrefix(line, "NSpid:"); ok {
			fields := strings.Fields(pids)
			pid, err = strconv.Atoi(fields[len(fields)-1])
		}
	}
	if err == nil {
		err = f.Within(func() error {
			process := sim.Process{PID: pid, Type: sim.ComputeProcess, MemoryBytes: 1 << 30}
			return f.gpus.AddProcess(slices.Index(f.uuids(t), uuid), process)
		})
	}
	testenv.Must(t, err)
	return d
}

// awaitNotPrepared waits until a pod's status says that a device is not given to its container, and why.
func (f *fixture) awaitNotPrepared(t *testing.T, p Pod, uuid, why string) {
	t.Helper()
	s, err := f.Await(t.Context(), p.Name, "shows that "+uuid+" is not given to it", func(s PodStatus) bool {
		return strings.Contains(s.Trouble, uuid) && strings.Contains(s.Trouble, why)
	})
	testenv.Must(t, err)
	if s.Running || s.Waiting != "CreateContainerConfigError" {
		t.Errorf("the pod is %+v", s)
	}
}

// prepared returns how often a device was prepared with success.
func (f *fixture) prepared(uuid string) int {
	return strings.Count(f.plugin.Log(), uuid+" was prepared for a container of "+gpuName)
}

func (f *fixture) killContainer(t *testing.T, s PodStatus) {
	t.Helper()
	testenv.Must(t, f.Ctr(t.Context(), "tasks", "kill", "--signal", "SIGKILL", s.Container))
}

// awaitOther waits until a pod runs another container than before.
func (f *fixture) awaitOther(t *testing.T, p Pod, before PodStatus) PodStatus {
	t.Helper()
	s, err := f.Await(t.Context(), p.Name, "runs again", func(s PodStatus) bool {
		return s.Running && s.Container != before.Container
	})
	testenv.Must(t, err)
	return s
}
