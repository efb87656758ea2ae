package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
)

// DefaultKind is the default kind of specs. It is short because people type it.
const DefaultKind = "nvidia.com/gpu"

// AllDevices is the name of the device that stands for all devices of a spec together.
const AllDevices = "all"

// Options are the options of a spec.
type Options struct {
	// Kind is the CDI kind of the spec, VENDOR/CLASS; empty means DefaultKind.
	Kind string
	// HookPath is the absolute path of prestart-hook on the host. It is not used WithoutHooks.
	HookPath string
	// WithoutHooks makes a spec for containers in which no hook runs. Each library is also mounted under the names of
	// the links that the hook would make, and in the directories that dynamic loaders search without a cache.
	WithoutHooks bool
	// Capabilities limit the files that containers get; 0 means driver.All.
	Capabilities driver.Capabilities
}

// Generate generates the spec of a host's GPUs. The names of a GPU are its index and its UUID, those of a MIG device
// are GPU:INDEX and its UUID, and "all" is all of them together. A GPU in MIG mode is offered only as its MIG devices.
// If no device can be offered, the spec has no devices. It has the lowest cdiVersion that supports its content.
//
// The findings are those of FindDevices.
func Generate(s *gpu.Snapshot, d *driver.Driver, o Options) (*specs.Spec, []driver.Finding, error) {
	o.Kind = cmp.Or(o.Kind, DefaultKind)
	if err := validateKind(o.Kind); err != nil {
		return nil, nil, err
	}
	if !o.WithoutHooks && !filepath.IsAbs(o.HookPath) {
		return nil, nil, fmt.Errorf("hook path %q is not absolute", o.HookPath)
	}
	devices, findings := namedDevicesOf(s, d, o.Capabilities)
	common, err := commonEdits(s, d, o, devices)
	if err != nil {
		return nil, nil, err
	}
	spec := &specs.Spec{Kind: o.Kind, Devices: specDevices(devices), ContainerEdits: common}
	if spec.Version, err = specs.MinimumRequiredVersion(spec); err != nil {
		return nil, nil, fmt.Errorf("choose the CDI version: %w", err)
	}
	return spec, findings, nil
}

func validateKind(kind string) error {
	vendor, class := parser.ParseQualifier(kind)
	if vendor == "" || class == "" {
		return fmt.Errorf("kind %q: want VENDOR/CLASS, such as %s", kind, DefaultKind)
	}
	if err := parser.ValidateVendorName(vendor); err != nil {
		return fmt.Errorf("kind %q: %w", kind, err)
	}
	if err := parser.ValidateClassName(class); err != nil {
		return fmt.Errorf("kind %q: %w", kind, err)
	}
	return nil
}

// nodeNames returns the device nodes, under /dev, that a device needs. A MIG device needs the nodes of the GPU, of its
// GPU instance and of its compute instance: by the last two the driver decides what a process may use.
func nodeNames(a *gpu.Allocatable) []string {
	names := []string{"nvidia" + strconv.Itoa(a.GPU.Minor)}
	if a.MIG != nil {
		const instance = "nvidia-caps/nvidia-cap"
		names = append(names,
			instance+strconv.Itoa(a.MIG.GPUInstanceCap), instance+strconv.Itoa(a.MIG.ComputeInstanceCap))
	}
	return names
}

// hasGraphics reports whether a device supports graphics and needs DRM nodes: a whole GPU, or a MIG device whose
// profile has the attribute gfx, such as "1g.24gb+me,gfx".
func hasGraphics(a *gpu.Allocatable) bool {
	if a.MIG == nil {
		return true
	}
	_, attributes, _ := strings.Cut(a.MIG.Profile, "+")
	isSeparator := func(r rune) bool { return strings.ContainsRune("+,.", r) }
	return slices.Contains(strings.FieldsFunc(attributes, isSeparator), "gfx")
}

// namedDevice is a device of the spec with its names.
type namedDevice struct {
	names []string // its index and its UUID
	nodes []driver.DeviceNode
	// drm is the PCI address of the GPU if its DRM nodes are among the nodes, or "".
	drm string
}

// FindDevices returns the GPUs and MIG devices in the order of the snapshot, and then those that it lacks. For a device
// that a spec cannot offer, the note says why; Broken says that the host lacks something for it.
func FindDevices(s *gpu.Snapshot, d *driver.Driver) []driver.Finding {
	_, findings := namedDevicesOf(s, d, 0)
	return findings
}

// namedDevicesOf returns the devices of the host that the spec offers, and the findings of FindDevices.
func namedDevicesOf(s *gpu.Snapshot, d *driver.Driver, c driver.Capabilities) ([]namedDevice, []driver.Finding) {
	var devices []namedDevice
	var findings []driver.Finding
	owners := map[string]string{} // of the names in use
	for i := range s.Devices {
		for _, a := range s.Devices[i].Allocatables() {
			f := driver.Finding{Name: a.Label(), Kind: driver.KindDevice, UUID: a.UUID()}
			dev, err := newNamedDevice(&a, d, owners)
			if err != nil {
				f.Note = err.Error()
				f.Broken = a.GPU.Usable() && (a.MIG != nil || !a.GPU.MIGEnabled)
				findings = append(findings, f)
				continue
			}
			f.Path, f.Used = dev.nodes[0].HostPath, true
			findings = append(findings, f)
			if drm := d.DRM[a.GPU.PCIBusID]; hasGraphics(&a) && len(drm) > 0 && c.Needs(driver.UsesDRM) {
				dev.nodes = append(dev.nodes, drm...)
				dev.drm = a.GPU.PCIBusID
			}
			devices = append(devices, dev)
		}
	}
	return devices, append(findings, d.Unreported(s)...)
}

// newNamedDevice returns a device with its nodes. The error says why the device cannot be offered: it is unusable,
// a node is missing, or one of its names is invalid or belongs to another device.
func newNamedDevice(a *gpu.Allocatable, d *driver.Driver, owners map[string]string) (namedDevice, error) {
	dev := namedDevice{names: []string{a.IndexName(), a.UUID()}}
	if a.Reason != "" {
		return dev, errors.New(a.Reason)
	}
	for _, name := range nodeNames(a) {
		file := path.Join("/dev", name)
		at := slices.IndexFunc(d.Nodes, func(n driver.DeviceNode) bool { return n.Path == file })
		if at < 0 {
			return dev, errors.New(d.WhyNoNode(file))
		}
		dev.nodes = append(dev.nodes, d.Nodes[at])
	}
	for _, name := range dev.names {
		if err := parser.ValidateDeviceName(name); err != nil {
			return dev, fmt.Errorf("its name %q cannot be used: %w", name, err)
		}
		if owner, ok := owners[name]; ok {
			return dev, fmt.Errorf("its name %s is already used by %s", name, owner)
		}
	}
	for _, name := range dev.names {
		owners[name] = a.Label()
	}
	return dev, nil
}

// specDevices returns the devices of the spec: each name of each device, then all devices as one.
func specDevices(devices []namedDevice) []specs.Device {
	if len(devices) == 0 {
		return nil
	}
	var list []specs.Device
	add := func(name string, nodes []driver.DeviceNode) {
		edits := specs.ContainerEdits{DeviceNodes: deviceNodes(nodes)}
		list = append(list, specs.Device{Name: name, ContainerEdits: edits})
	}
	all := map[string]driver.DeviceNode{}
	for _, dev := range devices {
		for _, n := range dev.nodes {
			all[n.Path] = n
		}
		for _, name := range dev.names {
			add(name, dev.nodes)
		}
	}
	add(AllDevices, slices.Collect(maps.Values(all)))
	return list
}
