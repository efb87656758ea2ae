package config

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/resource"
)

// key documents a key of the file.
type key struct {
	// path is the full name: "sharing.time-slicing.resources[].replicas".
	path string
	// usage is the meaning. Back quotes mark the word for the value, as in the usage of flags.
	usage string
	// values are the accepted values; nil accepts any.
	values []string
	// example is a value in YAML, for keys whose default shows too little.
	example string
}

func keyOf(path string) key {
	i := slices.IndexFunc(keys, func(k key) bool { return k.path == path })
	if i < 0 {
		return key{}
	}
	return keys[i]
}

func texts[T ~string](list ...T) []string {
	var values []string
	for _, value := range list {
		values = append(values, string(value))
	}
	return values
}

// sentence returns the usage as a sentence, for the file and the schema.
func (k key) sentence() string {
	text := strings.ReplaceAll(k.usage, "`", "")
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + strings.TrimSuffix(text[1:], ".") + "."
}

// Document returns the configuration as a YAML file with a comment for each key.
func (c *Config) Document() ([]byte, error) {
	var doc yaml.Node
	if err := doc.Encode(c); err != nil {
		return nil, fmt.Errorf("write the configuration as YAML: %w", err)
	}
	addComments(&doc, "")
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(&doc); err != nil {
		return nil, fmt.Errorf("write the configuration as YAML: %w", err)
	}
	return b.Bytes(), nil
}

// addComments documents each key. The keys of list items are documented by examples.
func addComments(n *yaml.Node, prefix string) {
	if n.Kind != yaml.MappingNode {
		return
	}
	for i := 0; i < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		k := keyOf(prefix + name.Value)
		lines := []string{"# " + k.sentence()}
		if k.example != "" {
			lines = append(lines, "# For example:")
			for line := range strings.SplitSeq(k.example, "\n") {
				lines = append(lines, "#   "+line)
			}
		}
		name.HeadComment = strings.Join(lines, "\n")
		addComments(value, k.path+".")
	}
}

// keys are all keys in the order of Config.
var keys = []key{
	{path: "root", usage: "`directory` with the host's /proc, /sys and /etc/cdi, and by default the driver"},
	{
		path:  "driver-root",
		usage: "`directory` in which the driver is installed (default: root, or the one that nvml-library is in)",
	},
	{
		path:  "dev-root",
		usage: "`directory` whose dev/ has the device nodes (default: root, or driver-root if only that has them)",
	},
	{path: "nvml-library", usage: "`path` of libnvidia-ml.so.1 (default: detected)"},
	{path: "cdi-dir", usage: "`directory` that specs are written to"},
	{path: "cdi-kind", usage: "`vendor/class` of the devices in specs"},
	{path: "hook-path", usage: "host `path` of prestart-hook, written into specs (default: beside this program)"},
	{
		path:  "insecure-paths",
		usage: "allow programs, libraries and directories that other users can change, with a warning; for development",
	},
	{path: "log-level", usage: "minimum log `level`: debug, info, warn, error", values: []string{"debug", "info", "warn", "error"}},
	{path: "log-format", usage: "log `format`: text, json", values: []string{"text", "json"}},

	{path: "device-plugin-dir", usage: "the kubelet's `directory` for the sockets of device plugins"},
	{
		path:  "plugins-registry-dir",
		usage: "the kubelet's `directory` for the sockets of plugins, used with registration watcher",
	},
	{
		path: "registration", values: texts(RegisterKubelet, RegisterWatcher),
		usage: "`method` of registration: kubelet (call the kubelet's socket), watcher (create a socket in " +
			"plugins-registry-dir)",
	},
	{
		path:  "runtime-dir",
		usage: "`directory` for the files of MPS daemons, in /run; the path must be the same on the host",
	},
	{
		path: "state-dir",
		usage: "`directory` for the descriptors of devices, which must survive a reboot; the path must be the same " +
			"on the host",
	},
	{
		path: "strategy", values: Strategies(),
		usage: "`list` of ways to give containers their devices: cdi-cri, cdi-annotations, device-specs, envvar",
	},
	{
		path: "device-id-strategy", values: texts(ByUUID, ByIndex),
		usage: "`names` of devices in CDI names and variables: uuid, index (can change when a GPU is added or removed)",
	},
	{path: "cdi-annotation-prefix", usage: "`prefix` of annotations, used with strategy cdi-annotations"},
	{path: "gpu-timeout", usage: "`duration` after which a GPU that does not answer is unhealthy, at least 1s"},
	{
		path: "fail-on-init-error",
		usage: "exit with an error if there is no usable driver at the start; false waits for it and advertises no " +
			"device",
	},
	{path: "listen", usage: "`host:port` of the server for metrics and health (default: none)"},
	{
		path: "extras", values: texts(GDS, GDRCopy, MOFED, NVSwitch),
		usage: "`list` of what containers get with a GPU if the host has it: gds, gdrcopy, mofed (InfiniBand), " +
			"nvswitch (default: none)",
	},
	{
		path: "imex", usage: "IMEX channels, through which GPUs of several nodes share memory.",
		example: "channels: [0]\nrequired: true",
	},
	{
		path:  "imex.channels",
		usage: "Numbers of the channels that each container with a device gets, if the host has them.",
	},
	{path: "imex.required", usage: "Whether all devices are unhealthy while the host lacks one of the channels."},

	{
		path: "allocation", usage: "Which of the available devices the kubelet should prefer.",
		example: "policy: numa\nshared-policy: pack\nweights: {system: 1, nvlink: 200}",
	},
	{
		path: "allocation.policy", values: allocator.Policies(),
		usage: "Policy for GPUs: topology (best connected), partition (as NVIDIA's best effort), numa (fewest NUMA " +
			"nodes, then topology).",
	},
	{
		path: "allocation.shared-policy", values: allocator.Policies(),
		usage: "Policy for replicas and MIG devices: spread (GPUs with the fewest in use), pack (the fullest GPUs " +
			"that have room; MIG devices count by their compute slices), or one of the others.",
	},
	{
		path: "allocation.weights",
		usage: "Scores for the connection of two GPUs: one for their nearest common point on PCIe, and one for each " +
			"NVLink.",
	},
	{path: "allocation.weights.system", usage: "SYS: across the link between sockets."},
	{path: "allocation.weights.node", usage: "NODE: across host bridges of a NUMA node."},
	{path: "allocation.weights.host-bridge", usage: "PHB: through one host bridge."},
	{path: "allocation.weights.multiple-switches", usage: "PXB: through several PCIe switches."},
	{path: "allocation.weights.single-switch", usage: "PIX: through one PCIe switch."},
	{path: "allocation.weights.same-board", usage: "PSB: on one board."},
	{path: "allocation.weights.nvlink", usage: "Each NVLink between the two."},
	{path: "allocation.weights.nvswitch", usage: "Each NVLink through NVSwitches."},

	{path: "resource", usage: "resource `name` of GPUs; resources of MIG devices have the same vendor"},
	{
		path: "mig-strategy", values: resource.MIGStrategies(),
		usage: "`strategy` for GPUs in MIG mode: none, single (MIG devices as GPUs), mixed (a resource for each " +
			"profile)",
	},
	{
		path: "gpus",
		usage: "The GPUs that are offered, with their MIG devices. A GPU is selected by its index, its UUID, or a " +
			"pattern of its product name.",
		example: "include: [0, 1, GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c]\nexclude: [\"*T400*\"]",
	},
	{path: "gpus.include", usage: "GPUs that are offered; an empty list means all."},
	{path: "gpus.exclude", usage: "GPUs that are not offered even if they are included."},
	{
		path: "resources",
		usage: "Names of resources. The first rule that matches a device names it; * in a pattern is any text, ? " +
			"any character.",
		example: "gpus:\n  - {pattern: \"*H100*\", name: nvidia.com/h100}\nmig:\n" +
			"  - {pattern: \"1g.*\", name: nvidia.com/mig-small}",
	},
	{
		path:  "resources.gpus",
		usage: "Rules for GPUs by product name; they apply to MIG devices with mig-strategy single.",
	},
	{path: "resources.gpus[].pattern", usage: "Pattern of the product name."},
	{path: "resources.gpus[].name", usage: "Name of the resource."},
	{path: "resources.mig", usage: "Rules for MIG devices by profile, with mig-strategy mixed."},
	{path: "resources.mig[].pattern", usage: "Pattern of the profile, such as 1g.10gb."},
	{path: "resources.mig[].name", usage: "Name of the resource."},
	{
		path:  "mps",
		usage: "allow sharing.mps: run NVIDIA's MPS control daemon for each GPU that it shares (experimental)",
	},
	{path: "sharing", usage: "Devices that several containers share."},
	{
		path:  "sharing.time-slicing",
		usage: "Sharing in turns, without isolation: each container may use all of the memory.",
		example: "rename-by-default: true\nresources:\n  - {name: nvidia.com/gpu, devices: [0, 1], replicas: 8}\n" +
			"  - {name: nvidia.com/gpu, replicas: 4, rename: nvidia.com/gpu-quarter}",
	},
	{
		path:  "sharing.time-slicing.rename-by-default",
		usage: "Whether the names of shared resources end in .shared unless a rule has a rename.",
	},
	{
		path: "sharing.time-slicing.fail-requests-greater-than-one",
		usage: "Whether requests for more than one device of a shared resource are refused; more would give no more " +
			"compute.",
	},
	{path: "sharing.time-slicing.resources", usage: "Rules; the first one that matches a device applies."},
	{path: "sharing.time-slicing.resources[].name", usage: "Resource that the devices would have without the rule."},
	{
		path: "sharing.time-slicing.resources[].devices",
		usage: "Devices of the resource that are shared, selected as in gpus, or MIG devices by UUID or index (0:1); " +
			"an empty list means all.",
	},
	{path: "sharing.time-slicing.resources[].replicas", usage: "Number of replicas of each device, at least 2."},
	{path: "sharing.time-slicing.resources[].rename", usage: "Name of the resource of the replicas."},
	{
		path: "sharing.mps",
		usage: "Sharing at the same time, by CUDA's Multi-Process Service (MPS), with mps: true. Each container " +
			"gets one replica, with its part of the memory and of the threads.",
		example: "rename-by-default: true\nresources:\n  - {name: nvidia.com/gpu, devices: [2, 3], replicas: 4}",
	},
	{
		path:  "sharing.mps.rename-by-default",
		usage: "Whether the names of shared resources end in .shared unless a rule has a rename.",
	},
	{
		path:  "sharing.mps.shared-memory-mib",
		usage: "MiB of /dev/shm for each replica; the containers of a GPU share the sum.",
	},
	{path: "sharing.mps.resources", usage: "Rules; the first one that matches a GPU applies."},
	{path: "sharing.mps.resources[].name", usage: "Resource that the GPUs would have without the rule."},
	{
		path: "sharing.mps.resources[].devices",
		usage: "GPUs of the resource that are shared, selected as in gpus; an empty list means all. A rule of " +
			"time-slicing must not match them.",
	},
	{
		path:  "sharing.mps.resources[].replicas",
		usage: "Number of replicas of each GPU, 2 to 48, or to 16 before compute capability 7.0.",
	},
	{path: "sharing.mps.resources[].rename", usage: "Name of the resource of the replicas."},
}
