package kubelet

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

// Daemon is a program of a node that can be stopped and started again.
type Daemon struct {
	node *Node
	name string
	args []string
	// log is the path of the log of all its runs.
	log     string
	process *proc.Process
}

// NewDaemon returns a program to start in the node. Programs of the same name share a log.
func (n *Node) NewDaemon(name string, args ...string) *Daemon {
	return &Daemon{node: n, name: name, args: args, log: filepath.Join(n.dir, name+".log")}
}

// Start starts the program and does not wait until it is ready.
func (d *Daemon) Start() error {
	log, err := os.OpenFile(d.log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	return d.node.ns.within(func() (err error) {
		d.process, err = proc.Start(proc.Cmd{Args: d.args, Env: d.node.env(), Dir: "/"}, log)
		return err
	})
}

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
		return 0, errors.Join(d.withLog(fmt.Errorf("%s still runs %v after SIGTERM", d.name, timeout)), d.Kill())
	}
}

// Log returns what the program has logged so far.
func (d *Daemon) Log() string {
	data, err := os.ReadFile(d.log)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// withLog adds the end of the program's log to an error.
func (d *Daemon) withLog(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w\nthe end of the log of %s:\n%s", err, d.name, tail(d.Log(), 30))
}

// tail returns the last lines of a text.
func tail(text string, lines int) string {
	all := strings.SplitAfter(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "")
}
