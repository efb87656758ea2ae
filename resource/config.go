package resource

// Config says what is offered, and how. Its keys are those of the configuration file.
type Config struct {
	// Resource is the name of GPUs that no rule names otherwise. Its vendor is also that of MIG devices' names.
	Resource string `yaml:"resource" json:"resource"`
	// MIGStrategy is what is done with GPUs in MIG mode.
	MIGStrategy MIGStrategy `yaml:"mig-strategy" json:"mig-strategy"`
	// GPUs says which GPUs are offered at all.
	GPUs Filter `yaml:"gpus" json:"gpus"`
	// Names gives names to GPUs and MIG devices of some kinds.
	Names Names `yaml:"resources" json:"resources"`
	// MPS allows rules in Sharing.MPS, for which control daemons are run.
	MPS bool `yaml:"mps" json:"mps"`
	// Sharing says which devices are given to several containers.
	Sharing Sharing `yaml:"sharing" json:"sharing"`
}

// MIGStrategy is what is done with GPUs in MIG mode.
type MIGStrategy string

// The MIG strategies.
const (
	// MIGNone offers whole GPUs only.
	MIGNone MIGStrategy = "none"
	// MIGSingle offers MIG devices as if they were GPUs. All of the node's must be alike, and no GPU be out of MIG mode.
	MIGSingle MIGStrategy = "single"
	// MIGMixed offers each MIG profile under a name of its own, such as nvidia.com/mig-1g.10gb, and whole GPUs beside them.
	MIGMixed MIGStrategy = "mixed"
)

// MIGStrategies lists the strategies.
func MIGStrategies() []string { return []string{string(MIGNone), string(MIGSingle), string(MIGMixed)} }

// Filter chooses GPUs. MIG devices go with their GPU.
type Filter struct {
	// Include are the GPUs that are offered; none means all.
	Include []Selector `yaml:"include" json:"include"`
	// Exclude are GPUs that are not offered although they are included.
	Exclude []Selector `yaml:"exclude" json:"exclude"`
}

// Names are rules for the names of resources. The first one that fits a device names it.
type Names struct {
	// GPUs has patterns of product names. They hold for GPUs, and for MIG devices with the strategy single.
	GPUs []Name `yaml:"gpus" json:"gpus"`
	// MIG has patterns of MIG profiles, such as "1g.*". They hold with the strategy mixed.
	MIG []Name `yaml:"mig" json:"mig"`
}

// Name is a rule: what fits the pattern has this resource name.
type Name struct {
	Pattern Pattern `yaml:"pattern" json:"pattern"`
	Name    string  `yaml:"name" json:"name"`
}

// Sharing says which devices are given to several containers. A device is shared in one way at most.
type Sharing struct {
	TimeSlicing TimeSlicing `yaml:"time-slicing" json:"time-slicing"`
	MPS         MPS         `yaml:"mps" json:"mps"`
}

// TimeSlicing offers devices several times. The driver switches between the processes; nothing is isolated, and each
// may use all of the memory.
type TimeSlicing struct {
	// RenameByDefault appends ".shared" to the names of shared resources that have no Rename.
	RenameByDefault bool `yaml:"rename-by-default" json:"rename-by-default"`
	// FailRequestsGreaterThanOne refuses a container that asks for more than one device of a shared resource: it would get
	// no more compute for it.
	FailRequestsGreaterThanOne bool `yaml:"fail-requests-greater-than-one" json:"fail-requests-greater-than-one"`
	// Resources are the rules. The first one that fits a device holds.
	Resources []Replicated `yaml:"resources" json:"resources"`
}

// MPS offers GPUs several times through CUDA's multi-process service: the processes of all containers run at the same
// time, each with its part of the memory and of the threads. A container gets one replica at most, since a process can
// be a client of one control daemon only.
type MPS struct {
	// RenameByDefault appends ".shared" to the names of shared resources that have no Rename.
	RenameByDefault bool `yaml:"rename-by-default" json:"rename-by-default"`
	// SharedMemoryMiB is each replica's part of the /dev/shm that a GPU's containers have together, in MiB.
	SharedMemoryMiB int `yaml:"shared-memory-mib" json:"shared-memory-mib"`
	// Resources are the rules. The first one that fits a GPU holds.
	Resources []Replicated `yaml:"resources" json:"resources"`
}

// Replicated is a rule of sharing.
type Replicated struct {
	// Name is the resource that the devices have without the rule.
	Name string `yaml:"name" json:"name"`
	// Devices chooses some of the resource's devices; none means all.
	Devices []Selector `yaml:"devices,omitempty" json:"devices,omitempty"`
	// Replicas is how often each of them is offered, from 2.
	Replicas int `yaml:"replicas" json:"replicas"`
	// Rename is the name of the resource that the replicas have, or empty.
	Rename string `yaml:"rename,omitempty" json:"rename,omitempty"`
}

// DefaultSharedMemoryMiB is what Docker and containerd give to a container as its /dev/shm, and MaxSharedMemoryMiB is the
// most that makes sense: 1 TiB.
const (
	DefaultSharedMemoryMiB = 64
	MaxSharedMemoryMiB     = 1 << 20
)

// sharedSuffix marks the names of shared resources.
const sharedSuffix = ".shared"

// The keys of the ways to share.
const (
	timeSlicingKey = "sharing.time-slicing.resources"
	mpsKey         = "sharing.mps.resources"
)

// way is a way to share devices, with its rules.
type way struct {
	key             string
	rules           []Replicated
	renameByDefault bool
	// limit says why a container may have one replica only; empty is that it may have more.
	limit string
}

// ways are all ways to share.
func (s *Sharing) ways() []way {
	t, m := &s.TimeSlicing, &s.MPS
	slicing := way{key: timeSlicingKey, rules: t.Resources, renameByDefault: t.RenameByDefault}
	if t.FailRequestsGreaterThanOne {
		slicing.limit = "more replicas give no more of a GPU"
	}
	return []way{slicing, {
		key: mpsKey, rules: m.Resources, renameByDefault: m.RenameByDefault,
		limit: "a process can use one MPS control daemon only",
	}}
}

// target is the name that a rule's replicas have.
func (w *way) target(r *Replicated) string {
	switch {
	case r.Rename != "":
		return r.Rename
	case w.renameByDefault:
		return r.Name + sharedSuffix
	}
	return r.Name
}
