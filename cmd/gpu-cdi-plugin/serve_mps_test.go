package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	sharedResource = "nvidia.com/gpu.shared"

	byMPS = "mps: true\n" +
		"sharing: {mps: {rename-by-default: true, resources: [{name: nvidia.com/gpu, devices: [1], replicas: %d}]}}\n"
)

// newMPS returns a plugin that shares GPU 1 of four by MPS.
func newMPS(t *testing.T, replicas int) (s *served, uuid string) {
	t.Helper()
	testenv.Root(t)
	s = newServed(t, "pcie-quad", fmt.Sprintf(byMPS, replicas))
	// A socket's path is short, and that of a test's directory may not be.
	dir, err := os.MkdirTemp("", "mps") //nolint:usetesting // see above
	testenv.Must(t, err)
	s.dir = dir
	t.Cleanup(func() { testenv.Must(t, os.RemoveAll(dir)) })
	return s, s.node.Machine().GPUs[1].UUID
}

func (s *served) mpsDir() string { return filepath.Join(s.dir, "run", "mps") }

// runMPS runs mps with a directory as its /dev/shm, like the unit and the pod, until the test ends.
func (s *served) runMPS(shm string, args ...string) {
	s.t.Helper()
	testenv.Must(s.t, os.MkdirAll(shm, 0o1777))
	exe, err := os.Executable()
	testenv.Must(s.t, err)
	program := filepath.Join(s.t.TempDir(), "gpu-cdi-plugin") // the name says what the test binary does
	testenv.Must(s.t, os.Symlink(exe, program))
	command := append([]string{
		"-c", `mount --bind "$1" /dev/shm && shift && exec "$@"`, "sh", shm, program, "mps",
		"--root", s.node.Root(), "--config", s.config, "--runtime-dir", filepath.Join(s.dir, "run"),
		"--state-dir", filepath.Join(s.dir, "state"),
	}, args...)
	cmd := exec.Command("sh", command...)
	cmd.Env = append(os.Environ(), insecure)
	cmd.Stderr = io.MultiWriter(s.log, s.t.Output())
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	testenv.Must(s.t, cmd.Start())
	s.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
}

// daemon returns the PID of a GPU's daemon, or 0.
func (s *served) daemon(uuid string) int {
	text, err := os.ReadFile(filepath.Join(s.mpsDir(), uuid, "pipe", "nvidia-cuda-mps-control.pid"))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || syscall.Kill(pid, 0) != nil {
		return 0
	}
	return pid
}

// computeMode returns the compute mode of the simulated driver.
func (s *served) computeMode(uuid string) uint64 {
	s.t.Helper()
	index := slices.IndexFunc(s.node.Machine().GPUs, func(g sim.GPU) bool { return g.UUID == uuid })
	values, err := s.node.Values(index)
	testenv.Must(s.t, err)
	return values["compute-mode"]
}

// allocateOne allocates one device and returns the response.
func (s *served) allocateOne(e *kubelettest.Endpoint, id string) *v1beta1.ContainerAllocateResponse {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), prompt)
	defer cancel()
	answer, err := e.Client.Allocate(ctx, &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: []string{id}}},
	})
	testenv.Must(s.t, err)
	return answer.GetContainerResponses()[0]
}

// client returns a command that runs in a container with that response: it sees its mounts, and no other files of MPS.
func (s *served) client(answer *v1beta1.ContainerAllocateResponse, seconds int) *exec.Cmd {
	s.t.Helper()
	script := "set -e\n"
	for _, m := range answer.GetMounts() {
		if info, err := os.Stat(m.GetHostPath()); err != nil || !info.IsDir() {
			continue // the descriptor
		}
		script += fmt.Sprintf("mkdir -p %[2]s; mount --bind %[1]s %[2]s\n", m.GetHostPath(), m.GetContainerPath())
		if m.GetReadOnly() {
			script += "mount -o remount,bind,ro " + m.GetContainerPath() + "\n"
		}
	}
	script += fmt.Sprintf("exec %s %d", s.node.MPSClient(), seconds)
	cmd := exec.CommandContext(s.t.Context(), "sh", "-c", "mount -t tmpfs none /run; "+script)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LD_LIBRARY_PATH=" + filepath.Dir(s.node.Library())}
	for name, value := range answer.GetEnvs() {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	return cmd
}

func (s *served) wantClient(answer *v1beta1.ContainerAllocateResponse, want ...string) {
	s.t.Helper()
	out, err := s.client(answer, 0).CombinedOutput()
	for _, text := range want {
		if err != nil || !strings.Contains(string(out), text) {
			s.t.Errorf("the client printed %q, %v; want %q", out, err, text)
		}
	}
}

func TestServeSharesByMPS(t *testing.T) {
	t.Parallel()
	s, uuid := newMPS(t, 4)
	s.start()
	s.kubelet.WaitListed(gpuResource, 3, 0)
	s.kubelet.WaitListed(sharedResource, 0, 4) // there is no daemon yet
	s.logs("its MPS control daemon is not running: start gpu-cdi-mps@" + uuid + ".service")
	s.runMPS(filepath.Join(s.mpsDir(), uuid, "shm"), "--gpu", uuid)
	e := s.kubelet.WaitListed(sharedResource, 4, 0)
	answer := s.allocateOne(e, uuid+"::2")
	limit := fmt.Sprintf("uuid=%s pinned_mem_limit=%d", uuid, s.node.Machine().GPUs[1].MemoryBytes>>20/4<<20)
	s.wantClient(answer, "active_thread_percentage=25.0", limit)
	if mode := s.computeMode(uuid); mode != 3 {
		t.Errorf("the GPU's compute mode is %d, want exclusive", mode)
	}
	daemon := s.daemon(uuid)

	// Containers go on without the plugin.
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		_ = s.end(sig)
		s.wantClient(answer, limit)
		s.start()
		s.kubelet.WaitListed(sharedResource, 4, 0)
	}

	// With more replicas each gets less, from the running server too.
	s.configure(fmt.Sprintf(byMPS, 8))
	s.signal(syscall.SIGHUP)
	e = s.kubelet.WaitListed(sharedResource, 8, 0)
	answer = s.allocateOne(e, uuid+"::7")
	s.wantClient(answer, "active_thread_percentage=12.0",
		fmt.Sprintf("pinned_mem_limit=%d", s.node.Machine().GPUs[1].MemoryBytes>>20/8<<20))
	if now := s.daemon(uuid); now != daemon {
		t.Errorf("the daemon is %d, want %d", now, daemon)
	}

	// MPS is no longer configured, but there is a client.
	client := s.client(answer, 600)
	out, err := client.StdoutPipe()
	testenv.Must(t, err)
	testenv.Must(t, client.Start())
	_, err = out.Read(make([]byte, 1))
	testenv.Must(t, err)
	testenv.Must(t, s.end(syscall.SIGTERM))
	s.configure("")
	s.start()
	s.kubelet.WaitListed(gpuResource, 3, 1) // a whole GPU cannot be used while it is exclusive
	testenv.Must(t, client.Process.Kill())
	_ = client.Wait()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	if mode := s.computeMode(uuid); mode != 0 || s.daemon(uuid) != 0 {
		t.Errorf("compute mode %d, daemon %d", mode, s.daemon(uuid))
	}
}

// In a pod all daemons have one /dev/shm, and the pod starts them again.
func TestMPSRunsTheDaemonsOfAllSharedGPUs(t *testing.T) {
	t.Parallel()
	s, uuid := newMPS(t, 2)
	s.configure(strings.Replace(fmt.Sprintf(byMPS, 2), "[1]", "[1, 2]", 1))
	s.runMPS(filepath.Join(s.mpsDir(), "shm"), "--all")
	s.start()
	e := s.kubelet.WaitListed(sharedResource, 4, 0)
	other := s.node.Machine().GPUs[2].UUID
	s.wantClient(s.allocateOne(e, uuid+"::0"), "uuid="+uuid)
	s.wantClient(s.allocateOne(e, other+"::0"), "uuid="+other)
	lists := s.kubelet.Lists(sharedResource)
	testenv.Must(t, syscall.Kill(s.daemon(uuid), syscall.SIGKILL))
	waitFor(t, "lists without and with the devices", func() bool { return s.kubelet.Lists(sharedResource) >= lists+2 })
	s.kubelet.WaitListed(sharedResource, 4, 0)
	s.wantClient(s.allocateOne(e, uuid+"::0"), "uuid="+uuid)
	if !strings.Contains(s.log.String(), uuid+": nvidia-cuda-mps-control ended (signal: killed)") {
		t.Error("the log has no reason for the daemon's end")
	}
}

// A reset by hand ends the GPU's daemon, whose servers have the GPU open.
func TestServeResetsAGPUThatMPSShares(t *testing.T) {
	t.Parallel()
	s, uuid := newMPS(t, 2)
	s.addLoader("usr/bin/nvidia-smi")
	s.start()
	s.runMPS(filepath.Join(s.mpsDir(), "shm"), "--all")
	e := s.kubelet.WaitListed(sharedResource, 2, 0)
	s.awaitControl()
	s.wantClient(s.allocateOne(e, uuid+"::1"), "uuid="+uuid) // starts a server, which stays
	before := s.daemon(uuid)
	s.kubelet.Pods.Set(kubelettest.Pod("ml", "train", "main", sharedResource, uuid+"::1"))
	s.claims()
	s.kubelet.Pods.Set() // the pod has ended
	s.does("was reset", "reset", "1")
	s.kubelet.WaitListed(sharedResource, 2, 0)
	if now := s.daemon(uuid); now == before || now == 0 || s.computeMode(uuid) != 3 {
		t.Errorf("daemon %d after %d, compute mode %d", now, before, s.computeMode(uuid))
	}
	s.wantClient(s.allocateOne(e, uuid+"::1"), "uuid="+uuid)
}

// Without permission to set the compute mode the GPU is not shared; the other GPUs are offered.
func TestServeNeedsPermissionForMPS(t *testing.T) {
	t.Parallel()
	s, uuid := newMPS(t, 2)
	const noPermission = 4 // NVML_ERROR_NO_PERMISSION
	testenv.Must(t, s.node.Fail("nvmlDeviceSetComputeMode", 1, noPermission))
	s.runMPS(filepath.Join(s.mpsDir(), "shm"), "--all")
	s.start()
	s.kubelet.WaitListed(gpuResource, 3, 0)
	e := s.kubelet.WaitListed(sharedResource, 0, 2)
	s.logs("the GPU's compute mode cannot be set, so processes could use the GPU without MPS: ")
	s.logs("no permission to use the NVIDIA driver")
	waitFor(t, "the reason in the list", func() bool {
		refused := s.preStart(e, uuid+"::0")
		return strings.Contains(refused, "is not ready for a container: the GPU's compute mode cannot be set")
	})
	testenv.Must(t, s.node.Clear())
	s.kubelet.WaitListed(sharedResource, 2, 0)
}
