package live

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
)

func itoa(n int) string { return strconv.Itoa(n) }

func TestOpenProcess(t *testing.T) {
	h, err := host.New("/", "/", "/")
	if err != nil {
		t.Fatal(err)
	}
	c := newCreated(t, t.TempDir())
	other := exec.Command("cat")
	input, err := other.StdinPipe()
	if err == nil {
		err = other.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = input.Close(); _ = other.Wait() })
	time.Sleep(30 * time.Millisecond) // the kernel counts start times in steps of 10 ms
	second, ended := newCreated(t, t.TempDir()), newCreated(t, t.TempDir())
	_ = ended.cmd.Process.Kill() // and not waited for: its ID is not used again
	var info unix.Siginfo
	if err := unix.Waitid(unix.P_PID, ended.cmd.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	here := exec.Command("sleep", "600")
	if err := here.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = here.Process.Kill(); _ = here.Wait() })
	for name, tc := range map[string]struct {
		pid, runtime int
		want         string
	}{
		"a container":            {c.cmd.Process.Pid, os.Getpid(), ""},
		"an orphan":              {second.cmd.Process.Pid, c.cmd.Process.Pid, ""},
		"no process":             {0, os.Getpid(), "which no container's process has"},
		"process 1":              {1, os.Getpid(), "which no container's process has"},
		"a negative ID":          {-1, os.Getpid(), "which no container's process has"},
		"an ID that is not used": {1 << 30, os.Getpid(), "the process has ended"},
		"of another program": {
			second.cmd.Process.Pid, other.Process.Pid, "it is a child of process " + itoa(os.Getpid()),
		},
		"older than the runtime": {
			c.cmd.Process.Pid, second.cmd.Process.Pid, "it is a child of process " + itoa(os.Getpid()),
		},
		"the runtime":             {c.cmd.Process.Pid, c.cmd.Process.Pid, "it is a child of process " + itoa(os.Getpid())},
		"of no ancestor":          {second.cmd.Process.Pid, os.Getppid(), "it is a child of process " + itoa(os.Getpid())},
		"in the same mounts":      {here.Process.Pid, os.Getpid(), "in the mount namespace of this hook"},
		"of process 1":            {c.cmd.Process.Pid, 1, "the parent of this hook is process 1"},
		"of a runtime that ended": {c.cmd.Process.Pid, ended.cmd.Process.Pid, "the runtime that made it: "},
		"a process that ended":    {ended.cmd.Process.Pid, os.Getpid(), "the process has ended"},
	} {
		t.Run(name, func(t *testing.T) {
			maker, err := openRuntime(h, tc.runtime)
			var p *process
			if err == nil {
				defer maker.Close()
				p, err = openProcess(tc.pid, maker, h)
			}
			if err == nil {
				defer p.close()
			}
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}
