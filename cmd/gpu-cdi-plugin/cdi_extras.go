package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/config"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/host"
)

// specFile is a spec and where it belongs.
type specFile struct {
	path, kind string
	spec       *specs.Spec // nil where this host has nothing of the kind
}

// addExtras gives a verb the flag of the device plugin for what containers get besides GPUs. The verb looks after what
// serve would write.
func (a *app) addExtras(cmd *cobra.Command) {
	cmd.Flags().AddFlag(a.pluginFlags.Lookup("extras"))
	_ = cmd.RegisterFlagCompletionFunc("extras", cobra.FixedCompletions(config.Extras(), cobra.ShellCompDirectiveNoFileComp))
}

// extraPath is where the spec of an extra is.
func (a *app) extraPath(e driver.Extra) string {
	return filepath.Join(a.CDIDir, cdi.FileName(e.Kind(a.CDIKind)))
}

// extraFiles are the files that there are of the extras that are configured.
func (a *app) extraFiles() []string {
	var files []string
	for _, e := range a.configuredExtras() {
		if _, err := os.Lstat(a.extraPath(e.Extra)); err == nil {
			files = append(files, a.extraPath(e.Extra))
		}
	}
	return files
}

// writtenExtras are the files of all extras, configured or not, that this program has written.
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

// extras are the specs of the extras that are configured, and what was looked for.
func (a *app) extras(h host.Host) (list []specFile, findings []driver.Finding, _ error) {
	for _, e := range a.configuredExtras() {
		found, looked := driver.DiscoverExtra(h, e.Extra, e.Channels)
		findings = append(findings, looked...)
		f := specFile{path: a.extraPath(e.Extra), kind: e.Kind(a.CDIKind)}
		spec, err := cdi.GenerateExtra(found, f.kind)
		if err != nil {
			return nil, nil, fmt.Errorf("make the spec of %s: %w", e.Extra, err)
		}
		if len(spec.Devices) > 0 {
			f.spec = spec
		}
		list = append(list, f)
	}
	return list, findings, nil
}
