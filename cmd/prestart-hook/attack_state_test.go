package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// The state names another process than the container's, or the bundle is another one than the runtime read. Nothing
// changes, neither on the host nor in the container.
func TestAttackByTheState(t *testing.T) {
	victim := func(a *attack) string { return a.outside + "/victim" }
	for name, tc := range map[string]struct {
		// attack changes the bundle, or returns another state. The container is there.
		attack func(a *attack) (state string)
		want   string
	}{
		"process 1":         {func(a *attack) string { return a.stateOf(1) }, "which no container's process has"},
		"no process":        {func(a *attack) string { return a.stateOf(0) }, "which no container's process has"},
		"a process group":   {func(a *attack) string { return a.stateOf(-a.pid()) }, "which no container's process has"},
		"the runtime":       {func(a *attack) string { return a.stateOf(os.Getpid()) }, "it is a child of process"},
		"an unused process": {func(a *attack) string { return a.stateOf(1 << 30) }, "the process has ended"},
		"a process that has ended": {func(a *attack) string {
			testenv.Must(a.t, a.process.Process.Kill())
			var info unix.Siginfo // it is not waited for: its ID is not used again
			testenv.Must(a.t, unix.Waitid(unix.P_PID, a.pid(), &info, unix.WEXITED|unix.WNOWAIT, nil))
			return a.state()
		}, "the process has ended"},
		"another runtime's container": {func(a *attack) string {
			// The shell makes it, and is the runtime of no hook.
			out, err := exec.Command("/bin/sh", "-c", "unshare --mount sleep 600 >&- 2>&- & echo $!").Output()
			testenv.Must(a.t, err)
			var pid int
			_, err = fmt.Sscan(string(out), &pid)
			testenv.Must(a.t, err)
			a.t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
			return a.stateOf(pid)
		}, "it is a child of process"},
		"a process in the host's namespaces": {func(a *attack) string {
			other := exec.Command("sleep", "600")
			testenv.Must(a.t, other.Start())
			a.t.Cleanup(func() { end(other) })
			return a.stateOf(other.Process.Pid)
		}, "in the mount namespace of this hook"},
		"a container that has pivoted": {func(a *attack) string {
			other := exec.Command("sleep", "600")
			other.SysProcAttr = &syscall.SysProcAttr{Chroot: "/", Cloneflags: unix.CLONE_NEWNS}
			testenv.Must(a.t, other.Start())
			a.t.Cleanup(func() { end(other) })
			return a.stateOf(other.Process.Pid)
		}, "is not a mount point"},
		"another container's root, which the host has mounted": {func(a *attack) string {
			a.writeJSON(a.bundle+"/config.json", a.config(victim(a)))
			return a.state()
		}, "the host has that mount too"},
		"the root is the bundle of another": {func(a *attack) string {
			a.writeJSON(a.bundle+"/config.json", a.config("../outside/victim"))
			return a.state()
		}, "is not inside the bundle"},
		"the root is /": {func(a *attack) string {
			a.writeJSON(a.bundle+"/config.json", a.config("/"))
			return a.state()
		}, "the root of the host"},
		"the root is that of the host by a link of /proc": {func(a *attack) string {
			a.writeJSON(a.bundle+"/config.json", a.config("/proc/1/root"))
			return a.state()
		}, "root"},
		"the root is another user's link to another container's": {func(a *attack) string {
			testenv.Must(a.t, os.Symlink(victim(a), a.bundle+"/link"))
			testenv.Must(a.t, os.Lchown(a.bundle, 1000, 1000))
			testenv.Must(a.t, os.Lchown(a.bundle+"/link", 1000, 1000))
			testenv.Must(a.t, os.Lchown(a.bundle+"/config.json", 1000, 1000))
			a.writeJSON(a.bundle+"/config.json", a.config("link"))
			return a.state()
		}, "is not followed, since others can change it"},
		"a user namespace that the container has not": {func(a *attack) string {
			a.users = true
			a.writeJSON(a.bundle+"/config.json", a.config("rootfs"))
			return a.state()
		}, "config.json is not that of process"},
		"annotations that the runtime has not read": {func(a *attack) string {
			state := a.state()
			a.annotations = map[string]string{"team": "blue"}
			a.writeJSON(a.bundle+"/config.json", a.config("rootfs"))
			return state
		}, "its annotation \"team\" differs from the OCI state's"},
		"a state without annotations": {func(a *attack) string {
			return strings.Replace(a.state(), `"annotations"`, `"x"`, 1)
		}, "its annotation \"cdi.k8s.io/gpu\" differs from the OCI state's"},
		"config.json of another user than the bundle": {func(a *attack) string {
			testenv.Must(a.t, os.Chown(a.bundle+"/config.json", 1000, 1000))
			return a.state()
		}, "config.json belongs to user 1000, its bundle to user 0"},
		"config.json is a hard link": {func(a *attack) string {
			testenv.Must(a.t, os.Link(a.bundle+"/config.json", a.bundle+"/other"))
			return a.state()
		}, "config.json has 2 names (hard links), want one"},
		"config.json is a secret": {func(a *attack) string {
			testenv.Must(a.t, os.Remove(a.bundle+"/config.json"))
			testenv.Must(a.t, os.Symlink(a.outside+"/secret", a.bundle+"/config.json"))
			return a.state()
		}, "config.json is a symbolic link"},
		"config.json is a hard link to a secret": {func(a *attack) string {
			testenv.Must(a.t, os.Remove(a.bundle+"/config.json"))
			testenv.Must(a.t, os.Link(a.outside+"/secret", a.bundle+"/config.json"))
			return a.state()
		}, "config.json: read the annotations: invalid character"},
		"config.json is a FIFO": {func(a *attack) string {
			testenv.Must(a.t, os.Remove(a.bundle+"/config.json"))
			testenv.Must(a.t, unix.Mkfifo(a.bundle+"/config.json", 0o666))
			return a.state()
		}, "is a FIFO"},
		"config.json has 4 GiB": {func(a *attack) string {
			testenv.Must(a.t, os.Truncate(a.bundle+"/config.json", 4<<30))
			return a.state()
		}, "the limit is"},
		"a bundle that is no UTF-8": {func(a *attack) string {
			return strings.Replace(a.state(), "/bundle", "/bundle\xff", 1)
		}, "no such file"},
		"a relative bundle": {func(a *attack) string {
			return strings.Replace(a.state(), a.bundle, "bundle", 1)
		}, "bundle"},
		"a state of 8 MiB": {func(a *attack) string {
			return strings.Replace(a.state(), `"id"`, `"x":"`+strings.Repeat("x", 8<<20)+`","id"`, 1)
		}, "larger than"},
		"a state of 100,000 levels": {func(a *attack) string {
			return strings.Replace(a.state(), `"id"`, `"x":`+strings.Repeat("[", 100_000)+`,"id"`, 1)
		}, "read the OCI state"},
		"no state": {func(*attack) string { return "" }, "the input is empty"},
		"the cgroup of another container": {func(a *attack) string {
			other := exec.Command("sleep", "600")
			testenv.Must(a.t, other.Start())
			a.t.Cleanup(func() { end(other) })
			a.restrict(a.pid(), other.Process.Pid)
			return a.state()
		}, "is also in this cgroup, so it is not that of a new container"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAttack(t)
			a.start()
			state := tc.attack(a)
			before, table := a.host(), ""
			alive := !strings.Contains(name, "has ended")
			if alive {
				table = a.mountTable()
			}
			status, stderr := a.hook(strings.NewReader(state), hookBinary(t), "create-runtime")
			if status != 1 || !strings.Contains(stderr, tc.want) || len(stderr) > 3000 {
				t.Errorf("status %d: %.3000s, want %q", status, stderr, tc.want)
			}
			if strings.Contains(stderr, "precious") {
				t.Errorf("the message has a secret: %s", stderr)
			}
			if alive && a.mountTable() != table {
				t.Errorf("the container has other mounts:\n%s", a.mountTable())
			}
			before.Check(t)
		})
	}
}

// restrict puts processes into a new cgroup that admits no device, which the host has.
func (a *attack) restrict(pids ...int) {
	a.t.Helper()
	a.cgroup = fmt.Sprintf("/sys/fs/cgroup/devices/attack-%d", pids[0])
	if err := os.Mkdir(a.cgroup, 0o755); err != nil {
		testenv.Skip(a.t, "needs cgroup v1: "+err.Error())
	}
	testenv.Must(a.t, os.WriteFile(a.cgroup+"/devices.deny", []byte("a"), 0o200))
	a.t.Cleanup(func() { _ = os.Remove(a.cgroup) })
	for _, pid := range pids {
		pid := strconv.Itoa(pid)
		testenv.Must(a.t, os.WriteFile(a.cgroup+"/cgroup.procs", []byte(pid), 0o200))
		a.t.Cleanup(func() { _ = os.WriteFile("/sys/fs/cgroup/devices/cgroup.procs", []byte(pid), 0o200) })
	}
}

// The container's process ends at any time, and its ID may be used again.
func TestAttackByDeath(t *testing.T) {
	a := newAttack(t)
	before := a.host()
	for begin := time.Now(); time.Since(begin) < *attackTime; {
		a.start()
		process := a.process
		var killed sync.WaitGroup
		killed.Go(func() {
			time.Sleep(rand.N(8 * time.Millisecond))
			_ = process.Process.Kill()
			_, _ = process.Process.Wait()
		})
		if status, stderr := inCreateRuntime(a); status != 0 && stderr == "" {
			t.Errorf("status %d without a message", status)
		}
		killed.Wait()
	}
	before.Check(t)
}

// A file system of the container never answers: the hook ends, and the container does not start.
func TestSlowAttackByASilentFileSystem(t *testing.T) {
	t.Parallel()
	a := newAttack(t)
	testenv.Must(t, os.MkdirAll(a.path("/opt/driver"), 0o755))
	testenv.Must(t, os.Mkdir(a.outside+"/silent", 0o755))
	before := a.host()
	mountSilent(t, a.outside+"/silent")
	a.volumes["/opt/driver"] = a.outside + "/silent"
	a.start()
	status, stderr := inCreateRuntime(a)
	if status != 1 || !strings.Contains(stderr, "not given after 10s, abandoned") {
		t.Errorf("status %d: %s", status, stderr)
	}
	end(a.process)
	testenv.Must(t, unix.Unmount(a.outside+"/silent", unix.MNT_DETACH))
	before.Check(t)
}
