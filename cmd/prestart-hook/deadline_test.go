package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestWithin(t *testing.T) {
	failed := errors.New("failed")
	if n, err := within(nil, "act", func() (int, error) { return 1, failed }); n != 1 || !errors.Is(err, failed) {
		t.Errorf("%d, %v, want the result of the act", n, err)
	}
	block := make(chan int)
	defer close(block)
	n, err := within(time.After(time.Millisecond), "read it", func() (int, error) { return <-block, nil })
	if n != 0 || err == nil || !strings.Contains(err.Error(), "read it: not done after 10s") {
		t.Errorf("%d, %v, want an error that names the act", n, err)
	}
}

// The hook ends and names the act that it has abandoned: reading the state, or the container's file system.
func TestTheHookEndsAtTheDeadline(t *testing.T) {
	t.Parallel()
	c := newContainer(t)
	mountSilent(t, c.path("/opt/driver"))
	silent, w, err := os.Pipe()
	testenv.Must(c.t, err)
	defer func() { _ = silent.Close(); _ = w.Close() }()
	state := func() io.Reader { return strings.NewReader(fmt.Sprintf(`{"id":"test","bundle":%q}`, c.bundle)) }
	ctx, cancel := context.WithTimeout(t.Context(), engineTimeout)
	defer cancel()
	var started []*exec.Cmd
	start := func(stdin io.Reader, stderr io.Writer) {
		cmd := exec.CommandContext(ctx, hookBinary(t), "create-container",
			"--libraries=/opt/driver:libcuda.so.1=libcuda.so.580.1")
		cmd.Stdin, cmd.Stderr = stdin, stderr
		testenv.Must(c.t, cmd.Start())
		started = append(started, cmd)
	}
	var noState, noFiles bytes.Buffer
	start(silent, &noState)
	start(state(), &noFiles)
	start(state(), fullPipe(t)) // where even the message blocks
	for i, cmd := range started {
		if err := cmd.Wait(); ctx.Err() != nil || cmd.ProcessState.ExitCode() != 1 {
			t.Errorf("hook %d: %v, want status 1", i, err)
		}
	}
	if want := "read the OCI state from standard input: not done after 10s"; !strings.Contains(noState.String(), want) {
		t.Errorf("without a state: %q, want %q", &noState, want)
	}
	if want := "prepare the container's root: not done after 10s"; !strings.Contains(noFiles.String(), want) {
		t.Errorf("with a file system that does not respond: %q, want %q", &noFiles, want)
	}
}

// An engine that gives up ends the runtime and its hooks.
func TestLiveTakesBack(t *testing.T) {
	for name, tc := range map[string]struct {
		act  func(*os.Process) error
		want string
	}{
		"at a signal":     {func(p *os.Process) error { return p.Signal(unix.SIGTERM) }, "terminated"},
		"at the deadline": {func(*os.Process) error { time.Sleep(deadline - undoTime); return nil }, "not done after 8s"},
	} {
		t.Run(name, func(t *testing.T) {
			for tries := 1; !takesBack(t, tc.act, tc.want); tries++ {
				if tries == 3 {
					t.Fatal("the hook did not wait for the file system that does not respond")
				}
			}
		})
	}
}

// takesBack starts the hook, acts while it waits for a file system, and checks that nothing is left of its work. It
// returns false if the hook has ended before: now and then the kernel answers for the file system.
func takesBack(t *testing.T, act func(*os.Process) error, want string) bool {
	t.Helper()
	a := newAttack(t)
	server := mountSilent(t, a.path("usr/lib/x"))
	a.start()
	table := a.mountTable()
	cmd := exec.Command(hookBinary(t), "create-runtime")
	cmd.Env, cmd.Stdin = a.env, strings.NewReader(a.state())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	testenv.Must(t, cmd.Start())
	// The last mount of the spec is there: it makes links on the file system that does not respond.
	testenv.Eventually(t, "the last mount", func() bool { return strings.Contains(a.mountTable(), "libcuda.so.580.1") })
	time.Sleep(100 * time.Millisecond)
	ended := func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
		return err == nil && strings.Contains(string(stat), ") Z ")
	}
	early := ended()
	if !early {
		testenv.Must(t, act(cmd.Process))
		time.Sleep(100 * time.Millisecond)
		early = ended() // which a hook that waits for the file system cannot have
	}
	testenv.Must(t, server.Close())
	_ = cmd.Wait()
	if early {
		t.Logf("the hook ended before: %v: %s", cmd.ProcessState, &stderr)
		return false
	}
	if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(stderr.String(), want) {
		t.Errorf("%v: %s", cmd.ProcessState, &stderr)
	}
	if _, err := os.Lstat(a.path("dev/nvidia0")); err == nil || a.mountTable() != table {
		t.Errorf("nothing was taken back: %v\n%s", err, a.mountTable())
	}
	return true
}

// mountSilent mounts a FUSE file system without a server. It answers with errors when the server is closed.
func mountSilent(t *testing.T, dir string) (server *os.File) {
	t.Helper()
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		testenv.Skip(t, "needs FUSE: "+err.Error())
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())
	testenv.Must(t, unix.Mount("silent", dir, "fuse", 0, options))
	t.Cleanup(func() {
		_ = unix.Unmount(dir, unix.MNT_DETACH)
		_ = fuse.Close()
	})
	return fuse
}

// fullPipe returns the write end of a pipe without room.
func fullPipe(t *testing.T) *os.File {
	t.Helper()
	var fds [2]int
	testenv.Must(t, unix.Pipe2(fds[:], unix.O_CLOEXEC))
	r, w := os.NewFile(uintptr(fds[0]), "read"), os.NewFile(uintptr(fds[1]), "write")
	t.Cleanup(func() { _ = r.Close(); _ = w.Close() })
	size, err := unix.FcntlInt(w.Fd(), unix.F_GETPIPE_SZ, 0)
	testenv.Must(t, err)
	if _, err := io.WriteString(w, strings.Repeat("x", size)); err != nil {
		t.Fatal(err)
	}
	return w
}
