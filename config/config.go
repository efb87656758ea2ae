// Package config is the configuration file as a value: the options for all verbs and everything that the device plugin
// can be told. It has the defaults, the rules, the words of the documentation and the JSON schema.
//
// It reads bytes, not files, and knows no flags; that a flag comes before the environment and the environment before the
// file is the command line's business.
package config

import (
	"time"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/resource"
)

// Config is the whole configuration. Each key has its documentation in keys.go.
type Config struct {
	Common `yaml:",inline"`
	Plugin `yaml:",inline"`
}

// Common are the options that every verb takes.
type Common struct {
	// Root is the directory that /proc, /sys and /etc/cdi are under.
	Root string `yaml:"root" json:"root"`
	// DriverRoot and DevRoot are where the driver is installed and whose dev/ holds its nodes; empty means Root.
	DriverRoot string `yaml:"driver-root" json:"driver-root"`
	DevRoot    string `yaml:"dev-root" json:"dev-root"`
	// NVMLLibrary is the path of libnvidia-ml.so.1; empty means that it is looked for.
	NVMLLibrary string `yaml:"nvml-library" json:"nvml-library"`
	// CDIDir is the directory that specs are written to.
	CDIDir string `yaml:"cdi-dir" json:"cdi-dir"`
	// CDIKind is VENDOR/CLASS of the devices.
	CDIKind string `yaml:"cdi-kind" json:"cdi-kind"`
	// HookPath is the host's path of prestart-hook; empty means beside the running program.
	HookPath string `yaml:"hook-path" json:"hook-path"`
	// InsecurePaths allows a hook, a driver's library and directories that others than root could change.
	InsecurePaths bool `yaml:"insecure-paths" json:"insecure-paths"`
	// LogLevel and LogFormat say what is logged to stderr, and how.
	LogLevel  string `yaml:"log-level" json:"log-level"`
	LogFormat string `yaml:"log-format" json:"log-format"`
}

// Plugin is what the device plugin can be told.
type Plugin struct {
	// DevicePluginDir is where the kubelet's socket is and ours are made.
	DevicePluginDir string `yaml:"device-plugin-dir" json:"device-plugin-dir"`
	// PluginsRegistryDir is the directory that the kubelet's plugin watcher looks at.
	PluginsRegistryDir string `yaml:"plugins-registry-dir" json:"plugins-registry-dir"`
	// Registration is how the kubelet gets to know the plugin.
	Registration Registration `yaml:"registration" json:"registration"`
	// RuntimeDir is for what need not outlive a boot: the files that MPS daemons and their clients share.
	RuntimeDir string `yaml:"runtime-dir" json:"runtime-dir"`
	// StateDir is for files that must survive a reboot: the device descriptors, which the kubelet mounts into a container
	// again without a new allocation.
	StateDir string `yaml:"state-dir" json:"state-dir"`
	// Strategy lists how a container is given its devices.
	Strategy []Strategy `yaml:"strategy" json:"strategy"`
	// DeviceIDStrategy is which names of devices containers and runtimes are given.
	DeviceIDStrategy DeviceIDStrategy `yaml:"device-id-strategy" json:"device-id-strategy"`
	// CDIAnnotationPrefix begins the keys of CDIAnnotations.
	CDIAnnotationPrefix string `yaml:"cdi-annotation-prefix" json:"cdi-annotation-prefix"`
	// GPUTimeout is how long a GPU may not answer before it is unhealthy.
	GPUTimeout Duration `yaml:"gpu-timeout" json:"gpu-timeout"`
	// FailOnInitError tells to end with an error if there is no driver at the start. Otherwise it is waited for.
	FailOnInitError bool `yaml:"fail-on-init-error" json:"fail-on-init-error"`
	// Listen is HOST:PORT of the listener for metrics and health; empty means none.
	Listen string `yaml:"listen" json:"listen"`
	// Extras are what containers with devices get besides, where the node has it.
	Extras []Extra `yaml:"extras" json:"extras"`
	// IMEX are the IMEX channels that containers with devices get.
	IMEX IMEX `yaml:"imex" json:"imex"`
	// Allocation is which devices the kubelet is told to take.
	Allocation Allocation `yaml:"allocation" json:"allocation"`
	// Config says what is offered, and under which names.
	resource.Config `yaml:",inline"`
}

// Registration is how the kubelet gets to know the plugin.
type Registration string

// The ways to register.
const (
	// RegisterKubelet calls Register on the kubelet's socket.
	RegisterKubelet Registration = "kubelet"
	// RegisterWatcher puts a socket where the kubelet's plugin watcher finds it.
	RegisterWatcher Registration = "watcher"
)

// Registrations lists the ways to register.
func Registrations() []string { return []string{string(RegisterKubelet), string(RegisterWatcher)} }

// Strategy is a way to give a container its devices.
type Strategy string

// The strategies.
const (
	// CDICRI names CDI devices in the answer's own field.
	CDICRI Strategy = "cdi-cri"
	// CDIAnnotations names CDI devices in annotations, for older kubelets and engines.
	CDIAnnotations Strategy = "cdi-annotations"
	// DeviceSpecs has the device nodes and mounts in the answer, for kubelets and engines without CDI.
	DeviceSpecs Strategy = "device-specs"
	// Envvar names the devices in NVIDIA_VISIBLE_DEVICES, for NVIDIA's own runtime.
	Envvar Strategy = "envvar"
)

// Strategies lists the strategies.
func Strategies() []string {
	return []string{string(CDICRI), string(CDIAnnotations), string(DeviceSpecs), string(Envvar)}
}

// DeviceIDStrategy is which names of devices containers and runtimes are given.
type DeviceIDStrategy string

// The names.
const (
	// ByUUID names a device by its UUID.
	ByUUID DeviceIDStrategy = "uuid"
	// ByIndex names a GPU by its index and a MIG device by GPU:INDEX.
	ByIndex DeviceIDStrategy = "index"
)

// DeviceIDStrategies lists the names.
func DeviceIDStrategies() []string { return []string{string(ByUUID), string(ByIndex)} }

// Extra is something of the node that a container can be given besides GPUs.
type Extra string

// The extras.
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

// Extras lists the extras.
func Extras() []string {
	return []string{string(GDS), string(GDRCopy), string(MOFED), string(NVSwitch)}
}

// IMEX are the channels by which GPUs of several nodes share memory.
type IMEX struct {
	// Channels are the numbers of the channels that every container gets.
	Channels []int `yaml:"channels" json:"channels"`
	// Required tells that no device is offered without all of the channels.
	Required bool `yaml:"required" json:"required"`
}

// Allocation is which of the available devices are best.
type Allocation struct {
	// Policy is for GPUs, SharedPolicy for replicas and MIG devices.
	Policy       allocator.Policy `yaml:"policy" json:"policy"`
	SharedPolicy allocator.Policy `yaml:"shared-policy" json:"shared-policy"`
	// Weights are what connections of GPUs are worth.
	Weights allocator.Weights `yaml:"weights" json:"weights"`
}

// MaxChannel is the highest number that a channel can have: it is a minor number.
const MaxChannel = 1<<20 - 1

// Default is the configuration of who configures nothing.
func Default() Config {
	return Config{
		Common: Common{
			Root:      "/",
			CDIDir:    "/var/run/cdi",
			CDIKind:   "nvidia.com/gpu",
			LogLevel:  "info",
			LogFormat: "text",
		},
		Plugin: Plugin{
			DevicePluginDir:     "/var/lib/kubelet/device-plugins",
			PluginsRegistryDir:  "/var/lib/kubelet/plugins_registry",
			Registration:        RegisterKubelet,
			RuntimeDir:          "/run/gpu-cdi-plugin",
			StateDir:            "/var/lib/gpu-cdi-plugin",
			Strategy:            []Strategy{CDICRI},
			DeviceIDStrategy:    ByUUID,
			CDIAnnotationPrefix: "cdi.k8s.io/",
			GPUTimeout:          Duration(10 * time.Second),
			FailOnInitError:     true,
			Extras:              []Extra{},
			IMEX:                IMEX{Channels: []int{}},
			Allocation: Allocation{
				Policy:       allocator.Topology,
				SharedPolicy: allocator.Spread,
				Weights:      allocator.DefaultWeights(),
			},
			Config: resource.Config{
				Resource:    "nvidia.com/gpu",
				MIGStrategy: resource.MIGNone,
				GPUs:        resource.Filter{Include: []resource.Selector{}, Exclude: []resource.Selector{}},
				Names:       resource.Names{GPUs: []resource.Name{}, MIG: []resource.Name{}},
				Sharing: resource.Sharing{
					TimeSlicing: resource.TimeSlicing{Resources: []resource.Replicated{}},
					MPS: resource.MPS{
						SharedMemoryMiB: resource.DefaultSharedMemoryMiB,
						Resources:       []resource.Replicated{},
					},
				},
			},
		},
	}
}
