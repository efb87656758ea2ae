package resource

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/kubelet"
)

// Build returns the resources that the node offers, sorted by name. The configuration must be valid: see
// Config.Validate. Config.Resource is in the result even if it has no devices, so that the kubelet reports 0, unless
// rules give all devices other names.
//
// A device that cannot be allocated is advertised as unhealthy with the reason, not left out: the kubelet of 1.36 can
// crash when a device of a running pod disappears. A GPU in MIG mode is left out, and its MIG devices are advertised.
//
// The error wraps a TooManyDevicesError for each resource that is too large.
func Build(s *gpu.Snapshot, c Config) ([]Resource, []Finding, error) {
	b := builder{config: &c, seen: map[string]bool{}, used: map[string]bool{}}
	b.addDevices(s)
	b.requireUniform()
	b.share()
	b.reportUnused()
	if len(s.Devices) > 0 && len(b.plans) == 0 {
		b.findings = append(b.findings, Finding{Text: noneOffered, Severe: true})
	}
	resources, err := b.resources()
	if err != nil {
		return nil, nil, err
	}
	return resources, b.findings, nil
}

const noneOffered = "no device of this node is offered to containers: each GPU is excluded, is in MIG mode without a " +
	"MIG device, or cannot be advertised"

// plan is a device to offer, before its replicas are made.
type plan struct {
	resource string
	replicas int     // 0 if not shared
	method   *method // nil if not shared
	device   Device
	gpu      *gpu.Device
	mig      *gpu.MIGDevice // nil for a whole GPU
}

type builder struct {
	config   *Config
	plans    []plan
	findings []Finding
	seen     map[string]bool // UUIDs
	used     map[string]bool // keys of the rules and selectors that matched a device
}

func (b *builder) note(about, text string) {
	b.findings = append(b.findings, Finding{Text: about + " " + text})
}

func (b *builder) problem(about, format string, args ...any) {
	b.findings = append(b.findings, Finding{Text: about + " " + fmt.Sprintf(format, args...), Severe: true})
}

// addDevices plans the devices that the filter and the MIG strategy allow.
func (b *builder) addDevices(s *gpu.Snapshot) {
	for i := range s.Devices {
		d := &s.Devices[i]
		about := "GPU " + strconv.Itoa(d.Index)
		switch {
		case !b.selected(d):
			b.note(about, "is excluded by gpus.include or gpus.exclude")
			continue
		case d.MIGEnabled && b.config.MIGStrategy == MIGNone:
			b.problem(about, "is in MIG mode and is not offered with mig-strategy none; "+
				"set mig-strategy to single or mixed")
			continue
		}
		for _, a := range d.Allocatables() {
			switch {
			case d.MIGEnabled && a.MIG == nil:
				b.findings = append(b.findings, Finding{Text: about + " " + a.Reason, Severe: !d.Usable()})
			case a.MIG != nil && b.config.MIGStrategy == MIGMixed:
				b.add(&a, b.migName(a.MIG))
			default:
				b.add(&a, b.gpuName(d))
			}
		}
	}
}

// selected reports whether the filter selects a GPU. It evaluates every selector, so that reportUnused knows which
// ones match.
func (b *builder) selected(d *gpu.Device) bool {
	f := &b.config.GPUs
	b.anyMatches("gpus.include", f.Include, d, nil)
	b.anyMatches("gpus.exclude", f.Exclude, d, nil)
	return f.Selects(d)
}

func (b *builder) anyMatches(key string, list []Selector, d *gpu.Device, m *gpu.MIGDevice) bool {
	matched := false
	for i, s := range list {
		if s.matches(d, m) {
			matched = true
			b.used[item(key, i)] = true
		}
	}
	return matched
}

func item(key string, i int) string { return key + "[" + strconv.Itoa(i) + "]" }

func (b *builder) gpuName(d *gpu.Device) string {
	return b.named("resources.gpus", b.config.Names.GPUs, d.Name, b.config.Resource)
}

func (b *builder) migName(m *gpu.MIGDevice) string {
	return b.named("resources.mig", b.config.Names.MIG, m.Profile, profileName(b.config.Resource, m.Profile))
}

// profileName returns the resource name for a MIG profile, with the vendor of base, such as nvidia.com/mig-1g.10gb.
// Names cannot contain plus signs and commas, which become dots, like in NVIDIA's device plugin: 1g.10gb+me is
// mig-1g.10gb.me.
func profileName(base, profile string) string {
	vendor, _, _ := strings.Cut(base, "/")
	return vendor + "/mig-" + strings.NewReplacer("+", ".", ",", ".").Replace(profile)
}

// named returns the resource name of the first rule whose pattern matches the model or profile. If no rule matches, it
// returns the default.
func (b *builder) named(key string, rules []NameRule, text, defaultName string) string {
	for i, r := range rules {
		if r.Pattern.matches(text) {
			b.used[item(key, i)] = true
			return r.Name
		}
	}
	return defaultName
}

// add plans a device, unless the kubelet cannot be told about it.
func (b *builder) add(a *gpu.Allocatable, resource string) {
	p := plan{device: newDevice(a), resource: resource, gpu: a.GPU, mig: a.MIG}
	if err := b.checkAdvertisable(&p); err != nil {
		b.problem(a.Label(), "is not offered: %v", err)
		return
	}
	b.seen[p.device.UUID] = true
	if !p.device.Healthy {
		b.problem(a.Label(), "is unhealthy: %s", p.device.Reason)
	}
	b.plans = append(b.plans, p)
}

func newDevice(a *gpu.Allocatable) Device {
	d := Device{
		ID: a.UUID(), UUID: a.UUID(), Parent: a.GPU.UUID, IndexName: a.IndexName(), Index: a.GPU.Index, MIGIndex: NoMIG,
		Replica: NoReplica, NUMANode: a.GPU.NUMANode, Healthy: a.Reason == "", Reason: a.Reason, Model: a.GPU.Name,
		PCIBusID: a.GPU.PCIBusID, MemoryBytes: a.GPU.MemoryBytes,
	}
	if a.MIG != nil {
		d.MIGIndex, d.Profile, d.MemoryBytes = a.MIG.Index, a.MIG.Profile, a.MIG.MemoryBytes
	}
	return d
}

func (b *builder) checkAdvertisable(p *plan) error {
	uuid := p.device.UUID
	switch {
	case uuid == "" && p.device.Reason != "":
		return fmt.Errorf("it has no UUID (PCI address %s); it %s",
			cmp.Or(p.device.PCIBusID, "unknown"), p.device.Reason)
	case uuid == "":
		return errors.New("it has no UUID")
	case len(uuid) > maxID:
		return fmt.Errorf("its UUID %q has %d characters, more than %d", uuid, len(uuid), maxID)
	case b.seen[uuid]:
		return fmt.Errorf("another device has the same UUID %s", uuid)
	}
	return kubelet.CheckResourceName(p.resource)
}

// resources builds the resources from the plans.
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

// allRenamed reports whether there are devices for Config.Resource and rules rename all of them.
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

// expand builds a resource with the replicas of its planned devices. These are in the order of the snapshot, by index.
func expand(name string, plans []plan) Resource {
	r := Resource{Name: name, Devices: []Device{}}
	for _, p := range plans {
		if p.method != nil && p.method.limitReason != "" {
			r.Limit, r.LimitReason = 1, p.method.limitReason
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
