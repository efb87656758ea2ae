package proc

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

const procfs = "/proc"

func TestSelf(t *testing.T) {
	self, err := Self(procfs)
	testenv.Must(t, err)
	defer self.Close()
	testenv.Must(t, self.CheckRunning())
	program, err := os.Executable()
	testenv.Must(t, err)
	name, err := self.Executable()
	testenv.Must(t, err)
	stat, err := self.Stat()
	testenv.Must(t, err)
	if name != program || stat.Parent != os.Getppid() {
		t.Errorf("executable %s, want %s; parent %d, want %d", name, program, stat.Parent, os.Getppid())
	}
	mounts, err := self.Mounts()
	testenv.Must(t, err)
	var own unix.Stat_t
	testenv.Must(t, unix.Stat(procfs, &own))
	device := fmt.Sprintf("%d:%d", unix.Major(own.Dev), unix.Minor(own.Dev))
	if !slices.ContainsFunc(mounts, func(m Mount) bool { return m.Point == procfs && m.Device == device }) {
		t.Errorf("no mount of %s in %+v", procfs, mounts)
	}
}

// A process ends, and the kernel gives its ID to another one, while the first one is open.
func TestIDOfAProcessIsUsedAgain(t *testing.T) {
	testenv.Root(t)
	cmd := exec.Command("sleep", "600")
	testenv.Must(t, cmd.Start())
	pid := cmd.Process.Pid
	p, err := Open(procfs, pid)
	testenv.Must(t, err)
	defer p.Close()
	testenv.Must(t, p.CheckRunning(), cmd.Process.Kill())
	var info unix.Siginfo
	testenv.Must(t, unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOWAIT, nil))
	if err := p.CheckRunning(); !errors.Is(err, ErrEnded) {
		t.Errorf("before the parent has waited for the process: %v", err)
	}
	_ = cmd.Wait()
	if _, err := Open(procfs, pid); !errors.Is(err, ErrEnded) {
		t.Errorf("opened after the process has ended: %v", err)
	}
	startAs(t, pid)
	if err := p.CheckRunning(); !errors.Is(err, ErrEnded) {
		t.Errorf("when another process has the ID: %v", err)
	}
	if name, err := p.Namespace("mnt"); !errors.Is(err, ErrEnded) {
		t.Errorf("the namespace of the other process: %s, %v", name, err)
	}
}

// startAs starts a process with a free process ID.
func startAs(t *testing.T, pid int) {
	t.Helper()
	const file = "/proc/sys/kernel/ns_last_pid"
	last, err := os.ReadFile(file)
	testenv.Must(t, err)
	defer func() { _ = os.WriteFile(file, last, 0) }() // IDs that others have just had are not used again
	for range 1000 {                                   // others start processes too
		testenv.Must(t, os.WriteFile(file, []byte(strconv.Itoa(pid-1)), 0))
		cmd := exec.Command("sleep", "600")
		testenv.Must(t, cmd.Start())
		stop := func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
		if cmd.Process.Pid == pid {
			t.Cleanup(stop)
			return
		}
		stop()
	}
	t.Fatalf("the ID %d was never free", pid)
}

func TestUnexpectedFiles(t *testing.T) {
	for name, makeFile := range map[string]func(path string) error{
		"a link": func(path string) error { return os.Symlink("/etc/hostname", path) },
		"a FIFO": func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a file above the limit": func(path string) error {
			return errors.Join(os.WriteFile(path, []byte("name"), 0o600), os.Truncate(path, 1<<40))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			testenv.Must(t, os.Mkdir(filepath.Join(dir, "7"), 0o700), makeFile(filepath.Join(dir, "7/comm")))
			p, err := Open(dir, 7)
			testenv.Must(t, err)
			defer p.Close()
			if text, err := p.read("comm"); text != "" {
				t.Errorf("%q, %v", text, err)
			}
		})
	}
}

func TestParseStat(t *testing.T) {
	text := "12 (a) 9 (x) S 7 12 12 0 -1 4194560 155 0 0 0 0 0 0 0 20 0 6 0 4711 2000 3\n"
	if s, err := parseStat(text); err != nil || s != (Stat{State: "S", Parent: 7, Start: 4711, Threads: 6}) {
		t.Errorf("%+v, %v", s, err)
	}
	for _, bad := range []string{
		"", "12 (a) S 7", strings.Replace(text, "4711", "x", 1), strings.Replace(text, "7", "x", 1),
		strings.Replace(text, " 6 ", " x ", 1),
	} {
		if s, err := parseStat(bad); err == nil {
			t.Errorf("%q: %+v", bad, s)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add("12 (a) 9 (x) S 7 12 12 0 -1 4194560 155 0 0 0 0 0 0 0 20 0 1 0 4711 2000 3\n")
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := parseStat(text); (err == nil) == (s == Stat{}) {
			t.Errorf("stat %+v, error %v", s, err)
		}
	})
}

func FuzzParseStatus(f *testing.F) {
	own, err := os.ReadFile("/proc/self/status")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(own))
	s, err := parseStatus(string(own))
	if err != nil || len(s.UIDs) != 4 {
		f.Errorf("own status %+v, error %v", s, err)
	}
	f.Add("Name:\tX\nUid:\t0\nCapEff:\t0\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseStatus(text)
		if (err == nil) == (len(s.UIDs) == 0) {
			t.Errorf("status %+v, error %v", s, err)
		}
	})
}
