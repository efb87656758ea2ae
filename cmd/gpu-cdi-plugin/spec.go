package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/trust"
)

const hookName = "prestart-hook"

// specDirs returns the directories of CDI specs, from the lowest priority to the highest.
func (a *app) specDirs(h host.Host) []string { return cdi.Dirs(h.Root(), a.CDIDir) }

// ownSpec returns the path of the spec that `cdi generate --write` writes.
func (a *app) ownSpec() string { return filepath.Join(a.CDIDir, cdi.FileName(a.CDIKind)) }

// renewHint returns a hint with the command that writes a new spec to path. If the hook cannot be used, so that this
// command would fail, the hint is about the hook.
func (a *app) renewHint(path string) string {
	if err := a.CheckHook(); errors.Is(err, trust.ErrUnsafe) {
		return cli.HintOf(err)
	}
	if _, err := cdi.FormatOf(path); path == a.ownSpec() || err != nil { // no spec can be written to such a path
		return "gpu-cdi-plugin cdi generate --write makes a new spec"
	}
	return "gpu-cdi-plugin cdi generate --file " + path + " makes a new spec of this host's GPUs"
}

// addCapabilitiesFlag adds the flag for the capabilities of the driver that containers get.
func addCapabilitiesFlag(f *pflag.FlagSet) *driver.Capabilities {
	c := driver.All
	f.Var(&c, "capabilities",
		"`list` of what containers use the GPUs for: compute, utility, graphics, video, display, ngx, all")
	return &c
}

// generated is the spec that this host should have, and what it was made from.
type generated struct {
	snapshot *gpu.Snapshot
	spec     *specs.Spec
	extras   []specFile // of the configured extras
	findings []driver.Finding
}

// files returns the spec files. The path is that of the GPUs' file.
func (g *generated) files(path, kind string) []specFile {
	return append([]specFile{{path, kind, g.spec}}, g.extras...)
}

// generate generates the spec that this host should have. With an error it returns the findings that explain it, if
// there are any, or nil.
func (a *app) generate(ctx context.Context, h host.Host, c driver.Capabilities) (*generated, error) {
	hook, err := a.specHook()
	if err != nil {
		return nil, err
	}
	search := driver.Begin(h)
	s, err := a.readDevices(ctx, h)
	if err != nil {
		return nil, err
	}
	d, err := search.Driver(s.DriverVersion)
	if err != nil {
		return nil, host.OnPlatform(h, err)
	}
	if err := d.Check(c); err != nil {
		return &generated{findings: d.Explain(c)}, host.OnPlatform(h, err)
	}
	spec, findings, err := cdi.Generate(s, d, cdi.Options{
		Kind: a.CDIKind, HookPath: hook, WithoutHooks: a.NoHook, Capabilities: c,
	})
	if err != nil {
		return nil, err
	}
	extras, ofExtras, err := a.generateExtras(h)
	if err != nil {
		return nil, err
	}
	return &generated{s, spec, extras, slices.Concat(d.Explain(c), findings, ofExtras)}, nil
}

// checkDevices returns an error if the spec has no device.
func (g *generated) checkDevices() error {
	if len(g.spec.Devices) > 0 {
		return nil
	}
	var reasons []string
	for _, f := range g.findings {
		if f.Kind == driver.KindDevice {
			reasons = append(reasons, f.Name+": "+f.Note)
		}
	}
	hint := "gpu-cdi-plugin devices shows the GPUs as the driver reports them, " +
		"gpu-cdi-plugin cdi generate --explain what was left out and why"
	return cli.With(cli.NoGPU, hint, fmt.Errorf("no GPU can be offered: %s",
		cmp.Or(strings.Join(reasons, "; "), "the driver has none")))
}

// checkComplete returns an error if the spec lacks GPUs, or what containers need to use them.
func (g *generated) checkComplete() error {
	return errors.Join(unreadableGPUs(g.snapshot), lacking(g.findings))
}

// lacking returns an error with a line for each finding about what containers need and do not get.
func lacking(findings []driver.Finding) error {
	var errs []error
	for i := range findings {
		if f := &findings[i]; f.Broken {
			text, advice := f.Lack()
			errs = append(errs,
				partly(advice+"; gpu-cdi-plugin cdi generate --explain shows what was searched for", "%s", text))
		}
	}
	return errors.Join(errs...)
}

// warnMissing logs which files containers do not get although their siblings were found.
func (a *app) warnMissing(findings []driver.Finding) {
	for i := range findings {
		if f := &findings[i]; f.Missing != "" && !f.Broken {
			text, advice := f.Lack()
			a.Log.Warn(text + "; " + advice)
		}
	}
}

// specHook returns the path of the hook for specs. With --no-hook it is empty.
func (a *app) specHook() (string, error) {
	if a.NoHook {
		return "", nil
	}
	return a.hook()
}

// hook returns the path of the hook, on the host, that is written into specs. If it is set by --hook-path, the file
// need not exist: a spec may be printed for another host.
func (a *app) hook() (string, error) {
	if a.HookPath != "" {
		if filepath.Clean(a.HookPath) != a.HookPath || !filepath.IsAbs(a.HookPath) {
			err := fmt.Errorf("--hook-path %q: want a clean absolute path on the host", a.HookPath)
			return "", cli.With(cli.Usage, "", err)
		}
		return a.HookPath, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find %s: %w", hookName, err)
	}
	return findHook(filepath.Dir(self))
}

// findHook returns the path of the hook that belongs to the program in dir: beside it or, as packages install it, in
// ../libexec/gpu-cdi-plugin.
func findHook(dir string) (string, error) {
	path := filepath.Join(dir, hookName)
	_, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		packaged := filepath.Join(filepath.Dir(dir), "libexec", "gpu-cdi-plugin", hookName)
		if _, err := os.Stat(packaged); err == nil {
			return packaged, nil
		}
	}
	if err != nil {
		return "", noHook(err)
	}
	return path, nil
}

func noHook(err error) error {
	return cli.With(cli.Failure,
		"install prestart-hook beside this program, or name its path on the host with --hook-path",
		fmt.Errorf("find the hook for the spec: %w", err))
}

// specFile is a spec and the path of its file.
type specFile struct {
	path, kind string
	spec       *specs.Spec // nil if the spec would have no devices
}

// addExtras adds the flag --extras of serve to a verb, so that the verb handles the same spec files as serve.
func (a *app) addExtras(cmd *cobra.Command) {
	cmd.Flags().AddFlag(a.ServiceFlags.Lookup("extras"))
}

// extraPath returns the path of the spec of an extra.
func (a *app) extraPath(e driver.Extra) string {
	return filepath.Join(a.CDIDir, cdi.FileName(e.Kind(a.CDIKind)))
}

// extraFiles returns the existing spec files of the configured extras.
func (a *app) extraFiles() []string {
	var files []string
	for _, e := range agent.Extras(a.config) {
		if _, err := os.Lstat(a.extraPath(e.Extra)); err == nil {
			files = append(files, a.extraPath(e.Extra))
		}
	}
	return files
}

// writtenExtras returns the spec files of extras that this program wrote, even if the extra is not configured any
// more.
func (a *app) writtenExtras() []string {
	var files []string
	for _, e := range driver.Extras() {
		spec, err := cdi.ReadFile(a.extraPath(e))
		if err == nil && spec.Kind == e.Kind(a.CDIKind) && cdi.WroteExtra(e, spec) {
			files = append(files, a.extraPath(e))
		}
	}
	return files
}

// generateExtras generates the specs of the configured extras. It also returns what was searched for.
func (a *app) generateExtras(h host.Host) (list []specFile, findings []driver.Finding, _ error) {
	for _, e := range agent.Extras(a.config) {
		spec, extraFindings, err := e.Generate(h, a.CDIKind)
		if err != nil {
			return nil, nil, err
		}
		findings = append(findings, extraFindings...)
		list = append(list, specFile{a.extraPath(e.Extra), e.Kind(a.CDIKind), spec})
	}
	return list, findings, nil
}
