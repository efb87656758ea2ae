package cdi

import (
	"cmp"
	"fmt"
	"path"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/driver"
)

// GenerateExtra generates the spec of an extra. Each IMEX channel is a device named by its number; any other extra is
// one device, "all". If the host has no device node of the extra, the spec has no devices.
func GenerateExtra(f *driver.ExtraFiles, kind string) (*specs.Spec, error) {
	if err := validateKind(kind); err != nil {
		return nil, err
	}
	spec := &specs.Spec{Kind: kind, Devices: extraDevices(f)}
	var err error
	if spec.Version, err = specs.MinimumRequiredVersion(spec); err != nil {
		return nil, fmt.Errorf("choose the CDI version: %w", err)
	}
	return spec, nil
}

func extraDevices(f *driver.ExtraFiles) []specs.Device {
	switch {
	case len(f.Nodes) == 0:
		return nil
	case f.Extra == driver.IMEX:
		var list []specs.Device
		for _, n := range f.Nodes {
			list = append(list, specs.Device{
				Name:           strings.TrimPrefix(path.Base(n.Path), "channel"),
				ContainerEdits: specs.ContainerEdits{DeviceNodes: deviceNodes([]driver.DeviceNode{n})},
			})
		}
		return list
	}
	edits := specs.ContainerEdits{DeviceNodes: deviceNodes(f.Nodes)}
	for _, file := range f.Files {
		edits.Mounts = append(edits.Mounts,
			&specs.Mount{HostPath: file.HostPath, ContainerPath: file.Path, Options: fileOptions()})
	}
	return []specs.Device{{Name: AllDevices, ContainerEdits: edits}}
}

// WroteExtra reports whether GenerateExtra made a spec of this extra, on any host. A spec of another program differs
// in its devices, device nodes, variables or hooks.
func WroteExtra(e driver.Extra, spec *specs.Spec) bool {
	f := &driver.ExtraFiles{Extra: e}
	for i := range spec.Devices {
		edits := &spec.Devices[i].ContainerEdits
		for _, n := range edits.DeviceNodes {
			if !e.HasNode(n.Path) {
				return false
			}
			hostPath := cmp.Or(n.HostPath, n.Path)
			f.Nodes = append(f.Nodes, driver.DeviceNode{Path: n.Path, HostPath: hostPath, Capabilities: driver.All})
		}
		for _, m := range edits.Mounts {
			f.Files = append(f.Files, driver.File{Path: m.ContainerPath, HostPath: m.HostPath})
		}
	}
	own, err := GenerateExtra(f, spec.Kind)
	return err == nil && len(f.Nodes) > 0 && len(Diff(spec, own)) == 0
}
