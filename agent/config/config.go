// Package config defines gpu-cdi-plugin's configuration file: the options of all verbs and those of the device plugin,
// with defaults, validation and documentation.
package config

import (
	"time"

	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/resource"
)

// Config is the whole configuration. keys.go documents each key.
type Config struct {
	Common `yaml:",inline"`
	Plugin `yaml:",inline"`
}

// Common are the options of all verbs.
type Common struct {
	// Root is the directory with the host's /proc, /sys and /etc/cdi.
	Root string `yaml:"root" json:"root"`
	// DriverRoot is the directory in which the driver is installed. DevRoot is the directory that contains dev/ with
	// the device nodes. If they are empty, they are detected.
	DriverRoot string `yaml:"driver-root" json:"driver-root"`
	DevRoot    string `yaml:"dev-root" json:"dev-root"`
	// DriverDirs are further directories, below the driver's root, that have files of the driver.
	DriverDirs []string `yaml:"driver-dirs" json:"driver-dirs"`
	// NVMLLibrary is the path of libnvidia-ml.so.1. If it is empty, it is detected.
	NVMLLibrary string `yaml:"nvml-library" json:"nvml-library"`
	// CDIDir is the directory to which specs are written.
	CDIDir string `yaml:"cdi-dir" json:"cdi-dir"`
	// CDIKind is VENDOR/CLASS of the devices.
	CDIKind string `yaml:"cdi-kind" json:"cdi-kind"`
	// HookPath is the path of prestart-hook on the host. If it is empty, the hook is beside this program.
	HookPath string `yaml:"hook-path" json:"hook-path"`
	// NoHook makes specs without the hook, for containers in which no hook may run.
	NoHook bool `yaml:"no-hook" json:"no-hook"`
	// InsecurePaths allows programs, libraries and directories that users other than root can change.
	InsecurePaths bool `yaml:"insecure-paths" json:"insecure-paths"`
	// LogLevel is the minimum level to log, and LogFormat the format.
	LogLevel  string `yaml:"log-level" json:"log-level"`
	LogFormat string `yaml:"log-format" json:"log-format"`
}

// Plugin are the options of the device plugin.
type Plugin struct {
	// DevicePluginDir is the kubelet's directory for the sockets of device plugins. It also has the kubelet's own
	// socket.
	DevicePluginDir string `yaml:"device-plugin-dir" json:"device-plugin-dir"`
	// PodResourcesSocket is the kubelet's socket that lists the devices of pods. If it is empty, it is detected.
	PodResourcesSocket string `yaml:"pod-resources-socket" json:"pod-resources-socket"`
	// PluginsRegistryDir is the directory of the kubelet's plugin watcher.
	PluginsRegistryDir string `yaml:"plugins-registry-dir" json:"plugins-registry-dir"`
	// Registration is the method of registration with the kubelet.
	Registration Registration `yaml:"registration" json:"registration"`
	// Door selects how the kubelet gets the devices.
	Door Door `yaml:"door" json:"door"`
	// DRAGPUs are the GPUs that DRA offers with BothDoors, with their MIG devices.
	DRAGPUs []resource.Selector `yaml:"dra-gpus" json:"dra-gpus"`
	// RuntimeDir has files that need not survive a reboot: the control socket, and the directories that MPS daemons
	// share with their clients.
	RuntimeDir string `yaml:"runtime-dir" json:"runtime-dir"`
	// StateDir has files that must survive a reboot: the descriptors of devices, which the kubelet mounts again when
	// it restarts a container without a new allocation, and the records of prepared claims.
	StateDir string `yaml:"state-dir" json:"state-dir"`
	// Strategy lists the ways in which a container gets its devices.
	Strategy []resource.Strategy `yaml:"strategy" json:"strategy"`
	// DeviceIDStrategy selects how devices are named for containers and runtimes.
	DeviceIDStrategy DeviceIDStrategy `yaml:"device-id-strategy" json:"device-id-strategy"`
	// CDIAnnotationPrefix is the beginning of the annotations' keys for the strategy resource.CDIAnnotations.
	CDIAnnotationPrefix string `yaml:"cdi-annotation-prefix" json:"cdi-annotation-prefix"`
	// GPUTimeout is how long a GPU may not answer before it is unhealthy.
	GPUTimeout configfile.Duration `yaml:"gpu-timeout" json:"gpu-timeout"`
	// Health decides when a device is unhealthy.
	Health Health `yaml:"health" json:"health"`
	// ReportHealth lists how the health of the devices is reported to the API server.
	ReportHealth []HealthReport `yaml:"report-health" json:"report-health"`
	// ServiceAccountDir has the token and the ca.crt of a service account.
	ServiceAccountDir string `yaml:"service-account-dir" json:"service-account-dir"`
	// PreStart says how devices are prepared before a container with them starts.
	PreStart PreStart `yaml:"prestart" json:"prestart"`
	// FailOnInitError makes the service exit with an error if there is no driver at the start. Otherwise it waits for
	// one.
	FailOnInitError bool `yaml:"fail-on-init-error" json:"fail-on-init-error"`
	// TakeOver makes the service take the place of another instance, without a time in which none serves. Otherwise a
	// second instance is an error.
	TakeOver bool `yaml:"take-over" json:"take-over"`
	// Leave makes the service offer no devices, and end when those that it has given are free.
	Leave Leave `yaml:"leave" json:"leave"`
	// Listen is HOST:PORT of the server for metrics and health. If it is empty, there is no server.
	Listen string `yaml:"listen" json:"listen"`
	// PodMetrics adds metrics that name the containers that hold devices.
	PodMetrics bool `yaml:"pod-metrics" json:"pod-metrics"`
	// NodeLabels makes the service write the labels of the node into a file in FeaturesDir, the directory of node
	// feature discovery.
	NodeLabels  bool   `yaml:"node-labels" json:"node-labels"`
	FeaturesDir string `yaml:"features-dir" json:"features-dir"`
	// Extras are the features that containers get with a GPU if the host has them.
	Extras []Extra `yaml:"extras" json:"extras"`
	// IMEX are the IMEX channels that containers with a GPU get.
	IMEX IMEX `yaml:"imex" json:"imex"`
	// Allocation ranks the devices of which the kubelet should choose.
	Allocation Allocation `yaml:"allocation" json:"allocation"`
	// Config selects the devices that are offered, and their resource names.
	resource.Config `yaml:",inline"`
}

// Registration is a method of registration with the kubelet.
type Registration string

const (
	// RegisterKubelet calls Register on the kubelet's socket.
	RegisterKubelet Registration = "kubelet"
	// RegisterWatcher creates a socket in the directory where the kubelet's plugin watcher finds it.
	RegisterWatcher Registration = "watcher"
)

// Door is a way in which the kubelet gets devices.
type Door string

const (
	// PluginDoor offers devices by the device plugin API.
	PluginDoor Door = "plugin"
	// DRADoor offers devices by dynamic resource allocation.
	DRADoor Door = "dra"
	// BothDoors offers DRAGPUs by dynamic resource allocation, and all others by the device plugin API.
	BothDoors Door = "both"
)

// ByDRA reports whether DRA offers a GPU and its MIG devices.
func (p *Plugin) ByDRA(d *gpu.Device) bool {
	f := resource.Filter{Include: p.DRAGPUs}
	return p.Door == DRADoor || p.Door == BothDoors && f.Selects(d)
}

// Leave says when a service that offers no devices ends.
type Leave string

const (
	// LeaveNever offers the devices.
	LeaveNever Leave = "never"
	// LeaveUnused ends when no container and no ResourceClaim has a device.
	LeaveUnused Leave = "unused"
	// LeaveUnprepared ends when no ResourceClaim has a device. Containers of the device plugin may still have some.
	LeaveUnprepared Leave = "unprepared"
)

// Leaves reports whether the service offers no devices.
func (p *Plugin) Leaves() bool { return p.Leave == LeaveUnused || p.Leave == LeaveUnprepared }

// DeviceIDStrategy selects the names that devices have for containers and runtimes.
type DeviceIDStrategy string

const (
	// ByUUID names a device by its UUID.
	ByUUID DeviceIDStrategy = "uuid"
	// ByIndex names a GPU by its index and a MIG device by GPU:INDEX.
	ByIndex DeviceIDStrategy = "index"
)

// HealthReport is a way to report the health of the devices to the API server.
type HealthReport string

const (
	// ReportEvents are Events about the Node when a device becomes unhealthy or healthy again.
	ReportEvents HealthReport = "events"
	// ReportCondition sets a condition of the Node.
	ReportCondition HealthReport = "node-condition"
)

// Extra is a feature of the host that containers can get in addition to GPUs.
type Extra string

const (
	// GDS is GPUDirect Storage.
	GDS Extra = "gds"
	// GDRCopy maps a GPU's memory for the CPU.
	GDRCopy Extra = "gdrcopy"
	// MOFED are the InfiniBand adapters.
	MOFED Extra = "mofed"
	// NVSwitch are the switches between the GPUs.
	NVSwitch Extra = "nvswitch"
)

// IMEX selects the channels through which GPUs of several hosts share memory.
type IMEX struct {
	// Channels are the numbers of the channels that each container with a GPU gets.
	Channels []int `yaml:"channels" json:"channels"`
	// Required makes all devices unhealthy as long as one of the channels is missing.
	Required bool `yaml:"required" json:"required"`
}

// Health decides when a device is unhealthy, and when it is healthy again.
type Health struct {
	// CleanFor is how long the probes of a device must pass before the device is healthy again.
	CleanFor configfile.Duration `yaml:"clean-for" json:"clean-for"`
	// XIDs are rules for events of an XID. When an event arrives, its rule takes precedence over the driver's recovery
	// action and NVIDIA's catalogue. But if the next probe still reports a recovery action, that one counts.
	XIDs []XIDRule `yaml:"xids" json:"xids"`
}

// XIDRule decides what events of an XID mean for a device.
type XIDRule struct {
	XID    int           `yaml:"xid" json:"xid"`
	Action health.Action `yaml:"action" json:"action"`
	// Count is how many events must occur within the time Within. 0 means 1.
	Count  int                 `yaml:"count,omitempty" json:"count,omitempty"`
	Within configfile.Duration `yaml:"within,omitempty" json:"within,omitempty"`
}

// Rules converts the rules to those of the health package.
func (h *Health) Rules() health.Rules {
	r := health.Rules{CleanFor: time.Duration(h.CleanFor), XIDs: map[uint64]health.Rule{}}
	for _, x := range h.XIDs {
		r.XIDs[uint64(x.XID)] = health.Rule{Action: x.Action, Count: x.Count, Within: time.Duration(x.Within)}
	}
	return r
}

// PreStart says how devices are prepared before a container with them starts.
type PreStart struct {
	// Policy selects what is done with a device.
	Policy prepare.Policy `yaml:"policy" json:"policy"`
	// Strict means that a device is refused if the policy is "reset" and the device cannot be reset.
	Strict bool `yaml:"strict" json:"strict"`
	// Programs are programs that may use a device which otherwise must not be in use.
	Programs []string `yaml:"programs" json:"programs"`
	// MemoryToleranceMiB is how much memory may be in use on a device that is not in use.
	MemoryToleranceMiB int `yaml:"memory-tolerance-mib" json:"memory-tolerance-mib"`
	// Exec is the path of a program that runs last, or empty.
	Exec string `yaml:"exec" json:"exec"`
	// ExecTimeout is how long Exec may run.
	ExecTimeout configfile.Duration `yaml:"exec-timeout" json:"exec-timeout"`
	// Resources have their own policies.
	Resources []PreStartRule `yaml:"resources" json:"resources"`
}

// PreStartRule is the policy of a resource.
type PreStartRule struct {
	Name   string         `yaml:"name" json:"name"`
	Policy prepare.Policy `yaml:"policy" json:"policy"`
}

// RefusesParts reports whether replicas and MIG devices of a resource are always refused: they cannot be reset, and
// with the policy "reset" Strict refuses a device that cannot be reset.
func (p *PreStart) RefusesParts(resourceName string) bool {
	r := p.RulesOf(resourceName)
	return r.Strict && r.Policy == prepare.Reset
}

// RulesOf returns the rules for a resource.
func (p *PreStart) RulesOf(resourceName string) prepare.Rules {
	r := prepare.Rules{
		Policy: p.Policy, Strict: p.Strict, Programs: p.Programs,
		MemoryTolerance: uint64(p.MemoryToleranceMiB) << 20,
		Exec:            prepare.Program{Path: p.Exec, Timeout: time.Duration(p.ExecTimeout)},
	}
	for _, rule := range p.Resources {
		if rule.Name == resourceName {
			r.Policy = rule.Policy
		}
	}
	return r
}

// Allocation ranks the devices that the kubelet can choose from.
type Allocation struct {
	// Policy applies to GPUs, and SharedPolicy to replicas and MIG devices.
	Policy       allocator.Policy `yaml:"policy" json:"policy"`
	SharedPolicy allocator.Policy `yaml:"shared-policy" json:"shared-policy"`
	// Weights are the scores for connections between GPUs.
	Weights allocator.Weights `yaml:"weights" json:"weights"`
}

// maxChannel is the highest channel number, which is a minor number of Linux.
const maxChannel = 1<<20 - 1

// Default returns the default configuration.
func Default() Config {
	return Config{
		Common: Common{
			Root:       "/",
			CDIDir:     "/var/run/cdi",
			DriverDirs: []string{},
			CDIKind:    "nvidia.com/gpu",
			LogLevel:   "info",
			LogFormat:  "text",
		},
		Plugin: Plugin{
			DevicePluginDir:     "/var/lib/kubelet/device-plugins",
			PluginsRegistryDir:  "/var/lib/kubelet/plugins_registry",
			Registration:        RegisterKubelet,
			Door:                PluginDoor,
			DRAGPUs:             []resource.Selector{},
			RuntimeDir:          "/run/gpu-cdi-plugin",
			StateDir:            "/var/lib/gpu-cdi-plugin",
			Strategy:            []resource.Strategy{resource.CDICRI},
			DeviceIDStrategy:    ByUUID,
			CDIAnnotationPrefix: "cdi.k8s.io/",
			GPUTimeout:          configfile.Duration(10 * time.Second),
			Health:              Health{CleanFor: configfile.Duration(health.DefaultCleanFor), XIDs: []XIDRule{}},
			ReportHealth:        []HealthReport{},
			ServiceAccountDir:   "/var/run/secrets/kubernetes.io/serviceaccount",
			PreStart: PreStart{
				Policy: prepare.Check, Programs: prepare.DefaultPrograms(), ExecTimeout: configfile.Duration(10 * time.Second),
				MemoryToleranceMiB: prepare.DefaultMemoryTolerance >> 20, Resources: []PreStartRule{},
			},
			FailOnInitError: true,
			Leave:           LeaveNever,
			FeaturesDir:     "/etc/kubernetes/node-feature-discovery/features.d",
			Extras:          []Extra{},
			IMEX:            IMEX{Channels: []int{}},
			Allocation: Allocation{
				Policy:       allocator.Topology,
				SharedPolicy: allocator.Spread,
				Weights:      allocator.DefaultWeights(),
			},
			Config: resource.Config{
				Resource:    "nvidia.com/gpu",
				MIGStrategy: resource.MIGNone,
				GPUs:        resource.Filter{Include: []resource.Selector{}, Exclude: []resource.Selector{}},
				Names:       resource.Names{GPUs: []resource.NameRule{}, MIG: []resource.NameRule{}},
				Sharing: resource.Sharing{
					TimeSlicing: resource.TimeSlicing{Resources: []resource.SharingRule{}},
					MPS:         resource.MPS{Resources: []resource.SharingRule{}},
				},
			},
		},
	}
}
