package proc

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Process is a running program.
type Process struct {
	args []string
	cmd  *exec.Cmd
	done chan struct{}
}

// Start starts c with its output to a file, and does not wait for its end. The caller must end it, for example with
// Kill.
func Start(c Cmd, output *os.File) (*Process, error) {
	cmd := exec.Command(c.Args[0], c.Args[1:]...)
	cmd.Dir, cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = c.Dir, c.Env, c.Stdin, output, output
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: c.Namespaces, Chroot: c.Chroot}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", strings.Join(c.Args, " "), err)
	}
	p := &Process{args: c.Args, cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		// The exit status is in cmd.ProcessState. There is no other error, since the output is a file.
		_ = cmd.Wait()
	}()
	return p, nil
}

// Pid returns the process ID in the caller's namespace.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done returns a channel that is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Code returns the exit status of a process that has ended, like Result.Code.
func (p *Process) Code() int {
	<-p.done
	return status(p.cmd.ProcessState)
}

// Signal sends a signal. It is not an error if the process has ended.
func (p *Process) Signal(sig syscall.Signal) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %v to %s: %w", sig, p.args[0], err)
	}
	return nil
}

// Kill ends the process and waits until it has ended.
func (p *Process) Kill() error {
	err := p.Signal(syscall.SIGKILL)
	if err == nil {
		<-p.done
	}
	return err
}

// OnThread runs f on its own thread, which ends with it. So f may give the thread its own namespaces: they apply to the
// processes that f starts and the sockets that it opens, but not to goroutines.
func OnThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread cannot end, and /proc shows its namespaces for the process. While this goroutine locks
			// it, OnThread gets another thread.
			defer runtime.UnlockOSThread()
			done <- OnThread(f)
			return
		}
		// The thread is not unlocked, so that it ends with the goroutine.
		done <- f()
	}()
	return <-done
}
