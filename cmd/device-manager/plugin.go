package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/sdnotify"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/wording"
)

// Only this file of the program runs another one: the plugin that the configuration names, without a shell, and only if
// no other user can change it.

// pluginStopTime is the time for plugins to end. They have calls to finish: PreStartContainer may take 30 s.
const pluginStopTime = 35 * time.Second

// errPluginEnded means that the plugin ended before the manager was to end.
var errPluginEnded = errors.New("the plugin has ended, and so the manager ends too")

// pluginProgram is the program of the plugin, with its arguments. The zero value means that there is none.
type pluginProgram struct {
	path string
	args []string // with the name of the program
	// stopTime is how long the plugin may take to end after SIGTERM, before it is killed.
	stopTime time.Duration
}

// findPlugin finds the program of the option plugin, and checks who can change it.
func (a *app) findPlugin() (p pluginProgram, err error) {
	if p.args, err = wording.Split(a.Plugin); err != nil || len(p.args) == 0 {
		return pluginProgram{}, err
	}
	p.stopTime = pluginStopTime
	if p.path, err = exec.LookPath(p.args[0]); err != nil {
		return p, cli.With(cli.Usage, "give a program by its path or by a name in PATH; there is no shell to run it",
			fmt.Errorf("plugin: %w", err))
	}
	if err := a.CheckPath(trust.File, p.path); err != nil {
		return p, fmt.Errorf("plugin: %s is not run: %w", p.path, err)
	}
	return p, nil
}

// runPlugin runs the plugin until ctx ends, and then until the plugin has ended, for at most p.stopTime. If the plugin
// ends earlier, the error wraps errPluginEnded. Without a plugin, it only waits for the end of ctx.
func (a *app) runPlugin(ctx context.Context, p pluginProgram) error {
	if p.path == "" {
		<-ctx.Done()
		return nil
	}
	if err := proc.CloseOnExec(); err != nil {
		return fmt.Errorf("start the plugin: %w", err)
	}
	cmd := exec.CommandContext(ctx, p.path)
	cmd.Args, cmd.Env = p.args, sdnotify.ForChild(a.Env)
	cmd.Stdout, cmd.Stderr = a.Stdout, a.Stderr
	// In a process group of its own it does not get Ctrl-C, but SIGTERM as at any other end.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = p.stopTime
	// The signal at the parent's death (PDEATHSIG) is sent when this thread ends, so the goroutine keeps the thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the plugin: %w", err)
	}
	a.Log.Info("the plugin is started", "command", wording.Line(p.args), "pid", cmd.Process.Pid)
	_ = cmd.Wait() // the process state has the result
	if ctx.Err() == nil {
		return fmt.Errorf("%w: %s: %s", errPluginEnded, wording.Line(p.args), cmd.ProcessState)
	}
	a.Log.Info("the plugin has ended", "state", cmd.ProcessState.String())
	return nil
}
