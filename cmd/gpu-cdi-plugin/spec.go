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

	"github.com/spf13/pflag"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/host"
)

const hookName = "prestart-hook"

// specDirs are the directories of CDI specs, from the lowest priority to the highest: the administrator's, and ours. Where
// both are one, engines still read the other of their two directories, which counts more.
func (a *app) specDirs(h host.Host) []string {
	low, high := filepath.Join(h.Root(), "etc/cdi"), filepath.Join(h.Root(), "var/run/cdi")
	if filepath.Clean(a.CDIDir) == low {
		return []string{low, high}
	}
	return []string{low, a.CDIDir}
}

// ownSpec is the path of the spec that generate --write writes.
func (a *app) ownSpec() string { return filepath.Join(a.CDIDir, cdi.FileName(a.CDIKind)) }

// renewHint is what to do about a spec file that is not as it should be.
func (a *app) renewHint(path string) string {
	if path == a.ownSpec() {
		return "gpu-cdi-plugin cdi generate --write makes a new spec"
	}
	return "gpu-cdi-plugin cdi generate --file " + path + " makes a new spec of this host's GPUs"
}

// addCapabilities is the flag for what containers get.
func addCapabilities(f *pflag.FlagSet) *driver.Capabilities {
	c := driver.All
	f.Var(&c, "capabilities", "`list` of what containers use the GPUs for: compute, utility, graphics, video, display, ngx, all")
	return &c
}

// generated is a spec for this host as it is now, and what it was made of.
type generated struct {
	snapshot *gpu.Snapshot
	spec     *specs.Spec
	extras   []specFile // of what is configured besides GPUs
	findings []driver.Finding
}

// files are the specs and where they belong, with the GPUs' at path.
func (g *generated) files(path, kind string) []specFile {
	return append([]specFile{{path, kind, g.spec}}, g.extras...)
}

// generate makes the spec that this host should have.
func (a *app) generate(ctx context.Context, h host.Host, c driver.Capabilities) (*generated, error) {
	hook, err := a.hook()
	if err != nil {
		return nil, err
	}
	search := driver.Begin(h)
	s, err := a.readDevices(ctx, h)
	if err != nil {
		return nil, err
	}
	d, err := search.Driver(s.DriverVersion)
	if err == nil {
		err = d.Check(c)
	}
	if err != nil {
		return nil, err
	}
	spec, devices, err := cdi.Generate(s, d, cdi.Options{Kind: a.CDIKind, HookPath: hook, Capabilities: c})
	if err != nil {
		return nil, err
	}
	extras, looked, err := a.extras(h)
	if err != nil {
		return nil, err
	}
	return &generated{s, spec, extras, slices.Concat(d.Explain(c), devices, looked)}, nil
}

// noDevice is the error of a spec without a device, nil if it has one.
func (g *generated) noDevice(h host.Host) error {
	if len(g.spec.Devices) > 0 {
		return nil
	}
	why := "the driver has none"
	var reasons []string
	for _, f := range g.findings {
		if f.Kind == driver.KindDevice {
			reasons = append(reasons, f.Name+": "+f.Note)
		}
	}
	if len(reasons) > 0 {
		why = strings.Join(reasons, "; ")
	}
	hint := "gpu-cdi-plugin devices shows the GPUs as the driver reports them, " +
		"gpu-cdi-plugin cdi generate --explain what was left out and why"
	if !hasNodes(h) {
		hint = hintDevRoot(h)
	}
	return exit.With(exit.NoGPU, hint, fmt.Errorf("no GPU can be offered: %s", why))
}

// hintDevRoot is what to do where the driver's device nodes are not.
func hintDevRoot(h host.Host) string {
	return "the driver's device nodes are not in " + h.Dev() + "; name the directory whose dev/ has them with --dev-root"
}

// incomplete is the error of a spec that lacks GPUs or libraries that the host has, nil if it lacks none.
func (g *generated) incomplete() error {
	err := unread(g.snapshot)
	var broken []string
	for _, f := range g.findings {
		if f.Broken {
			broken = append(broken, fmt.Sprintf("%s (%s)", cmp.Or(f.Path, f.Name), f.Note))
		}
	}
	if len(broken) == 0 {
		return err
	}
	lacks := partly("install the NVIDIA driver again; gpu-cdi-plugin cdi generate --explain shows what was looked for",
		"containers go without libraries of the driver that cannot be used: %s", strings.Join(broken, ", "))
	return errors.Join(err, lacks)
}

// hook is the path on the host of the hook that specs call. One that was named is not looked for: a spec that is
// printed may be for another host.
func (a *app) hook() (string, error) {
	if a.HookPath != "" {
		if filepath.Clean(a.HookPath) != a.HookPath || !filepath.IsAbs(a.HookPath) {
			return "", exit.With(exit.Usage, "", fmt.Errorf("--hook-path %q: want a clean absolute path on the host", a.HookPath))
		}
		return a.HookPath, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find %s: %w", hookName, err)
	}
	path := filepath.Join(filepath.Dir(self), hookName)
	if _, err := os.Stat(path); err != nil {
		return "", noHook(err)
	}
	return path, nil
}

func noHook(err error) error {
	return exit.With(exit.Failure, "build it beside this program (make build), or name its place on the host with --hook-path",
		fmt.Errorf("find the hook that specs call: %w", err))
}
