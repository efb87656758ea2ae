package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/hook"
	"gpu-cdi-plugin/hook/inject"
	"gpu-cdi-plugin/hook/live"
	"gpu-cdi-plugin/internal/host"
)

// The live position enters the container's mount namespace on the main thread: /proc/self shows the namespaces of that
// thread.
func init() {
	if len(os.Args) > 1 && isLive(os.Args[1:]) {
		runtime.LockOSThread()
	}
}

// isLive reports whether these arguments of a hook, without the program's name, select the live position.
func isLive(args []string) bool { return len(args) > 0 && args[0] == "create-runtime" }

// undoTime is the part of the deadline that is kept for reverting changes.
const undoTime = 2 * time.Second

// createRuntime gives a created container the devices that its annotations name. The OCI state on stdin names the
// container.
func createRuntime(in inject.Injector, stdin io.Reader, problems *problems) error {
	h, err := host.New("/", "/", "/")
	if err != nil {
		return err
	}
	parent, parentErr := live.OpenRuntime(h)
	if parentErr == nil {
		defer parent.Close()
	}
	begin := time.Now()
	const giveTime = deadline - undoTime
	ctx, cancel := context.WithTimeoutCause(context.Background(), giveTime, fmt.Errorf("not done after %v", giveTime))
	defer cancel()
	end := time.After(deadline - logTime)
	state, err := within(end, "read the OCI state from standard input", func() (*hook.State, error) {
		return hook.ReadState(stdin)
	})
	if err != nil {
		return err
	}
	problems.container = state.ID
	edited, err := within(end, "read the bundle and the CDI specs", func() (inject.Edited, error) {
		return in.Preview(state.Bundle, state.Annotations)
	})
	if err != nil {
		return oneLine(err)
	}
	if edited.After == nil { // no annotation requests a device, or config.json has it already
		return nil
	}
	if parentErr != nil {
		return parentErr
	}
	// If a call hangs, for example on a file system that does not respond, nothing can be reverted: main then ends the
	// process.
	hangs := time.AfterFunc(time.Until(begin.Add(deadline-logTime)), func() {
		problems.report(inject.Error, fmt.Errorf("%s: not given after %v, abandoned", edited.Devices, deadline))
	})
	defer hangs.Stop()
	// Until here a signal ends the process, since nothing was changed.
	signals := []os.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP}
	arrived := make(chan os.Signal, 1)
	signal.Notify(arrived, signals...)
	ctx, stop := signal.NotifyContext(ctx, signals...)
	defer stop()
	warnings, err := live.Give(ctx, live.Request{
		State: state, Runtime: parent, Before: edited.Before, After: edited.After,
		Interrupted: func() error {
			signal.Stop(arrived) // afterwards each signal that the process has received is in arrived
			select {
			case s := <-arrived:
				return fmt.Errorf("%s signal received", s)
			default:
				return nil
			}
		},
	}, h)
	for _, warning := range warnings {
		problems.report(inject.Warning, warning)
	}
	if err != nil {
		return oneLine(fmt.Errorf("%s cannot be given: %w", edited.Devices, err))
	}
	return nil
}
