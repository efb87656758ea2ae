package prepare

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/test/lib/testenv"
)

// fakeProc is a host whose /proc is that of a container.
func fakeProc(t testing.TB) host.Host {
	t.Helper()
	root := t.TempDir()
	testenv.Must(t, os.MkdirAll(filepath.Join(root, "proc/thread-self/ns"), 0o755))
	testenv.Must(t, os.Symlink("pid:[4026532245]", filepath.Join(root, "proc/thread-self/ns/pid")))
	h, err := host.New(root, "", "")
	testenv.Must(t, err)
	return h
}

// Which processes may use a device that is about to be given away.
func TestKnownPrograms(t *testing.T) {
	testenv.Root(t)
	user := func(uid uint32) syscall.SysProcAttr {
		return syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	const service, seated, remote = 110, 1000, 1001 // users: a system account, one at a seat, and one who is not
	nobody := &syscall.Credential{Uid: 65534, Gid: 65534}
	othersFile := func(path string) error { return os.Chown(path, remote, remote) }
	othersDir := func(path string) error { return os.Chmod(filepath.Dir(path), 0o777) }
	draws := gpu.Process{Graphics: true}
	for name, c := range map[string]struct {
		program string
		file    func(path string) error // what is done to the program's file; nil leaves it root's
		cgroup  string                  // name; empty is that of the test
		attr    syscall.SysProcAttr
		context gpu.Process // kinds of context; the zero value is Compute
		want    bool        // whether the device is given away
	}{
		"a desktop's program":            {program: "firefox", attr: user(seated), context: draws, want: true},
		"a program of root that draws":   {program: "firefox", context: draws, want: true},
		"a remote user who draws":        {program: "firefox", attr: user(remote), context: draws},
		"a remote user's display server": {program: "Xorg", attr: user(remote), context: draws},
		"a service's program that draws": {program: "firefox", attr: user(service), context: draws},
		"nobody's program that draws":    {program: "firefox", attr: user(65534), context: draws},
		"a desktop's program of the user": {
			program: "game", file: othersFile, attr: user(seated), context: draws, want: true,
		},
		"a desktop's program that computes too": {
			program: "firefox", attr: user(seated), context: gpu.Process{Graphics: true, Compute: true},
		},
		"a client of MPS that draws": {
			program: "firefox", attr: user(seated), context: gpu.Process{Graphics: true, MPS: true},
		},
		"a container's program that draws": {
			program: "firefox", cgroup: containerName("d"), attr: user(seated), context: draws,
		},
		"an unknown program":                         {program: "python3"},
		"a display server of the host":               {program: "Xorg", want: true},
		"a display server of a user at a seat":       {program: "gnome-shell", attr: user(seated), want: true},
		"the same, in a file of the user":            {program: "gnome-shell", file: othersFile, attr: user(seated)},
		"the same, in a directory of all users":      {program: "gnome-shell", file: othersDir, attr: user(seated)},
		"the same, in a file that is gone":           {program: "gnome-shell", file: os.Remove, attr: user(seated)},
		"a remote user who calls a program so":       {program: "nvidia-smi", file: othersFile, attr: user(remote)},
		"a remote user who runs root's program":      {program: "nvidia-smi", attr: user(remote)}, // by LD_PRELOAD
		"a daemon of a system account":               {program: "nvidia-persistenced", attr: user(service), want: true},
		"a system account that calls its program so": {program: "Xorg", file: othersFile, attr: user(service)},
		"a monitoring agent in a container":          {program: "dcgm-exporter", cgroup: containerName("a"), want: true},
		"a container's program that calls itself a display server": {
			program: "Xorg", cgroup: containerName("b"), attr: syscall.SysProcAttr{Credential: nobody},
		},
		"a program in a pod's cgroup that is of no container": {
			program: "Xorg", cgroup: "kubepods-pod1", attr: syscall.SysProcAttr{Credential: nobody},
		},
		"a container without a cgroup, which has its own PID namespace": {
			program: "Xorg", attr: syscall.SysProcAttr{Credential: nobody, Cloneflags: syscall.CLONE_NEWPID},
		},
		"root of a container's user namespace": {
			program: "Xorg", cgroup: containerName("c"), attr: syscall.SysProcAttr{
				Cloneflags:  syscall.CLONE_NEWUSER,
				UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
				GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
			},
		},
		"a user namespace without a cgroup": {
			program: "Xorg", attr: syscall.SysProcAttr{
				Cloneflags:  syscall.CLONE_NEWUSER,
				UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65534, Size: 1}},
				GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 65534, Size: 1}},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			cgroup := ""
			if c.cgroup != "" {
				cgroup = makeCgroup(t, c.cgroup)
			}
			attr, path := c.attr, copyProgram(t, c.program)
			pid := start(t, cgroup, &attr, path, "1000").Process.Pid
			if c.file != nil {
				testenv.Must(t, c.file(path))
			}
			c.context.PID, c.context.MemoryBytes = pid, 1<<30
			c.context.Compute = c.context.Compute || !c.context.Graphics
			f := &fakeNode{use: gpu.Use{Processes: []gpu.Process{c.context}, MemoryUsed: 1<<30 + 5<<20}}
			r := newRunner(t, f)
			r.opts.Host = hostWithSeat(t, filepath.Dir(path), seated)
			rec, err := runOne(r, t.Context(), device, DefaultRules())
			want := ""
			if !c.want {
				want = "(processes): process " + strconv.Itoa(pid) + " (" + c.program
			}
			checkError(t, err, want)
			if err != nil && !strings.Contains(err.Error(), c.cgroup) {
				t.Errorf("the error does not name the cgroup %s: %v", c.cgroup, err)
			}
			if last := rec.Steps[len(rec.Steps)-1]; c.want && last.Note != "5 MiB in use" {
				t.Errorf("the last step is %+v", last)
			}
		})
	}
}

// hostWithSeat returns this host with a user at a seat. Of its files it has those in a directory only.
func hostWithSeat(t testing.TB, dir string, uid int) host.Host {
	t.Helper()
	root := t.TempDir()
	seats := filepath.Join(root, "run/systemd/seats")
	seat := fmt.Sprintf("# This is private data. Do not parse.\nIS_SEAT0=1\nSESSIONS=c1 2\nUIDS=120 %d\n", uid)
	testenv.Must(t, os.MkdirAll(seats, 0o755), os.WriteFile(filepath.Join(seats, "seat0"), []byte(seat), 0o600),
		os.Symlink("/proc", filepath.Join(root, "proc")),
		os.MkdirAll(filepath.Dir(filepath.Join(root, dir)), 0o755), os.Symlink(dir, filepath.Join(root, dir)))
	h, err := host.New(root, "", "")
	testenv.Must(t, err)
	return h
}

func TestMemoryOfKnownProgramsThatIsNotReported(t *testing.T) {
	pid := start(t, "", nil, copyProgram(t, "Xorg"), "1000").Process.Pid
	f := &fakeNode{use: gpu.Use{Processes: []gpu.Process{{PID: pid}}, MemoryUsed: 1 << 30}}
	rec, err := runOne(newRunner(t, f), t.Context(), device, DefaultRules())
	checkError(t, err, "")
	if last := rec.Steps[len(rec.Steps)-1]; last.Result != Skipped {
		t.Errorf("the last step is %+v", last)
	}
}

// A container is started again before the driver has let go of the processes of its last run.
func TestProcessesThatEndNow(t *testing.T) {
	cmd := start(t, "", nil, "sleep", "1000")
	f := &fakeNode{use: gpu.Use{Processes: []gpu.Process{{PID: cmd.Process.Pid}}, MemoryUsed: 1 << 30}}
	r := newRunner(t, f)
	r.opts.AwaitUnused = plenty
	time.AfterFunc(50*time.Millisecond, func() {
		_ = cmd.Process.Kill()
		f.set(gpu.Use{MemoryUsed: 1 << 30})
	})
	time.AfterFunc(100*time.Millisecond, func() { f.set(gpu.Use{}) })
	_, err := runOne(r, t.Context(), device, DefaultRules())
	checkError(t, err, "")
}

func TestProcessThatDoesNotExist(t *testing.T) {
	cmd := start(t, "", nil, "true")
	testenv.Eventually(
		t,
		"the process is collected",
		func() bool { return !exists(fmt.Sprintf("/proc/%d", cmd.Process.Pid)) },
	)
	f := &fakeNode{use: gpu.Use{Processes: []gpu.Process{{PID: cmd.Process.Pid}, {PID: 0}}}}
	_, err := runOne(newRunner(t, f), t.Context(), device, DefaultRules())
	checkError(
		t,
		err,
		"process "+strconv.Itoa(cmd.Process.Pid)+" (not in /proc), process 0 (not in /proc) still uses it",
	)
}
