package main

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// device runs a verb of an administrator and returns its exit status and what it prints.
func (s *served) device(args ...string) (code int, stdout, stderr string) {
	s.t.Helper()
	return s.startDevice(args...).wait()
}

// verb is a verb that was started.
type verb struct {
	*exec.Cmd
	t              *testing.T
	stdout, stderr testenv.Log
}

func (s *served) startDevice(args ...string) *verb {
	s.t.Helper()
	return s.begin(append([]string{
		"device", "--runtime-dir", filepath.Join(s.dir, "run"), "--state-dir", filepath.Join(s.dir, "state"),
	}, args...)...)
}

// claims runs the verb claims, which must succeed, and returns what it prints.
func (s *served) claims(args ...string) (stdout, stderr string) {
	s.t.Helper()
	args = append([]string{"claims", "--runtime-dir", filepath.Join(s.dir, "run")}, args...)
	code, stdout, stderr := s.begin(args...).wait()
	if code != 0 {
		s.t.Errorf("%v: exit %d, %s", args, code, stderr)
	}
	return stdout, stderr
}

// begin starts a verb.
func (s *served) begin(args ...string) *verb {
	s.t.Helper()
	exe, err := os.Executable()
	testenv.Must(s.t, err)
	v := &verb{t: s.t, Cmd: exec.CommandContext(s.t.Context(), exe)}
	v.Args = append([]string{"gpu-cdi-plugin", "--root", s.node.Root()}, args...)
	v.Env = append(os.Environ(), insecure)
	v.Stdout, v.Stderr = &v.stdout, &v.stderr
	testenv.Must(s.t, v.Start())
	s.t.Cleanup(func() { _ = v.Process.Kill(); _ = v.Wait() })
	return v
}

// prints waits until the verb has printed a text to stderr.
func (v *verb) prints(text string) {
	v.t.Helper()
	waitFor(v.t, text, func() bool { return strings.Contains(v.stderr.String(), text) })
}

// interrupt interrupts the verb, and returns what it has printed to stderr.
func (v *verb) interrupt() string {
	v.t.Helper()
	testenv.Must(v.t, v.Process.Signal(os.Interrupt))
	code, _, stderr := v.wait()
	if code != 130 {
		v.t.Errorf("an interrupt ended %v with %d, %q, want 130", v.Args, code, stderr)
	}
	return stderr
}

// wait waits for the end of the verb.
func (v *verb) wait() (code int, stdout, stderr string) {
	_ = v.Wait()
	v.t.Logf("%v: %s%s", v.Args, v.stdout.String(), v.stderr.String())
	return v.ProcessState.ExitCode(), v.stdout.String(), v.stderr.String()
}

// does runs a verb of an administrator that must succeed and print a text.
func (s *served) does(text string, args ...string) {
	s.t.Helper()
	if code, stdout, stderr := s.device(args...); code != 0 || !strings.Contains(stdout, text) {
		s.t.Errorf("device %v: exit %d, %q and %q, want %q", args, code, stdout, stderr, text)
	}
}

// fails runs a verb of an administrator that must fail with a status and a text.
func (s *served) fails(status int, text string, args ...string) {
	s.t.Helper()
	if code, _, stderr := s.device(args...); code != status || !strings.Contains(stderr, text) {
		s.t.Errorf("device %v: exit %d, %q, want %d and %q", args, code, stderr, status, text)
	}
}

func (s *served) awaitControl() {
	s.t.Helper()
	waitFor(s.t, "the control socket", func() bool {
		info, err := os.Stat(filepath.Join(s.dir, "run", "control.sock"))
		return err == nil && info.Mode() == fs.ModeSocket|0o600
	})
}

func TestServeKeepsACordonOverARestart(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 4, 0)
	s.awaitControl()
	s.does("GPU 2 ("+s.uuids()[2]+") is cordoned", "cordon", "2", "--reason", "a fan is loud")
	s.onlyUnhealthy(2)
	s.logs("GPU 2 is cordoned: a fan is loud")
	s.logs("): cordon 2 (a fan is loud)")
	s.wantRefused(e, s.uuids()[2], "is not ready for a container: cordoned: a fan is loud")
	s.fails(1, `the driver of this host has no device`, "cordon", "7", "--reason", "x")

	// It was on record at once.
	_ = s.end(syscall.SIGKILL)
	s.start()
	s.onlyUnhealthy(2)
	testenv.Must(t, s.end(syscall.SIGTERM))
	if _, err := os.Lstat(filepath.Join(s.dir, "run")); err == nil {
		left, _ := os.ReadDir(filepath.Join(s.dir, "run"))
		for _, f := range left {
			t.Errorf("serve left %s", f.Name())
		}
	}

	// Without serve the record is changed.
	s.does(s.uuids()[2]+" is uncordoned in ", "uncordon", s.uuids()[2])
	s.does(s.uuids()[1]+" is cordoned in ", "cordon", "1", "--reason", "maintenance")
	s.start()
	s.onlyUnhealthy(1)
	s.awaitControl()
	s.does("GPU 1 ("+s.uuids()[1]+") is uncordoned", "uncordon", s.uuids()[1])
	s.kubelet.WaitListed(gpuResource, 4, 0)

	// One that is not there can be cordoned too.
	testenv.Must(t, s.node.Unplug(3))
	s.kubelet.WaitListed(gpuResource, 3, 0)
	s.does("the absent device ("+s.uuids()[3]+") is cordoned", "cordon", s.uuids()[3], "--reason", "x")
	testenv.Must(t, s.end(syscall.SIGTERM))
	testenv.Must(t, s.node.Plug(3))
	s.start()
	s.onlyUnhealthy(3)
}

// A cordoned GPU takes its MIG devices along, also those that are made later.
func TestServeCordonsMIGDevices(t *testing.T) {
	t.Parallel()
	s := newServed(t, "mig-h100", "mig-strategy: mixed")
	s.start()
	const small = "nvidia.com/mig-1g.10gb"
	testenv.Must(t, s.node.SetMIG(0, []string{"1g.10gb", "1g.10gb"}))
	for i := 1; i < len(s.node.Machine().GPUs); i++ {
		testenv.Must(t, s.node.SetMIG(i, nil))
	}
	s.kubelet.WaitListed(small, 2, 0)
	s.awaitControl()
	s.does("MIG device 0:1", "cordon", "0:1", "--reason", "x")
	s.kubelet.WaitListed(small, 1, 1)
	s.does("GPU 0", "cordon", "0", "--reason", "x")
	s.kubelet.WaitListed(small, 0, 2)
	testenv.Must(t, s.node.SetMIG(0, []string{"1g.10gb", "1g.10gb", "1g.10gb"}))
	s.kubelet.WaitListed(small, 0, 3)
	s.does("GPU 0", "uncordon", "0")
	s.kubelet.WaitFor(small, func(list []*v1beta1.Device) bool {
		for _, d := range list {
			if d.GetHealth() != v1beta1.Healthy {
				return false
			}
		}
		return len(list) == 3
	})
}

func TestServeResetsAGPUForAnAdministrator(t *testing.T) {
	t.Parallel()
	testenv.Root(t) // nvidia-smi runs in the driver's root directory
	s := newServed(t, "dgx-h100", "")
	s.addLoader("usr/bin/nvidia-smi")
	s.start()
	s.withoutRecoveryAction()
	s.kubelet.WaitListed(gpuResource, 8, 0)
	s.awaitControl()
	s.fails(13, "no program answers at the control socket", "reset", "3", "--runtime-dir", filepath.Join(s.dir, "none"))
	s.fails(1, `no device "9"`, "reset", "9")

	// An XID that only a reset repairs, and a container that has the GPU.
	s.xid(3, 95, nil)
	s.onlyUnhealthy(3)
	testenv.Must(t, s.node.Set(3, map[string]string{"memory-used": "2GiB"}))
	pods := s.kubelet.Pods
	pods.Set(kubelettest.Pod("ns", "job", "main", gpuResource, s.uuids()[3]))
	s.fails(1, "GPU 3 is in use by container main of pod ns/job", "reset", "3")
	s.fails(1, "GPU 3 is in use by container main of pod ns/job", "reset", "3", "--force")
	s.logs("GPU 3 is held for a reset by an administrator")

	// An interrupt ends the waiting, and the cordon with it.
	const waiting = "waiting: GPU 3 is in use by container main of pod ns/job\n"
	reset := s.startDevice("reset", "3", "--wait")
	reset.prints(waiting)
	s.rounds(pods, 3) // of which the reset makes some
	if stderr := reset.interrupt(); strings.Count(stderr, waiting) != 1 {
		t.Errorf("%q, want one %q", stderr, waiting)
	}
	waitFor(t, "the end of the cordon", func() bool {
		data, err := os.ReadFile(filepath.Join(s.dir, "state", "health.json"))
		return err == nil && !strings.Contains(string(data), `"heldSince"`)
	})
	s.logs("was not carried out, since the client or this program has ended: reset 3, wait")

	// While one waits, the GPU is cordoned, and another is refused. When the container ends the GPU is reset.
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.does("GPU 3 ("+s.uuids()[3]+") was reset", "reset", s.uuids()[3], "--wait")
	}()
	waitFor(t, "the second cordon", func() bool {
		return strings.Count(s.log.String(), "GPU 3 is held for a reset by an administrator") >= 4
	})
	s.fails(1, "GPU 3 is already being reset", "reset", "3")
	pods.Set()
	<-done
	values, err := s.node.Values(3)
	testenv.Must(t, err)
	if values["memory-used"] != 0 {
		t.Errorf("the GPU was not reset: %v", values)
	}
	s.kubelet.WaitListed(gpuResource, 8, 0)
	s.logs("GPU 3 is healthy again")

	// What was cordoned before stays so.
	s.does("is cordoned", "cordon", "5", "--reason", "a fan is loud")
	s.does("was reset", "reset", "5")
	s.onlyUnhealthy(5)
}

// A reset that waits holds its GPU back no longer than this serve runs, and neither sets nor lifts a cordon.
func TestServeEndsTheCordonOfAReset(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.awaitControl()
	s.kubelet.Pods.Set(kubelettest.Pod("ns", "job", "main", gpuResource, s.uuids()[3]))
	begin := func() *verb {
		reset := s.startDevice("reset", "3", "--wait")
		s.onlyUnhealthy(3)
		return reset
	}
	const why = "held for a reset by an administrator"
	recorded := func() string {
		data, _ := os.ReadFile(filepath.Join(s.dir, "state", "health.json"))
		return string(data)
	}

	// Serve is killed, and starts again.
	reset := begin()
	waitFor(t, "the record", func() bool { return strings.Contains(recorded(), "heldSince") })
	_ = s.end(syscall.SIGKILL)
	const closed = "the program closed the connection before it answered"
	if code, _, stderr := reset.wait(); code == 0 || !strings.Contains(stderr, closed) {
		t.Errorf("exit %d, %q, want %q", code, stderr, closed)
	}
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.logs("GPU 3 is no longer held for a reset, during which this program restarted")
	waitFor(t, "the record", func() bool { return !strings.Contains(recorded(), "heldSince") })
	testenv.Must(t, s.end(syscall.SIGTERM))

	// An administrator's own cordon outlives the reset.
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.awaitControl()
	reset = begin()
	reset.prints("waiting: GPU 3 is in use by container main")
	s.does("is uncordoned, and is back in service when the reset of its GPU has ended", "uncordon", "3")
	s.onlyUnhealthy(3)
	s.logs("GPU 3 is " + why)
	s.does("is cordoned", "cordon", "3", "--reason", "a fan is loud")
	_ = reset.interrupt()
	waitFor(t, "the end of the reset", func() bool { return !strings.Contains(recorded(), "heldSince") })
	s.onlyUnhealthy(3)
	s.does("is uncordoned", "uncordon", "3")
	s.kubelet.WaitListed(gpuResource, 4, 0)

	// While the driver is released, a reset that waits says so.
	reset = begin()
	s.does("is released", "release")
	reset.prints("waiting: the users of GPU 3 are unknown: wait for the driver (it is released")
	_ = reset.interrupt()
	s.does("is opened again", "reopen")
	s.kubelet.WaitListed(gpuResource, 4, 0)
}

// A reset goes on when serve is killed. The next serve holds its GPU until nvidia-smi has ended.
func TestServeHoldsAGPUWhoseResetOutlivedTheServeBefore(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	for name, reset := range map[string]struct {
		config string
		begin  func(*served, *kubelettest.Endpoint)
	}{
		"for an administrator": {"", func(s *served, _ *kubelettest.Endpoint) { _, _, _ = s.device("reset", "3") }},
		"for a container": {
			"prestart: {policy: reset}", func(s *served, e *kubelettest.Endpoint) { _ = s.tryPreStart(e, s.uuids()[3]) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServed(t, "pcie-quad", reset.config)
			s.addLoader("usr/bin/nvidia-smi")
			s.start()
			e := s.kubelet.WaitListed(gpuResource, 4, 0)
			s.awaitControl()
			testenv.Must(t, s.node.Set(3, map[string]string{"memory-used": "2GiB"}))
			testenv.Must(t, s.node.SetReset(3, sim.ResetFault{Result: sim.ResetWorks, Delay: time.Hour}))
			done := make(chan struct{})
			go func() {
				defer close(done)
				reset.begin(s, e)
			}()
			smi := s.childNamed("nvidia-smi")
			defer func() { _ = syscall.Kill(smi, syscall.SIGKILL) }()
			_ = s.end(syscall.SIGKILL)
			<-done

			s.does("is cordoned in ", "cordon", "2", "--reason", "x") // without serve, which ends no hold
			s.does("is uncordoned in ", "uncordon", "2")
			s.start()
			s.onlyUnhealthy(3)
			const why = "held for a reset that has not ended: nvidia-smi, which this program started before it was restarted"
			s.logs("GPU 3 is " + why)
			e = s.kubelet.WaitListed(gpuResource, 3, 1)
			s.wantRefused(e, s.uuids()[3], "is not ready for a container: "+why)
			s.awaitControl()
			s.fails(1, "GPU 3 is "+why, "reset", "3")
			s.fails(1, "nvidia-smi still resets "+s.uuids()[3], "reset", "1")
			s.fails(1, "GPU 3 is "+why, "reset", "3", "--force")
			s.onlyUnhealthy(3)

			testenv.Must(t, syscall.Kill(smi, syscall.SIGKILL))
			testenv.Must(t, s.node.SetReset(3, sim.ResetFault{Result: sim.ResetWorks}))
			s.kubelet.WaitListed(gpuResource, 4, 0)
			s.logs("GPU 3 is no longer held: the nvidia-smi that was resetting it has ended, with an unknown result")
			s.does("was reset", "reset", "3")
			s.kubelet.WaitListed(gpuResource, 4, 0)
		})
	}
}

// childNamed waits for a child process of serve with a command, and returns its PID.
func (s *served) childNamed(command string) (pid int) {
	s.t.Helper()
	waitFor(s.t, command, func() bool {
		stats, _ := filepath.Glob("/proc/[0-9]*/stat")
		for _, path := range stats {
			stat, _ := os.ReadFile(path)
			rest, ours := strings.CutPrefix(string(stat), filepath.Base(filepath.Dir(path))+" ("+command+") ")
			if fields := strings.Fields(rest); ours && len(fields) > 1 && fields[1] == strconv.Itoa(s.process.Pid) {
				pid, _ = strconv.Atoi(filepath.Base(filepath.Dir(path)))
				return true
			}
		}
		return false
	})
	return pid
}

// A driver refuses to reset a GPU that a process has open. With --force serve asks it all the same.
func TestServeNamesWhatKeepsAGPUFromAForcedReset(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	if own, err := os.Readlink("/proc/self/ns/pid"); err != nil || own != "pid:[4026531836]" {
		testenv.Skip(t, "needs the host's PID namespace")
	}
	s := newServed(t, "pcie-quad", "")
	s.addLoader("usr/bin/nvidia-smi")
	s.showProcess("thread-self")
	path := filepath.Join(s.node.Root(), "dev", fmt.Sprintf("nvidia%d", s.node.Machine().GPUs[3].Minor))
	// /dev/full can be opened. Without proc/devices it is not known that the number is wrong.
	testenv.Must(t, os.Remove(path), os.Remove(filepath.Join(s.node.Root(), "proc/devices")))
	testenv.Must(t, unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 7))))
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.awaitControl()
	open, err := os.Open(path)
	testenv.Must(t, err)
	defer open.Close()
	cmd := s.leftOver(3, open)
	s.showProcess(strconv.Itoa(cmd.Process.Pid))
	name := fmt.Sprintf("process %d (sleep, UID 0, cgroup ", cmd.Process.Pid)
	s.fails(1, "GPU 3 is in use by "+name, "reset", "3")
	testenv.Must(t, s.node.SetReset(3, sim.ResetFault{Result: sim.ResetBusy}))
	code, _, stderr := s.device("reset", "3", "--force")
	const what = "; use --wait to wait until it is free"
	if code != 1 || !strings.Contains(stderr, name) || !strings.Contains(stderr, what) {
		t.Errorf("exit %d, %q, want %q and %q", code, stderr, name, what)
	}
	if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process was ended: %v", err)
	}
	testenv.Must(t, s.node.SetReset(3, sim.ResetFault{Result: sim.ResetWorks}))
	testenv.Must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	testenv.Must(t, s.node.RemoveProcess(3, cmd.Process.Pid))
	s.does("was reset", "reset", "3", "--force")
}

// hasDriverOpen reports whether the program has one of the driver's device nodes open.
func (s *served) hasDriverOpen() bool {
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", s.process.Pid))
	testenv.Must(s.t, err)
	for _, fd := range fds {
		if target, _ := os.Readlink(fd); strings.HasPrefix(target, filepath.Join(s.node.Root(), "dev", "nvidia")) {
			return true
		}
	}
	return false
}

func TestServeReleasesTheDriver(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 4, 0)
	s.awaitControl()
	open := s.hasDriverOpen
	if !open() {
		t.Error("no device node is open, and the test shows nothing")
	}
	s.fails(1, "the NVIDIA driver is not released", "reopen")
	s.does("the NVIDIA driver is released", "release")
	if open() {
		t.Error("the released driver has a device node open")
	}
	s.logs("the NVIDIA driver is released: its devices stay advertised")
	const why = "an administrator has released the NVIDIA driver; open it again with: gpu-cdi-plugin device reopen"
	if refused := s.preStart(e, s.uuids()[1]); refused != why {
		t.Errorf("refused for %q, want %q", refused, why)
	}
	s.fails(1, why, "release")
	s.fails(1, why, "reset", "1")
	s.does("is cordoned", "cordon", "2", "--reason", "x") // needs no driver
	s.onlyUnhealthy(2)
	s.does("is uncordoned", "uncordon", "2")

	// No fault is noticed, and no device leaves, until it is reopened.
	testenv.Must(t, s.node.SetSilently(3, map[string]string{"remap-pending": "1"}))
	testenv.Must(t, s.node.Lose(0))
	s.reconcile()
	s.reconcile()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	testenv.Must(t, s.node.ClearGPU(0))
	s.does("the NVIDIA driver is opened again", "reopen")
	s.onlyUnhealthy(3)
	s.wantReady(e, s.uuids()[1])
	s.xid(1, 43, nil) // events are received again

	// The kernel module is loaded again; the library is not there meanwhile.
	version := s.node.Driver()
	s.does("the NVIDIA driver is released", "release")
	library, err := filepath.Rel(s.node.Root(), s.node.Library())
	testenv.Must(t, err)
	load := s.unloadModule(library)
	s.reconcile()
	s.onlyUnhealthy(3) // as before
	if refused := s.preStart(e, s.uuids()[1]); refused != why {
		t.Errorf("refused for %q, want %q", refused, why)
	}
	load()
	s.reloadModule()
	s.logs("the NVIDIA kernel module was loaded again, which ends the release")
	waitFor(t, "a device of driver "+version, func() bool { return s.preStart(e, s.uuids()[1]) == "" })

	// The driver is replaced.
	s.does("the NVIDIA driver is released", "release")
	_, err = sim.Create(t.Context(), s.node.Root(), s.node.Machine(), sim.Options{Driver: "590.44.01", Force: true})
	testenv.Must(t, err)
	s.logs("the NVIDIA driver was replaced: its libraries now have version 590.44.01")
	waitFor(t, "a device of the new driver", func() bool {
		e = s.kubelet.WaitListed(gpuResource, 4, 0)
		return s.tryPreStart(e, s.uuids()[1]) == nil
	})
	s.awaitControl()

	// The end of serve does not open it again.
	s.does("the NVIDIA driver is released", "release")
	testenv.Must(t, s.end(syscall.SIGTERM))
}

// unloadModule makes the node report no kernel module until load, and takes other files away too.
func (s *served) unloadModule(others ...string) (load func()) {
	s.t.Helper()
	rename := func(from, to string) {
		for _, f := range append(others, "sys/module/nvidia/version", "proc/driver/nvidia/version") {
			path := filepath.Join(s.node.Root(), f)
			if err := os.Rename(path+from, path+to); err != nil && !os.IsNotExist(err) {
				s.t.Fatal(err)
			}
		}
	}
	rename("", ".away")
	return func() { rename(".away", "") }
}

// reloadModule unloads the kernel module and loads it again, at once.
func (s *served) reloadModule() {
	s.t.Helper()
	dir := filepath.Join(s.node.Root(), "sys/module/nvidia")
	fresh := dir + ".fresh"
	testenv.Must(s.t, os.CopyFS(fresh, os.DirFS(dir)))
	testenv.Must(s.t, unix.Renameat2(unix.AT_FDCWD, fresh, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE))
}

// tryPreStart is preStart for a plugin that may be starting again.
func (s *served) tryPreStart(e *kubelettest.Endpoint, ids ...string) error {
	ctx, cancel := context.WithTimeout(s.t.Context(), 30*time.Second)
	defer cancel()
	_, err := e.Client.PreStartContainer(ctx, &v1beta1.PreStartContainerRequest{DevicesIds: ids})
	return err
}
