package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// preStart prepares devices as the kubelet does before a container, and returns why it was refused, or nothing.
func (s *served) preStart(e *kubelettest.Endpoint, ids ...string) string {
	s.t.Helper()
	err := s.tryPreStart(e, ids...)
	if err != nil && status.Code(err) != codes.FailedPrecondition {
		s.t.Errorf("prepare %v: %v, want FailedPrecondition", ids, err)
	}
	return status.Convert(err).Message()
}

func (s *served) wantReady(e *kubelettest.Endpoint, ids ...string) {
	s.t.Helper()
	if refused := s.preStart(e, ids...); refused != "" {
		s.t.Errorf("%v are refused: %s", ids, refused)
	}
}

func (s *served) wantRefused(e *kubelettest.Endpoint, id, why string) {
	s.t.Helper()
	if refused := s.preStart(e, id); !strings.Contains(refused, id) || !strings.Contains(refused, why) {
		s.t.Errorf("%s is refused for %q, want %q", id, refused, why)
	}
}

// leftOver starts a process that a container left on a GPU. It has files open.
func (s *served) leftOver(gpu int, files ...*os.File) *exec.Cmd {
	s.t.Helper()
	cmd := exec.Command("sleep", "1000")
	cmd.ExtraFiles = files
	testenv.Must(s.t, cmd.Start())
	s.t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	process := sim.Process{PID: cmd.Process.Pid, Type: sim.ComputeProcess, MemoryBytes: 1 << 30}
	testenv.Must(s.t, s.node.AddProcess(gpu, process))
	return cmd
}

func TestServeGivesNoContainerAGPUThatIsUsed(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "listen: 127.0.0.1:0\nprestart: {policy: clean}")
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 4, 0)
	s.wantReady(e, s.uuids()...)
	cmd := s.leftOver(1)
	// The node's /proc has no processes, so only the memory is seen.
	s.wantRefused(e, s.uuids()[1], "1024 MiB are in use without a process")
	s.wantReady(e, s.uuids()[0], s.uuids()[2])
	testenv.Must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	testenv.Must(t, s.node.RemoveProcess(1, cmd.Process.Pid))
	s.wantReady(e, s.uuids()[1])
	s.wantReady(e, s.uuids()[1]) // a container that starts again
	// The log and /readyz say so.
	const blind = "processes on a GPU are not checked before a container gets it, since this program cannot see them"
	if body, _ := s.ask("/readyz"); !strings.Contains(body, "\n"+blind) || !strings.Contains(s.log.String(), blind) {
		t.Errorf("nothing says that processes cannot be seen; /readyz:\n%s", body)
	}
	const refused = `gpu_cdi_plugin_prestart_seconds_count{result="failed",step="memory"} 1`
	if text, _ := s.ask("/metrics"); !strings.Contains(text, refused) {
		t.Error("the metrics do not show the refusal")
	}
}

// showProcess shows a process of this machine in the node's /proc, by its PID or as "self".
func (s *served) showProcess(name string) {
	s.t.Helper()
	testenv.Must(s.t, os.Symlink(filepath.Join("/proc", name), filepath.Join(s.node.Root(), "proc", name)))
}

// addLoader copies what a program of the node needs to run in the node's root directory.
func (s *served) addLoader(program string) {
	s.t.Helper()
	out, err := exec.Command("ldd", filepath.Join(s.node.Root(), program)).Output()
	testenv.Must(s.t, err)
	for _, path := range regexp.MustCompile(`/[^ ]+`).FindAllString(string(out), -1) {
		data, err := os.ReadFile(path)
		testenv.Must(s.t, err)
		at := filepath.Join(s.node.Root(), path)
		testenv.Must(s.t, os.MkdirAll(filepath.Dir(at), 0o755))
		testenv.WriteProgram(s.t, at, data)
	}
}

// That a GPU cannot be reset is remembered across a restart, until it is reset all the same.
func TestServeRemembersWhichGPUCannotBeReset(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	s := newServed(t, "pcie-quad", "prestart: {policy: reset, strict: true}")
	s.addLoader("usr/bin/nvidia-smi")
	testenv.Must(t, s.node.SetReset(3, sim.ResetFault{Result: sim.ResetNotSupported}))
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 4, 0)
	s.wantRefused(e, s.uuids()[3], "(reset): the GPU must be reset and cannot be: nvidia-smi: ")
	waitFor(t, "the record", func() bool {
		data, err := os.ReadFile(filepath.Join(s.dir, "state", "health.json"))
		return err == nil && strings.Contains(string(data), "Not Supported")
	})
	_ = s.end(syscall.SIGKILL)
	testenv.Must(t, s.node.SetReset(3, sim.ResetFault{Result: sim.ResetWorks}))
	s.start()
	e = s.kubelet.WaitListed(gpuResource, 4, 0)
	s.wantRefused(e, s.uuids()[3], "Not Supported (found by an earlier reset)")
	s.wantReady(e, s.uuids()[2])
	s.awaitControl()
	s.does("was reset", "reset", "3")
	s.wantReady(e, s.uuids()[3])
}

// A step that cannot be done, although the container gets the device, is a remark until it can.
func TestServeSaysWhichStepsItCannotDo(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	s := newServed(t, "pcie-quad", "listen: 127.0.0.1:0\nprestart: {policy: reset}")
	s.addLoader("usr/bin/nvidia-smi")
	testenv.Must(t, s.node.SetReset(3, sim.ResetFault{Result: sim.ResetNotSupported}))
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 4, 0)
	s.wantReady(e, s.uuids()...)
	want := "\n" + s.uuids()[3] + " was given to a container although these steps could not be done: reset (not reset: "
	waitFor(t, "the remark", func() bool { body, _ := s.ask("/readyz"); return strings.Contains(body, want) })
	if body, _ := s.ask("/readyz"); strings.Count(body, "was given") != 1 {
		t.Errorf("/readyz also names others:\n%s", body)
	}
	logged := func() int { return strings.Count(s.log.String(), strings.TrimSpace(want)) }
	waitFor(t, "the line in the log", func() bool { return logged() > 0 }) // it comes after the remark
	if got := logged(); got != 1 {
		t.Errorf("logged %d times", got)
	}
	testenv.Must(t, s.node.SetReset(3, sim.ResetFault{Result: sim.ResetWorks}))
	s.awaitControl()
	s.does("was reset", "reset", "3")
	s.wantReady(e, s.uuids()[3])
	waitFor(t, "the end of the remark", func() bool { body, _ := s.ask("/readyz"); return !strings.Contains(body, want) })
}

// A GPU that needs a reset is given to a container after it.
func TestServeHealsAGPUByAReset(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	s := newServed(t, "dgx-h100", "prestart: {policy: reset}\nhealth: {clean-for: 100ms}")
	s.addLoader("usr/bin/nvidia-smi")
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 8, 0)
	testenv.Must(t, s.node.Set(3, map[string]string{"recovery-action": "reset", "memory-used": "2GiB"}))
	s.onlyUnhealthy(3)
	s.wantReady(e, s.uuids()[3], s.uuids()[4])
	values, err := s.node.Values(3)
	testenv.Must(t, err)
	if values["memory-used"] != 0 {
		t.Errorf("the GPU was not reset: %v", values)
	}
	s.kubelet.WaitListed(gpuResource, 8, 0)
	s.xid(3, 31, nil)                                               // its events are received after the reset
	testenv.Must(t, s.node.Fail("nvmlDeviceGetTemperature", 3, 16)) // NVML_ERROR_RESET_REQUIRED
	s.onlyUnhealthy(3)
	s.logs("GPU 3 is unhealthy: the driver cannot use the GPU before a reset; it needs a reset")
	s.wantReady(e, s.uuids()[3])
	s.kubelet.WaitListed(gpuResource, 8, 0)
	testenv.Must(t, s.node.Set(3, map[string]string{"recovery-action": "reboot"}))
	s.onlyUnhealthy(3)
	s.wantRefused(e, s.uuids()[3], "(health): it is unhealthy: the driver requires a reboot of the node")
}

// A driver may answer any call with "GPU requires reset": then the steps before the reset do not refuse the GPU.
func TestServeResetsAGPUThatTheDriverDoesNotUseBefore(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	s := newServed(t, "dgx-h100", "prestart: {policy: reset}\nhealth: {clean-for: 100ms}")
	s.addLoader("usr/bin/nvidia-smi")
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 8, 0)
	for _, function := range []string{
		"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetPowerManagementLimit",
		"nvmlDeviceGetHandleByUUID",
	} {
		testenv.Must(t, s.node.SetSilently(3, map[string]string{"persistence-mode": "0"})) // it could not be switched off
		testenv.Must(t, s.node.Fail(function, 3, 16))                                      // NVML_ERROR_RESET_REQUIRED
		if refused := s.preStart(e, s.uuids()[3]); refused != "" {
			t.Errorf("%s: refused: %s", function, refused)
		}
		faults, err := s.node.Faults()
		testenv.Must(t, err)
		if len(faults) > 1 { // the mode stays
			t.Errorf("%s: the GPU was not reset: %v", function, faults)
			testenv.Must(t, s.node.ClearGPU(3))
		}
		e = s.kubelet.WaitListed(gpuResource, 8, 0)
	}

	// A GPU that cannot be read at all is for an administrator to reset.
	for _, function := range []string{"nvmlDeviceGetName", "nvmlDeviceGetHandleByUUID"} {
		testenv.Must(t, s.node.Fail(function, 3, 16))
	}
	s.signal(syscall.SIGHUP)
	s.logs("GPU 3 is unhealthy: cannot be read: nvmlDeviceGetName")
	s.wantRefused(e, s.uuids()[3], "cannot be read: nvmlDeviceGetName: GPU requires reset")
	s.awaitControl()
	s.does("was reset", "reset", "3")
	s.kubelet.WaitListed(gpuResource, 8, 0)
}
