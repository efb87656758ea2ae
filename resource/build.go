package resource

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"gpu-cdi-plugin/gpu"
)

// Build returns the resources that the node offers, sorted by name. The configuration must be valid: see Config.Validate.
// Config.Resource is among the resources without a device too, so that the kubelet reports 0 of them, unless rules give all
// of its devices other names.
//
// A device that cannot be allocated is advertised as unhealthy with the reason, not omitted: the kubelet of 1.36 can crash
// when a device of a running pod disappears.
//
// The error is a TooManyDevicesError.
func Build(s *gpu.Snapshot, c Config) ([]Resource, []Finding, error) {
	b := builder{config: &c, seen: map[string]bool{}, used: map[string]bool{}}
	b.choose(s)
	b.requireUniform()
	b.share()
	b.reportUnused()
	resources, err := b.resources()
	if err != nil {
		return nil, nil, err
	}
	return resources, b.findings, nil
}

// plan is a device that is offered, before it is multiplied.
type plan struct {
	resource string
	replicas int // 0 if it is not shared
	way      *way
	device   Device
	gpu      *gpu.Device
	mig      *gpu.MIGDevice // nil for a whole GPU
}

type builder struct {
	config   *Config
	plans    []plan
	findings []Finding
	seen     map[string]bool // UUIDs
	used     map[string]bool // keys of the rules and selectors that fitted something
}

func (b *builder) note(about, format string, args ...any) {
	b.findings = append(b.findings, Finding{About: about, Text: fmt.Sprintf(format, args...)})
}

func (b *builder) problem(about, format string, args ...any) {
	b.findings = append(b.findings, Finding{About: about, Text: fmt.Sprintf(format, args...), Problem: true})
}

// choose plans what the filter and the MIG strategy let through.
func (b *builder) choose(s *gpu.Snapshot) {
	for i := range s.Devices {
		d := &s.Devices[i]
		about := "GPU " + strconv.Itoa(d.Index)
		switch {
		case !b.selected(d):
			b.note(about, "is left out by gpus.include or gpus.exclude of the configuration")
		case !d.MIGEnabled:
			b.addGPU(about, d)
		case b.config.MIGStrategy == MIGNone:
			b.problem(about, "is in MIG mode and cannot be given whole, and with the MIG strategy none its MIG devices are not offered; set mig-strategy")
		case len(d.MIG) == 0:
			b.note(about, "is in MIG mode and has no MIG device")
		default:
			for j := range d.MIG {
				b.addMIG(d, &d.MIG[j])
			}
		}
	}
}

// selected tells what the filter says of a GPU. Every selector is asked, to know which ones fit nothing.
func (b *builder) selected(d *gpu.Device) bool {
	f := &b.config.GPUs
	included := b.anyFits("gpus.include", f.Include, d, nil)
	excluded := b.anyFits("gpus.exclude", f.Exclude, d, nil)
	return (included || len(f.Include) == 0) && !excluded
}

func (b *builder) anyFits(key string, list []Selector, d *gpu.Device, m *gpu.MIGDevice) bool {
	fits := false
	for i, s := range list {
		if s.matches(d, m) {
			fits = true
			b.used[item(key, i)] = true
		}
	}
	return fits
}

func item(key string, i int) string { return key + "[" + strconv.Itoa(i) + "]" }

func (b *builder) addGPU(about string, d *gpu.Device) {
	device := whole(d)
	if d.Minor == gpu.NoMinor {
		device.fail("the number of its device node is not known")
	}
	b.add(about, plan{device: device, resource: b.gpuName(d), gpu: d})
}

// whole is a GPU as a device, and what a MIG device has of its GPU.
func whole(d *gpu.Device) Device {
	device := Device{
		ID: d.UUID, UUID: d.UUID, Parent: d.UUID, Index: d.Index, MIGIndex: NoMIG, Replica: NoReplica, NUMANode: d.NUMANode,
		Healthy: true, Model: d.Name, PCIBusID: d.PCIBusID, MemoryBytes: d.MemoryBytes,
		Minor: d.Minor, GPUInstanceCap: gpu.NoMinor, ComputeInstanceCap: gpu.NoMinor,
	}
	if !d.Usable() {
		device.fail("cannot be read: " + d.Error)
	}
	return device
}

// fail makes a device unhealthy. The first reason stays.
func (d *Device) fail(reason string) {
	d.Healthy = false
	d.Reason = cmp.Or(d.Reason, reason)
}

func (b *builder) addMIG(d *gpu.Device, m *gpu.MIGDevice) {
	device := whole(d)
	device.ID, device.UUID, device.MIGIndex = m.UUID, m.UUID, m.Index
	device.Profile, device.MemoryBytes = m.Profile, m.MemoryBytes
	device.GPUInstanceCap, device.ComputeInstanceCap = m.GPUInstanceCap, m.ComputeInstanceCap
	if d.Minor == gpu.NoMinor || m.GPUInstanceCap == gpu.NoMinor || m.ComputeInstanceCap == gpu.NoMinor {
		device.fail("the numbers of its device nodes are not known")
	}
	name := b.gpuName(d)
	if b.config.MIGStrategy == MIGMixed {
		name = b.migName(m)
	}
	b.add(fmt.Sprintf("MIG device %d:%d", d.Index, m.Index), plan{device: device, resource: name, gpu: d, mig: m})
}

func (b *builder) gpuName(d *gpu.Device) string {
	return b.named("resources.gpus", b.config.Names.GPUs, d.Name, b.config.Resource)
}

func (b *builder) migName(m *gpu.MIGDevice) string {
	return b.named("resources.mig", b.config.Names.MIG, m.Profile, profileName(b.config.Resource, m.Profile))
}

// named is the name that the first fitting rule gives, or the other one.
func (b *builder) named(key string, rules []Name, what, otherwise string) string {
	for i, r := range rules {
		if r.Pattern.Matches(what) {
			b.used[item(key, i)] = true
			return r.Name
		}
	}
	return otherwise
}

// add plans a device unless the kubelet could not be told of it.
func (b *builder) add(about string, p plan) {
	if err := b.unlistable(&p); err != nil {
		b.problem(about, "is not offered: %v", err)
		return
	}
	b.seen[p.device.UUID] = true
	if !p.device.Healthy {
		b.problem(about, "is unhealthy: %s", p.device.Reason)
	}
	b.plans = append(b.plans, p)
}

func (b *builder) unlistable(p *plan) error {
	uuid := p.device.UUID
	switch {
	case uuid == "" && p.device.Reason != "":
		return fmt.Errorf("it has no UUID (PCI address %s); it %s", cmp.Or(p.device.PCIBusID, "unknown"), p.device.Reason)
	case uuid == "":
		return errors.New("it has no UUID")
	case len(uuid) > MaxID:
		return fmt.Errorf("its UUID %q has %d characters, and an ID may have %d", uuid, len(uuid), MaxID)
	case b.seen[uuid]:
		return fmt.Errorf("another device has its UUID %s too", uuid)
	}
	return CheckName(p.resource)
}

// resources multiplies the plans.
func (b *builder) resources() ([]Resource, error) {
	byName := map[string][]plan{}
	if !b.allRenamed() {
		byName[b.config.Resource] = nil
	}
	for _, p := range b.plans {
		byName[p.resource] = append(byName[p.resource], p)
	}
	var list []Resource
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		if err := checkSize(name, byName[name]); err != nil {
			errs = append(errs, err)
			continue
		}
		list = append(list, expand(name, byName[name]))
	}
	return list, errors.Join(errs...)
}

// allRenamed reports whether there are devices that would have the name of Config.Resource, and rules gave each of them
// another one.
func (b *builder) allRenamed() bool {
	renamed := false
	for i := range b.plans {
		switch p := &b.plans[i]; {
		case p.resource == b.config.Resource:
			return false
		case p.mig == nil, b.config.MIGStrategy == MIGSingle:
			renamed = true
		}
	}
	return renamed
}

// expand makes the resource of plans that are in the order of the snapshot, which is by index.
func expand(name string, plans []plan) Resource {
	r := Resource{Name: name, Devices: []Device{}}
	for _, p := range plans {
		if p.way != nil && p.way.limit != "" {
			r.Limit, r.LimitReason = 1, p.way.limit
		}
		if p.replicas == 0 {
			r.Devices = append(r.Devices, p.device)
			continue
		}
		for n := range p.replicas {
			device := p.device
			device.ID, device.Replica = replicaID(device.UUID, n), n
			r.Devices = append(r.Devices, device)
		}
	}
	return r
}
