// Package proc runs programs for tests and checks. No other package under test/ imports os/exec.
package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// grace is the time between the end of a program's context and the closing of its pipes.
const grace = 10 * time.Second

// Cmd is a program to run. Its standard input is empty unless Stdin is set.
type Cmd struct {
	// Args are the program, by path or name, and its arguments.
	Args []string
	// Dir is the working directory; empty means the caller's, or "/" with Chroot.
	Dir string
	// Env is the whole environment; nil means the caller's.
	Env   []string
	Stdin io.Reader
	// Chroot makes a directory the program's root. Args[0] is then a path in it.
	Chroot string
	// Namespaces are the CLONE_NEW... flags of the program's own namespaces. Only Start uses them.
	Namespaces uintptr
}

// Result is the result of a program that has ended.
type Result struct {
	Code           int // exit status; 128 + N for a program that signal N ended
	Stdout, Stderr string
	Wall           time.Duration
	// CPU is the processor time of the program and of its descendants that were waited for.
	CPU time.Duration
}

// String returns the result as a text for a test's log.
func (r Result) String() string {
	return fmt.Sprintf("exit status %d\nstdout:\n%s\nstderr:\n%s", r.Code, r.Stdout, r.Stderr)
}

// Run runs c and waits for its end. It is an error if the program cannot be started or ctx ends first, but not if the
// exit status is not 0.
func Run(ctx context.Context, c Cmd) (Result, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, c.Args[0], c.Args[1:]...)
	cmd.Dir, cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = c.Dir, c.Env, c.Stdin, &stdout, &stderr
	cmd.WaitDelay = grace
	if c.Chroot != "" {
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: c.Chroot}
		if cmd.Dir == "" {
			cmd.Dir = "/"
		}
	}
	start := time.Now()
	err := cmd.Run()
	res := Result{Stdout: stdout.String(), Stderr: stderr.String(), Wall: time.Since(start)}
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || ctx.Err() != nil) {
		return res, fmt.Errorf("run %s: %w\n%s", strings.Join(c.Args, " "), err, res.Stderr)
	}
	res.Code = status(cmd.ProcessState)
	res.CPU = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	return res, nil
}

func status(s *os.ProcessState) int {
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signal() > 0 {
		return 128 + int(ws.Signal())
	}
	return s.ExitCode()
}

// Output runs a program and returns its standard output. An exit status other than 0 is an error.
func Output(ctx context.Context, args ...string) (string, error) {
	res, err := Run(ctx, Cmd{Args: args})
	if err != nil {
		return "", err
	}
	if res.Code != 0 {
		return "", fmt.Errorf("run %s: exit status %d: %s", strings.Join(args, " "), res.Code, res.Stderr)
	}
	return res.Stdout, nil
}

// Must runs a program and ends the test unless its exit status is want.
func Must(t testing.TB, want int, c Cmd) Result {
	t.Helper()
	res, err := Run(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if res.Code != want {
		t.Fatalf("%s: want exit status %d, got %v", strings.Join(c.Args, " "), want, res)
	}
	return res
}

// Look finds a program in PATH or in the directories of administrators' programs, which Debian's PATH for users omits.
func Look(name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin"} {
		if path, err := exec.LookPath(dir + "/" + name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("find program %s: %w", name, exec.ErrNotFound)
}
