package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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
	mustDo(t, err)
	s.dir = dir
	t.Cleanup(func() {
		s.endDaemons()
		s.unmountShm()
		mustDo(t, os.RemoveAll(dir))
	})
	return s, s.node.Machine().GPUs[1].UUID
}

func (s *served) mpsDir() string { return filepath.Join(s.dir, "run", "mps") }

// endDaemons kills daemons that a test left running.
func (s *served) endDaemons() {
	for _, g := range s.node.Machine().GPUs {
		if pid := s.daemon(g.UUID); pid > 0 {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// unmountShm unmounts what a test left mounted.
func (s *served) unmountShm() {
	paths, err := filepath.Glob(filepath.Join(s.mpsDir(), "GPU-*", "shm"))
	mustDo(s.t, err)
	for _, path := range paths {
		_ = unix.Unmount(path, unix.MNT_DETACH)
	}
}

// daemon returns the PID of a GPU's daemon, or 0.
func (s *served) daemon(uuid string) int {
	pids, err := filepath.Glob("/proc/[0-9]*")
	mustDo(s.t, err)
	for _, p := range pids {
		env, _ := os.ReadFile(filepath.Join(p, "environ"))
		args, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		if bytes.Contains(env, []byte("CUDA_MPS_PIPE_DIRECTORY="+filepath.Join(s.mpsDir(), uuid, "pipe")+"\x00")) &&
			bytes.HasSuffix(args, []byte("nvidia-cuda-mps-control\x00-f\x00")) {
			pid, err := strconv.Atoi(filepath.Base(p))
			mustDo(s.t, err)
			return pid
		}
	}
	return 0
}

// computeMode returns the compute mode of the simulated driver.
func (s *served) computeMode(uuid string) uint64 {
	s.t.Helper()
	index := slices.IndexFunc(s.node.Machine().GPUs, func(g sim.GPU) bool { return g.UUID == uuid })
	values, err := s.node.Values(index)
	mustDo(s.t, err)
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
	mustDo(s.t, err)
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
	s.listed(gpuResource, 3, 0)
	e := s.listed(sharedResource, 4, 0)
	answer := s.allocateOne(e, uuid+"::2")
	memory := s.node.Machine().GPUs[1].MemoryBytes >> 20 / 4 << 20
	limit := fmt.Sprintf("uuid=%s pinned_mem_limit=%d", uuid, memory)
	s.wantClient(answer, "active_thread_percentage=25.0", limit)
	if mode := s.computeMode(uuid); mode != 3 {
		t.Errorf("the GPU's compute mode is %d, want exclusive", mode)
	}
	for _, m := range answer.GetMounts() {
		if strings.HasSuffix(m.GetContainerPath(), ".json") {
			text, err := os.ReadFile(m.GetHostPath())
			mustDo(t, err)
			if want := fmt.Sprintf("\"memoryLimitBytes\": %d,\n      \"activeThreadPercentage\": 25", memory); !strings.Contains(
				string(text),
				want,
			) {
				t.Errorf("no %s in %s", want, text)
			}
		}
	}

	// The daemon dies, and is restarted.
	first := s.daemon(uuid)
	lists := s.kubelet.Lists(sharedResource)
	mustDo(t, syscall.Kill(first, syscall.SIGKILL))
	waitFor(t, "lists without and with the devices", func() bool { return s.kubelet.Lists(sharedResource) >= lists+2 })
	s.listed(sharedResource, 4, 0)
	s.wantClient(answer, limit) // the same mounts reach the new daemon
	second := s.daemon(uuid)
	if second == first || second == 0 {
		t.Errorf("daemon %d after %d", second, first)
	}
	if !strings.Contains(s.log.String(), uuid+": its MPS control daemon was ended by signal SIGKILL") {
		t.Error("the log has no reason for the daemon's end")
	}

	// The plugin is killed or ends, and the next one adopts the daemon.
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		_ = s.end(sig)
		s.wantClient(answer, limit)
		s.start()
		s.listed(sharedResource, 4, 0)
		if now := s.daemon(uuid); now != second {
			t.Errorf("after %v the daemon is %d, want %d", sig, now, second)
		}
	}

	// With more replicas each gets less, from the running server too.
	s.configure(fmt.Sprintf(byMPS, 8))
	s.signal(syscall.SIGHUP)
	e = s.listed(sharedResource, 8, 0)
	s.wantClient(
		s.allocateOne(e, uuid+"::7"),
		"active_thread_percentage=12.0",
		fmt.Sprintf("pinned_mem_limit=%d", s.node.Machine().GPUs[1].MemoryBytes>>20/8<<20),
	)
	if now := s.daemon(uuid); now != second {
		t.Errorf("with other limits the daemon is %d, want %d", now, second)
	}

	// MPS is no longer configured, but there is a client.
	client := s.client(s.allocateOne(e, uuid+"::7"), 600)
	out, err := client.StdoutPipe()
	mustDo(t, err)
	mustDo(t, client.Start())
	_, err = out.Read(make([]byte, 1))
	mustDo(t, err)
	s.configure("")
	s.signal(syscall.SIGHUP)
	s.listed(gpuResource, 3, 1) // a whole GPU cannot be used while it is exclusive
	mustDo(t, s.end(syscall.SIGTERM))
	s.start()
	s.listed(gpuResource, 3, 1)
	if now := s.daemon(uuid); now != second {
		t.Errorf("with a client the daemon is %d, want %d", now, second)
	}
	waitFor(
		t,
		"a check of the daemon's clients",
		func() bool { return strings.Contains(s.log.String(), "ends when its last client has ended") },
	)
	mustDo(t, client.Process.Kill())
	_ = client.Wait()
	waitFor(t, "the end of the daemon", func() bool { return s.daemon(uuid) == 0 && s.computeMode(uuid) == 0 })
	s.listed(gpuResource, 4, 0)
}

// A reset by hand ends the GPU's daemon, whose servers have the GPU open, and starts another.
func TestServeResetsAGPUThatMPSShares(t *testing.T) {
	t.Parallel()
	s, uuid := newMPS(t, 2)
	s.addLoader("usr/bin/nvidia-smi")
	s.start()
	e := s.listed(sharedResource, 2, 0)
	s.awaitControl()
	s.wantClient(s.allocateOne(e, uuid+"::1"), "uuid="+uuid) // starts a server, which stays
	before := s.daemon(uuid)
	s.does("was reset", "reset", "1")
	s.listed(sharedResource, 2, 0)
	if now := s.daemon(uuid); now == before || now == 0 || s.computeMode(uuid) != 3 {
		t.Errorf("daemon %d after %d, compute mode %d", now, before, s.computeMode(uuid))
	}
	s.wantClient(s.allocateOne(e, uuid+"::1"), "uuid="+uuid)
}

// A plugin that restarts by exec is still the parent of the daemons.
func TestServeRestartsBesideMPS(t *testing.T) {
	t.Parallel()
	s, uuid := newMPS(t, 2)
	s.start()
	s.listed(sharedResource, 2, 0)
	first, total := s.daemon(uuid), s.kubelet.Registrations()
	s.configure(fmt.Sprintf(byMPS, 2) + "strategy: [envvar]\n")
	s.signal(syscall.SIGHUP)
	s.kubelet.WaitRegistrations(total + 2)
	e := s.listed(sharedResource, 2, 0)
	if now := s.daemon(uuid); now != first {
		t.Errorf("the daemon is %d, want %d", now, first)
	}
	if envs := s.allocateOne(e, uuid+"::0").GetEnvs(); envs["NVIDIA_VISIBLE_DEVICES"] != uuid ||
		envs["CUDA_MPS_PIPE_DIRECTORY"] == "" {
		t.Errorf("variables %v", envs)
	}
	lists := s.kubelet.Lists(sharedResource)
	mustDo(t, syscall.Kill(first, syscall.SIGKILL))
	waitFor(t, "lists without and with the devices", func() bool { return s.kubelet.Lists(sharedResource) >= lists+2 })
	s.listed(sharedResource, 2, 0)
	if err := syscall.Kill(first, 0); err == nil {
		t.Error("the first daemon is a zombie")
	}
}

// Without permission to set the compute mode the GPU is not shared; the other GPUs are offered.
func TestServeNeedsPermissionForMPS(t *testing.T) {
	t.Parallel()
	s, uuid := newMPS(t, 2)
	const noPermission = 4 // NVML_ERROR_NO_PERMISSION
	mustDo(t, s.node.Fail("nvmlDeviceSetComputeMode", 1, noPermission))
	s.start()
	s.listed(gpuResource, 3, 0)
	e := s.listed(sharedResource, 0, 2)
	waitFor(t, "a message", func() bool {
		return strings.Contains(s.log.String(), "its MPS control daemon cannot be started") &&
			strings.Contains(s.log.String(), "no permission to use the NVIDIA driver")
	})
	mustDo(t, s.node.Set(1, map[string]string{"recovery-action": "reset"}))
	s.logs("GPU 1 is unhealthy: the driver asks for a reset of the GPU")
	s.wantRefused(e, uuid+"::0", "is not ready for a container: its MPS control daemon cannot be started")
	if s.daemon(uuid) != 0 {
		t.Error("there is a daemon")
	}
	mustDo(t, s.node.Clear())
	s.listed(sharedResource, 2, 0)
}

// In a pod without hostPID the plugin has a PID namespace of its own.
func TestServeNeedsTheHostsPIDNamespaceForMPS(t *testing.T) {
	t.Parallel()
	s, uuid := newMPS(t, 2)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Args = []string{
		"gpu-cdi-plugin", "serve", "--root", s.node.Root(), "--cdi-dir", filepath.Dir(s.spec), "--config", s.config,
		"--device-plugin-dir", s.kubelet.Dir, "--runtime-dir", filepath.Join(s.dir, "run"),
		"--state-dir", filepath.Join(s.dir, "state"), "--hook-path", "/bin/true",
	}
	cmd.Env = append(os.Environ(), insecure)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	out, err := cmd.CombinedOutput()
	const want = "error: this process is not in the host's PID namespace, which MPS needs\n" +
		"hint: set hostPID: true in the pod's spec"
	if exitErr, ok := errors.AsType[*exec.ExitError](err); !ok || exitErr.ExitCode() != 1 ||
		!strings.Contains(string(out), want) {
		t.Errorf("it ended with %v and printed\n%s\nwant %q", err, out, want)
	}
	if _, err := os.Stat(filepath.Join(s.mpsDir(), uuid)); err == nil {
		t.Error("the GPU was prepared for MPS")
	}
}
