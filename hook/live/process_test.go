package live

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
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
		"no process":             {0, os.Getpid(), "not the container's on the host"},
		"process 1":              {1, os.Getpid(), "not the container's on the host"},
		"a negative ID":          {-1, os.Getpid(), "not the container's on the host"},
		"an ID that is not used": {1 << 30, os.Getpid(), "pidfd_open: "},
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
		"of a runtime that ended": {c.cmd.Process.Pid, ended.cmd.Process.Pid, "the runtime that made it has ended"},
		"a process that ended":    {ended.cmd.Process.Pid, os.Getpid(), "it has ended"},
	} {
		t.Run(name, func(t *testing.T) {
			maker, err := openRuntime(tc.runtime)
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

// The container's process ends, and the kernel gives its ID to another one, while the hook has the first one open.
func TestIDOfAProcessIsUsedAgain(t *testing.T) {
	h, err := host.New("/", "/", "/")
	if err != nil {
		t.Fatal(err)
	}
	maker, err := openRuntime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer maker.Close()
	created := newCreated(t, t.TempDir())
	pid := created.cmd.Process.Pid
	p, err := openProcess(pid, maker, h)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if err := p.checkAlive(); err != nil {
		t.Fatal(err)
	}
	_ = created.cmd.Process.Kill()
	_ = created.cmd.Wait()
	startAs(t, pid)
	if _, err := os.Stat(h.Proc(itoa(pid), "ns", "mnt")); err != nil {
		t.Fatal(err)
	}
	if err := p.checkAlive(); err == nil || !strings.Contains(err.Error(), "it has ended") {
		t.Error("the process of the hook is alive:", err)
	}
	if f, err := openFile(p.dir, "ns/mnt"); err == nil {
		_ = f.Close()
		t.Error("the directory of the process is that of another one")
	}
}

// startAs starts a process with a free process ID.
func startAs(t *testing.T, pid int) {
	t.Helper()
	const file = "/proc/sys/kernel/ns_last_pid"
	last, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.WriteFile(file, last, 0) }() // IDs that others have just had are not used again
	for range 1000 {                                   // others start processes too
		if err := os.WriteFile(file, []byte(itoa(pid-1)), 0); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("sleep", "600")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		stop := func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
		if cmd.Process.Pid == pid {
			t.Cleanup(stop)
			return
		}
		stop()
	}
	t.Fatalf("the ID %d was never free", pid)
}

func TestParseStat(t *testing.T) {
	text := "12 (a) 9 (x) S 7 12 12 0 -1 4194560 155 0 0 0 0 0 0 0 20 0 1 0 4711 2000 3\n"
	if s, err := parseStat(text); err != nil || s != (stat{7, 4711}) {
		t.Errorf("%+v, %v", s, err)
	}
	for _, bad := range []string{
		"", "12 (a) S 7", strings.Replace(text, "4711", "x", 1), strings.Replace(text, "7", "x", 1),
	} {
		if s, err := parseStat(bad); err == nil {
			t.Errorf("%q: %+v", bad, s)
		}
	}
}

func TestIDMap(t *testing.T) {
	m, err := parseMap("         0     100000      1000\n      1000 5 1\n")
	if err != nil {
		t.Fatal(err)
	}
	got := map[uint32]int{}
	for _, id := range []uint32{0, 999, 1000, 1001, 4294967295} {
		if host, err := m.host(id); err == nil {
			got[id] = host
		}
	}
	if diff := gocmp.Diff(map[uint32]int{0: 100000, 999: 100999, 1000: 5}, got); diff != "" {
		t.Error(diff)
	}
	for _, text := range []string{"0 1", "x", "\n", "0 -1 1"} {
		if m, err := parseMap(text); err == nil {
			t.Errorf("%q: %v", text, m)
		}
	}
}
