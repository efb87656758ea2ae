package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/nvml"
)

// startService begins a verb that reloads its configuration at SIGHUP.
func (a *app) startService(cmd *cobra.Command, _ []string) error {
	// Until now a SIGHUP ends the process. From now on it reloads the configuration.
	a.hangups = make(chan os.Signal, 1)
	signal.Notify(a.hangups, unix.SIGHUP)
	return a.Start(cmd)
}

// runService runs `serve` or `cdi watch` until a signal. If the driver was replaced, or the configuration needs a new
// process, it restarts the program.
func (a *app) runService(cmd *cobra.Command, run func(context.Context, *agent.Options) error) error {
	defer signal.Stop(a.hangups)
	h, err := a.host()
	if err != nil {
		return err
	}
	a.logRootOfLibrary(h)
	o, err := a.serviceOptions(h)
	if err != nil {
		return err
	}
	err = a.Classify(run(cmd.Context(), o))
	switch {
	case agent.NeedsRestart(err):
		// Before the signals are released, they only request the end of the program. After that they kill the process.
		if a.ReleaseSignals() || cmd.Context().Err() != nil {
			return nil
		}
		a.Log.Info("restarting: " + err.Error())
		return restart(a.Env)
	case cli.CodeOf(err) == cli.NoDriver:
		return cli.With(cli.NoDriver, cli.HintOf(err)+"; --fail-on-init-error=false waits for a driver", err)
	}
	return err
}

// serviceOptions returns the options of package agent.
func (a *app) serviceOptions(h host.Host) (*agent.Options, error) {
	hook, err := a.specHook()
	if err != nil {
		return nil, err
	}
	build, gpuTimeout := cli.ThisBuild(), time.Duration(a.plugin.GPUTimeout)
	return &agent.Options{
		Config: *a.config, Host: h, HookPath: hook, SpecDirs: a.specDirs(h), Trust: a,
		Driver: nvml.NewSession(nvml.Options{
			Host: h, Library: a.NVMLLibrary, Check: a.checkLibrary, GPUTimeout: gpuTimeout, Log: a.Log,
		}),
		PollInterval: min(node.PollInterval, nvml.ProbeInterval(gpuTimeout)),
		LogSlowCalls: a.logSlowCalls,
		Build:        metrics.BuildInfo{Version: build.Version, Revision: build.Revision, GoVersion: build.Go},
		Env:          a.Env, Log: a.Log,
		Reload: a.hangups,
		Reread: func() (*agent.Options, error) { return a.reread() },
		Hint:   func(err error) string { return cli.HintOf(a.Classify(err)) },
	}, nil
}

// reread returns the options for the current configuration. Flags and environment are the same as before; the file is
// read again.
func (a *app) reread() (*agent.Options, error) {
	fresh := newApp() // a second command would stay in cobra's list of completions
	if err := fresh.Reread(a.Program); err != nil {
		return nil, err
	}
	return &agent.Options{Config: *fresh.config, Trust: fresh}, nil
}

// CheckHook implements agent.Trust. Specs without the hook need none.
func (a *app) CheckHook() error {
	if a.NoHook {
		return nil
	}
	return a.checkHook()
}

// CheckProgram implements agent.Trust.
func (a *app) CheckProgram(path string) error { return a.CheckPath(trust.RootFile, path) }

// restart executes the program again, with the same process ID, so that a supervisor sees no exit. It returns only if
// that fails.
func restart(env []string) error {
	// SIGHUP is ignored until the new program handles it. A SIGHUP in that time may be missed, since the new program
	// reads the configuration when it starts.
	signal.Ignore(unix.SIGHUP)
	err := unix.Exec("/proc/self/exe", os.Args, env)
	return fmt.Errorf("restart this program: %w", err)
}
