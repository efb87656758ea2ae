package proc

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// Process is a program that runs beside its caller.
type Process struct {
	args []string
	cmd  *exec.Cmd
	done chan struct{}
}

// Start starts c and does not wait for it. What it prints goes to the file output. Who starts a process has to end it:
// see Kill.
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
		// How it ended is in cmd.ProcessState. An error would tell no more: the output is a file.
		_ = cmd.Wait()
	}()
	return p, nil
}

// Pid is the process's number, as the caller's namespace has it.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Code is the exit status of a process that has ended, as in Result.
func (p *Process) Code() int {
	<-p.done
	return status(p.cmd.ProcessState)
}

// Signal sends a signal. A process that has ended is no error.
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
