package config

import (
	"slices"
	"strings"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/resource"
)

// Key is the documentation of a key.
type Key struct {
	// Path is where the key is: "sharing.time-slicing.resources[].replicas".
	Path string
	// Usage says what it means. Back quotes are around the word for its value, as in the usage of flags.
	Usage string
	// Required tells that an item of the list must have it.
	Required bool
	// Values are the values that are known, if only those are accepted.
	Values []string
	// Least is the least value, if it is a number.
	Least int
	// Most is the greatest value, if it is a number, or a list of numbers, and there is one.
	Most int
	// Example is what its value may look like, in YAML, where the default shows too little.
	Example string
}

// Usage is the text for the flag of that name.
func Usage(flag string) string { return keyOf(flag).Usage }

func keyOf(path string) Key {
	i := slices.IndexFunc(keys, func(k Key) bool { return k.Path == path })
	if i < 0 {
		return Key{}
	}
	return keys[i]
}

// sentence is the usage as a sentence, for where there are no flags.
func (k Key) sentence() string {
	text := strings.ReplaceAll(k.Usage, "`", "")
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + strings.TrimSuffix(text[1:], ".") + "."
}

// keys are all keys in the order of the struct.
var keys = []Key{
	{Path: "root", Usage: "`directory` that /proc, /sys and /etc/cdi are under, and the driver unless told otherwise"},
	{Path: "driver-root", Usage: "`directory` that the driver is installed under (default --root, or where --nvml-library is)"},
	{Path: "dev-root", Usage: "`directory` whose dev/ holds the device nodes (default --root, else --driver-root)"},
	{Path: "nvml-library", Usage: "`path` of libnvidia-ml.so.1 (default: looked for)"},
	{Path: "cdi-dir", Usage: "`directory` that specs are written to"},
	{Path: "cdi-kind", Usage: "`vendor/class` of the devices in specs"},
	{Path: "hook-path", Usage: "host `path` of prestart-hook, written into specs (default: beside this program)"},
	{Path: "insecure-paths", Usage: "run and load also what others than root could change, with a warning: for work from a source tree"},
	{Path: "log-level", Usage: "least `level` to log: debug, info, warn, error", Values: LogLevels()},
	{Path: "log-format", Usage: "`format` of logs: text, json", Values: LogFormats()},

	{Path: "device-plugin-dir", Usage: "`directory` of the kubelet's socket for device plugins; ours are made there too"},
	{Path: "plugins-registry-dir", Usage: "`directory` in which the kubelet looks for plugins, for the registration watcher"},
	{Path: "registration", Usage: "`way` to register: kubelet (call its socket), watcher (be found in plugins-registry-dir)", Values: Registrations()},
	{Path: "runtime-dir", Usage: "`directory` for the MPS daemons' files; in /run, and with the same path on the host"},
	{Path: "state-dir", Usage: "`directory` for the device descriptors, which must survive a reboot; the same path on the host"},
	{Path: "strategy", Usage: "`list` of ways to give containers their devices: cdi-cri, cdi-annotations, device-specs, envvar", Values: Strategies()},
	{Path: "device-id-strategy", Usage: "`names` of devices in CDI names and variables: uuid, index (means another GPU when one is added or removed)", Values: DeviceIDStrategies()},
	{Path: "cdi-annotation-prefix", Usage: "`prefix` of the annotations of the strategy cdi-annotations"},
	{Path: "gpu-timeout", Usage: "`duration` after which a GPU that does not answer is unhealthy, 1s or more"},
	{Path: "fail-on-init-error", Usage: "exit with an error if there is no usable driver at the start; with false, wait for it without any device"},
	{Path: "listen", Usage: "`host:port` of the listener for metrics and health (default: none)"},
	{Path: "extras", Usage: "`list` of what containers get besides GPUs if the host has it: gds, gdrcopy, mofed (InfiniBand), nvswitch (default: nothing)", Values: Extras()},
	{
		Path: "imex", Usage: "IMEX channels, by which GPUs of several nodes share memory.",
		Example: "channels: [0]\nrequired: true",
	},
	{Path: "imex.channels", Usage: "Numbers of the channels that every container with a device gets, if the host has them.", Most: MaxChannel},
	{Path: "imex.required", Usage: "Whether no device can be given to a container while the host lacks one of the channels."},

	{
		Path: "allocation", Usage: "Which of the available devices the kubelet is told to take.",
		Example: "policy: numa\nshared-policy: pack\nweights: {system: 1, nvlink: 200}",
	},
	{Path: "allocation.policy", Usage: "Policy for GPUs: topology (the best connected), partition (as NVIDIA's best effort), numa (fewest NUMA nodes, then topology).", Values: allocator.Policies()},
	{Path: "allocation.shared-policy", Usage: "Policy for replicas and MIG devices: spread (of the GPUs with fewest in use), pack (of the fullest GPUs that can still take them; of MIG devices all profiles count, by their compute slices), or one of the others.", Values: allocator.Policies()},
	{Path: "allocation.weights", Usage: "What a connection of two GPUs is worth: that of their nearest common point on PCIe, and that of each NVLink."},
	{Path: "allocation.weights.system", Usage: "SYS: across the link between sockets.", Most: allocator.MaxWeight},
	{Path: "allocation.weights.node", Usage: "NODE: across host bridges of a NUMA node.", Most: allocator.MaxWeight},
	{Path: "allocation.weights.host-bridge", Usage: "PHB: through one host bridge.", Most: allocator.MaxWeight},
	{Path: "allocation.weights.multiple-switches", Usage: "PXB: through several PCIe switches.", Most: allocator.MaxWeight},
	{Path: "allocation.weights.single-switch", Usage: "PIX: through one PCIe switch.", Most: allocator.MaxWeight},
	{Path: "allocation.weights.same-board", Usage: "PSB: on one board.", Most: allocator.MaxWeight},
	{Path: "allocation.weights.nvlink", Usage: "Each NVLink between the two.", Most: allocator.MaxWeight},
	{Path: "allocation.weights.nvswitch", Usage: "Each NVLink through NVSwitches.", Most: allocator.MaxWeight},

	{Path: "resource", Usage: "resource `name` of GPUs; its vendor is that of MIG devices' names too"},
	{Path: "mig-strategy", Usage: "`strategy` for GPUs in MIG mode: none, single (as if they were GPUs), mixed (a name for each profile)", Values: resource.MIGStrategies()},
	{
		Path: "gpus", Usage: "The GPUs that are offered, with their MIG devices. A GPU is chosen by its index, its UUID, or a pattern of its product name.",
		Example: "include: [0, 1, GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c]\nexclude: [\"*T400*\"]",
	},
	{Path: "gpus.include", Usage: "GPUs that are offered; none means all."},
	{Path: "gpus.exclude", Usage: "GPUs that are not offered although they are included."},
	{
		Path: "resources", Usage: "Names of resources. The first rule that fits a device names it; * in a pattern is any text, ? any character.",
		Example: "gpus:\n  - {pattern: \"*H100*\", name: nvidia.com/h100}\nmig:\n  - {pattern: \"1g.*\", name: nvidia.com/mig-small}",
	},
	{Path: "resources.gpus", Usage: "Rules for GPUs by product name; they hold for MIG devices with mig-strategy single."},
	{Path: "resources.gpus[].pattern", Required: true, Usage: "Pattern of the product name."},
	{Path: "resources.gpus[].name", Required: true, Usage: "Name of the resource."},
	{Path: "resources.mig", Usage: "Rules for MIG devices by profile, with mig-strategy mixed."},
	{Path: "resources.mig[].pattern", Required: true, Usage: "Pattern of the profile, such as 1g.10gb."},
	{Path: "resources.mig[].name", Required: true, Usage: "Name of the resource."},
	{Path: "mps", Usage: "allow sharing.mps: run NVIDIA's MPS control daemon for each GPU that it shares (experimental)"},
	{Path: "sharing", Usage: "Devices that are given to several containers."},
	{
		Path: "sharing.time-slicing", Usage: "Sharing by turns. Nothing is isolated, and each container may use all of the memory.",
		Example: "rename-by-default: true\nresources:\n  - {name: nvidia.com/gpu, devices: [0, 1], replicas: 8}\n  - {name: nvidia.com/gpu, replicas: 4, rename: nvidia.com/gpu-quarter}",
	},
	{Path: "sharing.time-slicing.rename-by-default", Usage: "Whether shared resources have .shared behind their name unless a rule has a rename."},
	{Path: "sharing.time-slicing.fail-requests-greater-than-one", Usage: "Whether a container that asks for more than one device of a shared resource is refused; it would get no more compute for it."},
	{Path: "sharing.time-slicing.resources", Usage: "Rules; the first one that fits a device holds."},
	{Path: "sharing.time-slicing.resources[].name", Required: true, Usage: "Resource that the devices would have without the rule."},
	{Path: "sharing.time-slicing.resources[].devices", Usage: "Devices of the resource that are shared, chosen as in gpus, or MIG devices by UUID or index (0:1); none means all."},
	{Path: "sharing.time-slicing.resources[].replicas", Required: true, Least: 2, Usage: "How often each device is offered, 2 or more."},
	{Path: "sharing.time-slicing.resources[].rename", Usage: "Name of the resource that the replicas have."},
	{
		Path: "sharing.mps", Usage: "Sharing at the same time, by CUDA's multi-process service (MPS), with mps: true. Each container may use a replica's part of the memory and of the threads, and ask for one replica.",
		Example: "rename-by-default: true\nresources:\n  - {name: nvidia.com/gpu, devices: [2, 3], replicas: 4}",
	},
	{Path: "sharing.mps.rename-by-default", Usage: "Whether shared resources have .shared behind their name unless a rule has a rename."},
	{
		Path: "sharing.mps.shared-memory-mib", Least: 1, Most: resource.MaxSharedMemoryMiB,
		Usage: "MiB of /dev/shm for each replica; the containers of a GPU have the sum together, and can fill no more.",
	},
	{Path: "sharing.mps.resources", Usage: "Rules; the first one that fits a GPU holds."},
	{Path: "sharing.mps.resources[].name", Required: true, Usage: "Resource that the GPUs would have without the rule."},
	{Path: "sharing.mps.resources[].devices", Usage: "GPUs of the resource that are shared, chosen as in gpus; none means all. No rule of time-slicing may be for them."},
	{Path: "sharing.mps.resources[].replicas", Required: true, Least: 2, Usage: "How often each GPU is offered, from 2 to 48, or to 16 before compute capability 7.0."},
	{Path: "sharing.mps.resources[].rename", Usage: "Name of the resource that the replicas have."},
}
