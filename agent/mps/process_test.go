package mps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestRecordRoundTrips(t *testing.T) {
	dir := t.TempDir()
	if _, err := readRecord(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a file: %v", err)
	}
	want, err := recordOf(os.Getpid(), "580.1")
	must(t, err)
	must(t, want.write(dir))
	got, err := readRecord(dir)
	must(t, err)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	info, err := os.Stat(filepath.Join(dir, recordName))
	must(t, err)
	if info.Mode().Perm() != 0o600 || !got.matches() {
		t.Errorf("mode %v, matches %t", info.Mode(), got.matches())
	}
}

func TestARecordMatchesOneProcess(t *testing.T) {
	mine, err := recordOf(os.Getpid(), "580.1")
	must(t, err)
	for name, change := range map[string]func(*record){
		"another start":     func(r *record) { r.Started++ },
		"another boot":      func(r *record) { r.Boot = "b" },
		"another process":   func(r *record) { r.PID = os.Getppid() },
		"no process at all": func(r *record) { r.PID = 1 << 30 },
	} {
		other := mine
		change(&other)
		if other.matches() {
			t.Errorf("%s: it matches", name)
		}
	}
}

func TestInvalidRecords(t *testing.T) {
	for name, text := range map[string]string{
		"nothing":       "",
		"no JSON":       "12\n",
		"half a record": `{"pid":12,"sta`,
		"init":          `{"pid":1,"started":5,"boot":"a"}`,
		"a group":       `{"pid":-12,"started":5,"boot":"a"}`,
		"no boot":       `{"pid":12,"started":5}`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			must(t, os.WriteFile(filepath.Join(dir, recordName), []byte(text), 0o600))
			if r, err := readRecord(dir); err == nil {
				t.Errorf("got %+v, error %v", r, err)
			}
		})
	}
	dir := t.TempDir()
	must(t, unix.Mkfifo(filepath.Join(dir, recordName), 0o600))
	if _, err := readRecord(dir); err == nil {
		t.Error("a FIFO is a record")
	}
	dir = t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, recordName), make([]byte, maxRecord+1), 0o600))
	if _, err := readRecord(dir); err == nil || !strings.Contains(err.Error(), "the limit is") {
		t.Errorf("a large file: %v", err)
	}
}

func TestParseStart(t *testing.T) {
	const rest = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20"
	for stat, want := range map[string]uint64{
		"12 (sleep)" + rest:                    4242,
		"12 (a) R 1 (b) S 1 1 1 1 1)" + rest:   4242,
		"12 (sleep) S 1 2 3":                   0,
		"":                                     0,
		"12 (x) S a b c d e f g h i j k l m n": 0,
	} {
		if got, err := parseStart(stat); got != want || (err == nil) != (want > 0) {
			t.Errorf("%q: %d, %v", stat, got, err)
		}
	}
}

func FuzzParseRecord(f *testing.F) {
	f.Add([]byte(`{"pid":12,"started":5,"boot":"a","driver":"580"}`))
	f.Add([]byte(`{"pid":1e9}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := parseRecord(data)
		if (err == nil) != (r.PID > 1 && r.Started > 0 && r.Boot != "") {
			t.Errorf("%+v and %v", r, err)
		}
		_, _ = parseStart(string(data))
	})
}

// how returns how a process ended.
func how(p *process) string { return context.Cause(p.ended).Error() }

func TestProcess(t *testing.T) {
	cmd := exec.Command("sleep", "600")
	must(t, cmd.Start())
	p, err := openProcess(cmd.Process.Pid, nil)
	must(t, err)
	if !p.runs() || p.hasChildren() {
		t.Errorf("runs %t, serving %t", p.runs(), p.hasChildren())
	}
	other, err := openProcess(cmd.Process.Pid, func() bool { return true })
	must(t, err)
	other.close() // the process continues
	if _, err := openProcess(cmd.Process.Pid, func() bool { return false }); err == nil {
		t.Error("another process was opened")
	}
	must(t, p.signal(unix.SIGTERM))
	<-p.done()
	if p.runs() || how(p) != "was ended by signal SIGTERM" {
		t.Errorf("runs %t, %s", p.runs(), how(p))
	}
	if err := p.signal(unix.SIGKILL); !errors.Is(err, unix.ESRCH) {
		t.Errorf("a signal to one that has ended: %v", err)
	}
	p.close()
	var status unix.WaitStatus
	if _, err := unix.Wait4(cmd.Process.Pid, &status, unix.WNOHANG, nil); !errors.Is(err, unix.ECHILD) {
		t.Errorf("it was not reaped: %v", err)
	}
	var none *process
	if none.close(); none.runs() || none.done() != nil {
		t.Error("no process runs")
	}
}

// ReapChildren reaps any child, so no other test may run at the same time.
func TestReapChildren(t *testing.T) {
	left := exec.Command("true")
	must(t, left.Start())
	defer func() { _ = left.Wait() }()
	eventually(t, "the end of what was left", func() bool {
		ReapChildren()
		_, err := os.Stat(fmt.Sprintf("/proc/%d", left.Process.Pid))
		return err != nil
	})
	ReapChildren() // without a child
}
