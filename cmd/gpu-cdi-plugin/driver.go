package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/nvml"
)

// errNoGPU is that the driver works and has no GPU.
var errNoGPU = errors.New("the NVIDIA driver has no GPU")

// host returns the paths of the host's files. What is not configured is detected: with --nvml-library and no
// --driver-root the driver is installed where that library is, its other libraries are searched for beside NVML's, and
// the device nodes are in the driver's root if only that has them, as in a driver container.
func (a *app) host() (host.Host, error) {
	h, err := host.New(a.Root, a.DriverRoot, a.DevRoot)
	if err != nil {
		return host.Host{}, fmt.Errorf("locate the host's files: %w", err)
	}
	library := a.NVMLLibrary
	if library == "" {
		library, _ = nvml.Find(h, "") // opening the library reports the error
	}
	if library != "" {
		if library, err = filepath.Abs(library); err != nil {
			return host.Host{}, fmt.Errorf("locate the driver's library: %w", err)
		}
		if a.NVMLLibrary != "" && a.DriverRoot == "" {
			h = h.WithLibrary(library)
		} else {
			h = h.WithLibraries(filepath.Dir(library))
		}
	}
	if under := h.WithDevRoot(h.DriverRoot()); a.DevRoot == "" && !hasNodes(h) && hasNodes(under) {
		h = under
	}
	return h, nil
}

// hasNodes reports whether the driver's device nodes exist.
func hasNodes(h host.Host) bool {
	_, err := os.Lstat(h.Dev("nvidiactl"))
	return err == nil
}

// readDevices reads the host's GPUs from the driver. Without a GPU the error is errNoGPU.
func (a *app) readDevices(ctx context.Context, h host.Host) (*gpu.Snapshot, error) {
	return a.readDriver(ctx, h, nvml.ReadDevices)
}

// readTopology reads the host's GPUs and their links from the driver. Without a GPU the error is errNoGPU.
func (a *app) readTopology(ctx context.Context, h host.Host) (*gpu.Snapshot, error) {
	return a.readDriver(ctx, h, nvml.ReadTopology)
}

func (a *app) readDriver(ctx context.Context, h host.Host,
	read func(context.Context, nvml.Options) (*gpu.Snapshot, error),
) (*gpu.Snapshot, error) {
	defer a.logSlowCalls().Stop()
	s, err := read(ctx, nvml.Options{Host: h, Library: a.NVMLLibrary, Check: a.checkLibrary, Timeout: a.timeout})
	if err == nil && len(s.Devices) == 0 {
		return nil, errNoGPU
	}
	return s, err
}

// newSession opens the driver when it is needed and keeps it open. Returned is called when a GPU may be readable again,
// and events gets the events of the GPUs.
func (a *app) newSession(h host.Host, returned func(), events func(gpu.Event)) *nvml.Session {
	return nvml.NewSession(nvml.Options{
		Host: h, Library: a.NVMLLibrary, Check: a.checkLibrary,
		GPUTimeout: time.Duration(a.plugin.GPUTimeout), Returned: returned, Events: events, Log: a.Log,
	})
}

// openInBackground opens the driver while other work is done before the first snapshot, which returns the same
// error. end must be called before the session is closed. It does not wait for a driver that hangs.
func openInBackground(ctx context.Context, s *nvml.Session) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	var opening sync.WaitGroup
	opening.Go(func() { _ = s.Open(ctx) })
	return func() {
		cancel()
		opening.Wait()
	}
}

// addTimeout adds the option for how long to wait for the driver.
func (a *app) addTimeout(cmd *cobra.Command) {
	cmd.Flags().Var((*configfile.Duration)(&a.timeout), "timeout",
		"`duration` that the driver may take to start, and then each GPU to answer")
}

// quiet is how long the driver may take before a message names the calls that are waited for.
const quiet = 2 * time.Second

// logSlowCalls logs which calls into the driver are waited for, if they take long.
func (a *app) logSlowCalls() *time.Timer {
	return time.AfterFunc(quiet, func() {
		if calls := nvml.InFlight(); len(calls) > 0 {
			a.Log.Warn("waiting for the NVIDIA driver to answer " + strings.Join(calls, ", "))
		}
	})
}

// unreadableGPUs is the error of a snapshot with unreadable GPUs. It names them.
func unreadableGPUs(s *gpu.Snapshot) error {
	var which []string
	for i := range s.Devices {
		if d := &s.Devices[i]; !d.Usable() {
			address := cmp.Or(d.PCIBusID, "PCI address unknown")
			which = append(which, fmt.Sprintf("GPU %d (%s): %s", d.Index, address, d.Error))
		}
	}
	if len(which) == 0 {
		return nil
	}
	return partly("see the kernel log (dmesg) for messages of NVRM",
		"%d of %s could not be read: %s", len(which), cli.Plural(len(s.Devices), "GPU"), strings.Join(which, "; "))
}
