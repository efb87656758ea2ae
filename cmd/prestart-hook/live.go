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

// The live position enters the container's mount namespace on the main thread, whose namespaces /proc/self shows.
func init() {
	if len(os.Args) > 1 && isLive(os.Args[1:]) {
		runtime.LockOSThread()
	}
}

// isLive reports whether a hook's arguments, without the program's name, are those of the live position.
func isLive(args []string) bool { return len(args) > 0 && args[0] == "create-runtime" }

// undoTime is the part of the deadline that is kept for reverting changes.
const undoTime = 2 * time.Second

// createRuntime gives the created container of the state on stdin the devices that its annotations name.
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
	if edited.After == nil { // no annotation requests a device, or config.json has it
		return nil
	}
	if parentErr != nil {
		return parentErr
	}
	// A hanging call, for example on a dead file system, cannot be reverted: main then ends the process.
	hangs := time.AfterFunc(time.Until(begin.Add(deadline-logTime)), func() {
		problems.report(inject.Error, fmt.Errorf("%s: not given after %v, abandoned", edited.Devices, deadline))
	})
	defer hangs.Stop()
	// Until here a signal ends the process without any changes.
	signals := []os.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP}
	arrived := make(chan os.Signal, 1)
	signal.Notify(arrived, signals...)
	ctx, stop := signal.NotifyContext(ctx, signals...)
	defer stop()
	warnings, err := live.Give(ctx, live.Request{
		State: state, Runtime: parent, Before: edited.Before, After: edited.After,
		Interrupted: func() error {
			signal.Stop(arrived) // waits for a signal that the process has received but ctx does not show yet
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
