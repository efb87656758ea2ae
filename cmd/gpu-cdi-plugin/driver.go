package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/nvml"
)

// errNoGPU means that the driver works and has no GPU.
var errNoGPU = errors.New("the NVIDIA driver has no GPU")

// host returns the paths of the host's files. Paths that are not configured are detected. If --nvml-library is given
// and --driver-root is not, the driver is installed where that library is, if that is a root with programs, and other
// libraries are searched for in the same directory first. The device nodes are those in the driver's root if only that
// has them, as in a driver container.
func (a *app) host() (host.Host, error) {
	if err := checkRoot(cmp.Or(a.Root, "/")); err != nil {
		return host.Host{}, err
	}
	h, err := host.New(a.Root, a.DriverRoot, a.DevRoot)
	if err != nil {
		return host.Host{}, fmt.Errorf("locate the host's files: %w", err)
	}
	h = h.WithDirs(a.DriverDirs)
	library := a.NVMLLibrary
	if library == "" {
		library, _ = nvml.Find(h, "") // the error is reported when the library is opened
	}
	if library != "" {
		if library, err = filepath.Abs(library); err != nil {
			return host.Host{}, fmt.Errorf("locate the driver's library: %w", err)
		}
		owner := h.WithLibrary(library)
		h = h.WithLibraries(filepath.Dir(library))
		if a.NVMLLibrary != "" && a.DriverRoot == "" && driver.IsRoot(owner.DriverRoot()) {
			h = owner
		}
	}
	if under := h.WithDevRoot(h.DriverRoot()); a.DevRoot == "" && !hasNodes(h) && hasNodes(under) {
		h = under
	}
	return h, nil
}

// rootOfLibrary returns the driver's root if it is the one that the library of --nvml-library is in, or "".
func (a *app) rootOfLibrary(h host.Host) string {
	if a.NVMLLibrary == "" || a.DriverRoot != "" || h.DriverRoot() == h.Root() {
		return ""
	}
	return h.DriverRoot()
}

// logRootOfLibrary says that --nvml-library determines where all files of the driver come from.
func (a *app) logRootOfLibrary(h host.Host) {
	if root := a.rootOfLibrary(h); root != "" {
		a.Log.Info("all files of the driver are taken from " + root + ", " + whyRoot)
	}
}

const whyRoot = "which has the library of nvml-library; driver-root names another directory"

// explainRoot adds to the findings where the driver's files come from, if nothing but --nvml-library says so.
func (a *app) explainRoot(h host.Host, findings []driver.Finding) []driver.Finding {
	root := a.rootOfLibrary(h)
	if root == "" {
		return findings
	}
	f := driver.Finding{Name: "driver-root", Kind: driver.KindRoot, Path: root, Used: true, Note: whyRoot}
	return slices.Insert(slices.Clone(findings), 0, f)
}

// checkRoot returns an error if a root is no directory: each result would be about a host that does not exist.
func checkRoot(root string) error {
	info, err := os.Stat(root)
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is not a directory", root)
	}
	if err != nil {
		return cli.With(cli.Usage, "name the root directory of a host with --root",
			fmt.Errorf("locate the host's files: %w", err))
	}
	return nil
}

// hasNodes reports whether the driver's device nodes exist.
func hasNodes(h host.Host) bool {
	_, err := os.Lstat(h.Dev("nvidiactl"))
	return err == nil
}

// readDevices reads the host's GPUs from the driver. If there is none, the error is errNoGPU.
func (a *app) readDevices(ctx context.Context, h host.Host) (*gpu.Snapshot, error) {
	return a.readDriver(ctx, h, nvml.ReadDevices)
}

// readTopology reads the host's GPUs and their links from the driver. If there is no GPU, the error is errNoGPU.
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

// addTimeout adds the option for the time limit of driver calls.
func (a *app) addTimeout(cmd *cobra.Command) {
	cmd.Flags().Var((*configfile.Duration)(&a.timeout), "timeout",
		"`duration` that the driver may take to start, and then each GPU to answer")
}

// quiet is how long the driver may take before the calls that have not returned are logged.
const quiet = 2 * time.Second

// logSlowCalls logs the calls into the driver that have not returned, if they take long.
func (a *app) logSlowCalls() *time.Timer {
	return time.AfterFunc(quiet, func() {
		if calls := nvml.InFlight(); len(calls) > 0 {
			a.Log.Warn("waiting for the NVIDIA driver to answer " + strings.Join(calls, ", "))
		}
	})
}

// unreadableGPUs returns an error that names the GPUs of a snapshot that could not be read.
func unreadableGPUs(s *gpu.Snapshot) error {
	if err := s.Unreadable(); err != nil {
		return cli.With(cli.Partial, "see the kernel log (dmesg) for messages of NVRM", err)
	}
	return nil
}
