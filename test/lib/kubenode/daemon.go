package kubenode

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"gpu-cdi-plugin/test/lib/proc"
)

// Daemon is a program in namespaces that can be stopped and started again.
type Daemon struct {
	ns *Namespaces
	// Name is the program's name for messages.
	Name string
	// LogFile is the path of the log of all its runs.
	LogFile string
	args    []string
	process *proc.Process
}

// NewDaemon returns a program to start in the namespaces. Programs of the same name share a log.
func (ns *Namespaces) NewDaemon(name string, args ...string) *Daemon {
	return &Daemon{ns: ns, Name: name, args: args, LogFile: filepath.Join(ns.dir, name+".log")}
}

// Start starts the program and does not wait until it is ready.
func (d *Daemon) Start() error {
	log, err := os.OpenFile(d.LogFile, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	return d.ns.Within(func() (err error) {
		d.process, err = proc.Start(proc.Cmd{Args: d.args, Env: environment, Dir: "/"}, log)
		return err
	})
}

// Pid returns its process ID.
func (d *Daemon) Pid() int { return d.process.Pid() }

// Kill kills the program, like a crash.
func (d *Daemon) Kill() error { return d.process.Kill() }

// Signal sends the program a signal.
func (d *Daemon) Signal(sig syscall.Signal) error { return d.process.Signal(sig) }

// Running reports whether the program runs.
func (d *Daemon) Running() bool {
	select {
	case <-d.process.Done():
		return false
	default:
		return true
	}
}

// Stop sends the program SIGTERM, waits for its end, and returns its exit status.
func (d *Daemon) Stop(timeout time.Duration) (int, error) {
	if err := d.process.Signal(syscall.SIGTERM); err != nil {
		return 0, err
	}
	select {
	case <-d.process.Done():
		return d.process.Code(), nil
	case <-time.After(timeout):
		return 0, errors.Join(d.WithLog(fmt.Errorf("%s still runs %v after SIGTERM", d.Name, timeout)), d.Kill())
	}
}

// Log returns what the program has logged so far.
func (d *Daemon) Log() string {
	data, err := os.ReadFile(d.LogFile)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// WithLog adds the end of the program's log to an error.
func (d *Daemon) WithLog(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w\nthe end of the log of %s:\n%s", err, d.Name, Tail(d.Log(), 30))
}

// Tail returns the last lines of a text.
func Tail(text string, lines int) string {
	all := strings.SplitAfter(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "")
}
