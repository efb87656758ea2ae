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
	nobody := &syscall.Credential{Uid: 65534, Gid: 65534}
	for name, c := range map[string]struct {
		program string
		cgroup  string // name; empty is that of the test
		attr    syscall.SysProcAttr
		context gpu.Process // kinds of context; the zero value is Compute
		want    bool        // whether the device is given away
	}{
		"a desktop's program": {program: "firefox", context: gpu.Process{Graphics: true}, want: true},
		"a desktop's program that computes too": {
			program: "firefox", context: gpu.Process{Graphics: true, Compute: true},
		},
		"a client of MPS that draws": {program: "firefox", context: gpu.Process{Graphics: true, MPS: true}},
		"a container's program that draws": {
			program: "firefox", cgroup: containerName("d"), context: gpu.Process{Graphics: true},
		},
		"an unknown program":           {program: "python3"},
		"a display server of the host": {program: "Xorg", want: true},
		"a display server of a user": {
			program: "gnome-shell", attr: syscall.SysProcAttr{Credential: nobody}, want: true,
		},
		"a monitoring agent in a container": {program: "dcgm-exporter", cgroup: containerName("a"), want: true},
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
			attr := c.attr
			pid := start(t, cgroup, &attr, copyProgram(t, c.program), "1000").Process.Pid
			c.context.PID, c.context.MemoryBytes = pid, 1<<30
			c.context.Compute = c.context.Compute || !c.context.Graphics
			f := &fakeNode{use: gpu.Use{Processes: []gpu.Process{c.context}, MemoryUsed: 1<<30 + 5<<20}}
			rec, err := runOne(newRunner(t, f), t.Context(), device, DefaultRules())
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
