package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/config"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/nvml"
)

// readDevices asks the driver what GPUs there are.
func (a *app) readDevices(ctx context.Context, h host.Host) (*gpu.Snapshot, error) {
	return a.ask(ctx, h, (*nvml.Library).Devices)
}

// readTopology asks the driver what GPUs there are and how they are linked.
func (a *app) readTopology(ctx context.Context, h host.Host) (*gpu.Snapshot, error) {
	return a.ask(ctx, h, (*nvml.Library).Snapshot)
}

type question func(*nvml.Library, context.Context, host.Host) (*gpu.Snapshot, error)

func (a *app) ask(ctx context.Context, h host.Host, q question) (*gpu.Snapshot, error) {
	path, err := nvml.Find(h, libraryOption(a.NVMLLibrary))
	if err != nil {
		return nil, err
	}
	if err := a.checkLibrary(path); err != nil {
		return nil, err
	}
	said := a.sayWhatHangs()
	defer said.Stop()
	lib, err := nvml.OpenContext(ctx, path, nvml.WithHost(h), nvml.WithTimeout(a.timeout))
	if err != nil {
		return nil, err
	}
	defer func() { //nolint:contextcheck // the driver is given back after an interrupt too
		if err := lib.Close(); err != nil { // the snapshot is no worse for it
			a.log.Debug("the driver's library could not be closed: " + err.Error())
		}
	}()
	return q(lib, ctx, h)
}

// addTimeout gives a verb the option for how long it waits for the driver.
func (a *app) addTimeout(cmd *cobra.Command) {
	cmd.Flags().Var((*config.Duration)(&a.timeout), "timeout",
		"`duration` that the driver may take to start, and then each GPU to answer")
}

// quiet is how long the driver may take before a message says what is waited for.
const quiet = 2 * time.Second

// sayWhatHangs says which calls of the driver are waited for, if they take long.
func (a *app) sayWhatHangs() *time.Timer {
	return time.AfterFunc(quiet, func() {
		if calls := nvml.UnderWay(); len(calls) > 0 {
			a.log.Warn("waiting for the NVIDIA driver to answer " + strings.Join(calls, ", "))
		}
	})
}

// unread is the error of a snapshot in which GPUs are missing, which it names.
func unread(s *gpu.Snapshot) error {
	var which []string
	for i := range s.Devices {
		if d := &s.Devices[i]; !d.Usable() {
			which = append(which, fmt.Sprintf("GPU %d (%s): %s", d.Index, cmp.Or(d.PCIBusID, "PCI address unknown"), d.Error))
		}
	}
	if len(which) == 0 {
		return nil
	}
	return partly("see the kernel log (dmesg) for messages of NVRM",
		"%d of %s could not be read: %s", len(which), plural(len(s.Devices), "GPU"), strings.Join(which, "; "))
}
