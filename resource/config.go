package resource

import (
	"slices"

	"gpu-cdi-plugin/gpu"
)

// Config selects the devices that are offered, and their resource names. Its keys are those of the configuration file.
type Config struct {
	// Resource is the resource name of GPUs to which no rule gives another name. The resources of MIG devices have the
	// same vendor.
	Resource string `yaml:"resource" json:"resource"`
	// MIGStrategy selects how GPUs in MIG mode are offered.
	MIGStrategy MIGStrategy `yaml:"mig-strategy" json:"mig-strategy"`
	// GPUs selects the GPUs that are offered.
	GPUs Filter `yaml:"gpus" json:"gpus"`
	// Names are rules for resource names.
	Names Names `yaml:"resources" json:"resources"`
	// MPS must be set if Sharing.MPS has rules, since they need MPS control daemons.
	MPS bool `yaml:"mps" json:"mps"`
	// Sharing selects devices that several containers share.
	Sharing Sharing `yaml:"sharing" json:"sharing"`
}

// MIGStrategy selects how GPUs in MIG mode are offered.
type MIGStrategy string

const (
	// MIGNone offers only whole GPUs.
	MIGNone MIGStrategy = "none"
	// MIGSingle offers MIG devices under the resource name of GPUs. All MIG devices of the node must have the same
	// profile.
	MIGSingle MIGStrategy = "single"
	// MIGMixed offers a resource for each MIG profile, such as nvidia.com/mig-1g.10gb, and whole GPUs.
	MIGMixed MIGStrategy = "mixed"
)

// MIGStrategies returns the MIG strategies.
func MIGStrategies() []string { return []string{string(MIGNone), string(MIGSingle), string(MIGMixed)} }

// Filter selects GPUs together with their MIG devices.
type Filter struct {
	// Include are the GPUs that are offered; an empty list means all.
	Include []Selector `yaml:"include" json:"include"`
	// Exclude are GPUs that are not offered even if they are included.
	Exclude []Selector `yaml:"exclude" json:"exclude"`
}

// Selects reports whether the filter selects a GPU.
func (f *Filter) Selects(d *gpu.Device) bool {
	matches := func(s Selector) bool { return s.matches(d, nil) }
	return (len(f.Include) == 0 || slices.ContainsFunc(f.Include, matches)) && !slices.ContainsFunc(f.Exclude, matches)
}

// Names are rules that give devices resource names. The first rule that matches a device applies.
type Names struct {
	// GPUs has patterns of product names. They apply to GPUs and, with MIGSingle, to MIG devices.
	GPUs []NameRule `yaml:"gpus" json:"gpus"`
	// MIG has patterns of MIG profiles, such as "1g.*". They apply with MIGMixed.
	MIG []NameRule `yaml:"mig" json:"mig"`
}

// NameRule gives devices that match the pattern a resource name.
type NameRule struct {
	Pattern Pattern `yaml:"pattern" json:"pattern"`
	Name    string  `yaml:"name" json:"name"`
}

// Sharing selects devices that several containers share. At most one method shares a device.
type Sharing struct {
	TimeSlicing TimeSlicing `yaml:"time-slicing" json:"time-slicing"`
	MPS         MPS         `yaml:"mps" json:"mps"`
}

// TimeSlicing offers replicas of devices. The driver switches between the processes of the containers, without
// isolation: each process may use all of the memory.
type TimeSlicing struct {
	// RenameByDefault appends ".shared" to the names of shared resources that have no Rename.
	RenameByDefault bool `yaml:"rename-by-default" json:"rename-by-default"`
	// FailRequestsGreaterThanOne refuses requests for more than one device of a shared resource, since more replicas
	// give no more compute.
	FailRequestsGreaterThanOne bool `yaml:"fail-requests-greater-than-one" json:"fail-requests-greater-than-one"`
	// Resources are the rules. The first rule that matches a device applies.
	Resources []SharingRule `yaml:"resources" json:"resources"`
}

// MPS offers replicas of GPUs through CUDA's Multi-Process Service: the processes of all containers run at the same
// time, each with its share of the memory and of the threads. A container gets at most one replica, since a process
// can be a client of only one control daemon.
type MPS struct {
	// RenameByDefault appends ".shared" to the names of shared resources that have no Rename.
	RenameByDefault bool `yaml:"rename-by-default" json:"rename-by-default"`
	// Resources are the rules. The first rule that matches a GPU applies.
	Resources []SharingRule `yaml:"resources" json:"resources"`
}

// SharingRule selects devices to share, and how.
type SharingRule struct {
	// Name is the resource that the devices would have without the rule.
	Name string `yaml:"name" json:"name"`
	// Devices selects devices of the resource; an empty list means all.
	Devices []Selector `yaml:"devices,omitempty" json:"devices,omitempty"`
	// Replicas is the number of replicas of each device, at least 2.
	Replicas int `yaml:"replicas" json:"replicas"`
	// Rename is the resource name of the replicas. If it is empty, they have the name in Name, or that with ".shared"
	// (RenameByDefault).
	Rename string `yaml:"rename,omitempty" json:"rename,omitempty"`
}

// sharedSuffix is appended to the names of shared resources if RenameByDefault is set.
const sharedSuffix = ".shared"

// The configuration keys of the rules of each sharing method.
const (
	timeSlicingKey = "sharing.time-slicing.resources"
	mpsKey         = "sharing.mps.resources"
)

// method is a method of sharing devices, with its rules.
type method struct {
	key             string
	rules           []SharingRule
	renameByDefault bool
	// limitReason says why a container may have only one replica. It is empty if a container may have more.
	limitReason string
}

// methods returns all methods of sharing.
func (s *Sharing) methods() []method {
	t, m := &s.TimeSlicing, &s.MPS
	slicing := method{key: timeSlicingKey, rules: t.Resources, renameByDefault: t.RenameByDefault}
	if t.FailRequestsGreaterThanOne {
		slicing.limitReason = "more replicas give no more of a GPU"
	}
	return []method{slicing, {
		key: mpsKey, rules: m.Resources, renameByDefault: m.RenameByDefault,
		limitReason: "a process can use only one MPS control daemon",
	}}
}

// Names returns the resource names of all replicas, sorted.
func (s *Sharing) Names() []string {
	var names []string
	for _, m := range s.methods() {
		for i := range m.rules {
			names = append(names, m.target(&m.rules[i]))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// target returns the resource name of a rule's replicas.
func (m *method) target(r *SharingRule) string {
	switch {
	case r.Rename != "":
		return r.Rename
	case m.renameByDefault:
		return r.Name + sharedSuffix
	}
	return r.Name
}
