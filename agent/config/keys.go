package config

import (
	"strings"

	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/resource"
)

// Keys documents the configuration file.
var Keys = &configfile.Keys{List: keys, Values: values, Examples: examples, Gone: gone}

// keys are all keys in the order of Config.
var keys = [][2]string{
	{"root", "`directory` with the host's /proc, /sys and /etc/cdi, and by default the driver"},
	{"driver-root", "`directory` in which the driver is installed (default: root, or the one that nvml-library is in)"},
	{"dev-root", "`directory` whose dev/ has the device nodes (default: root, or driver-root if only that has them)"},
	{"driver-dirs", "`list` of further directories with the driver's files, below driver-root: libraries in lib64 or " +
		"lib, programs in bin or sbin, or all directly (default: the usual directories of distributions)"},
	{"nvml-library", "`path` of libnvidia-ml.so.1 (default: detected)"},
	{"cdi-dir", "`directory` that specs are written to"},
	{"cdi-kind", "`vendor/class` of the devices in specs"},
	{"hook-path", "host `path` of prestart-hook, written into specs (default: beside this program, or in " +
		"../libexec/gpu-cdi-plugin)"},
	{"no-hook", "make specs that need no hook, for Apptainer and engines without hooks; containers then lack what only " +
		"a hook can make, such as links in /dev/dri/by-path"},
	{"insecure-paths", "allow programs, libraries and directories that other users can change, with a warning; for " +
		"development"},
	{"log-level", "minimum log `level`: debug, info, warn, error"},
	{"log-format", "log `format`: text, json"},

	{"device-plugin-dir", "the kubelet's `directory` for the sockets of device plugins"},
	{"pod-resources-socket", "`path` of the kubelet's socket that lists the devices of pods (default: beside " +
		"device-plugin-dir, or in the root directory of the running kubelet)"},
	{"plugins-registry-dir", "the kubelet's `directory` for the sockets of plugins, used with registration watcher and " +
		"for DRA"},
	{"registration", "`method` of registration: kubelet (call the kubelet's socket), watcher (create a socket in " +
		"plugins-registry-dir)"},
	{"door", "how the kubelet gets the devices: plugin (the device plugin API), dra (dynamic resource allocation), both " +
		"(dra-gpus by DRA, all others by the device plugin API)"},
	{"dra-gpus", "`list` of GPUs that DRA offers with door both, selected as in gpus"},
	{"runtime-dir", "`directory` for the control socket and the files of MPS daemons, in /run; the path must be the " +
		"same on the host"},
	{"state-dir", "`directory` for the descriptors and the health of devices, which must survive a reboot; the path " +
		"must be the same on the host"},
	{"strategy", "`list` of ways to give containers their devices: cdi-cri, cdi-annotations, device-specs, envvar"},
	{"device-id-strategy", "`names` of devices in CDI names and variables: uuid, index (can change when a GPU is " +
		"added or removed)"},
	{"cdi-annotation-prefix", "`prefix` of annotations, used with strategy cdi-annotations"},
	{"gpu-timeout", "`duration` after which a GPU that does not answer is unhealthy, at least 1s"},
	{"health", "When a device is unhealthy, and when it is healthy again."},
	{"health.clean-for", "How long the probes of a device must pass before it is healthy again; at most 1h; twice as " +
		"long after each relapse within an hour."},
	{"health.xids", "Rules for XIDs of the driver. For events of its XID a rule overrides the driver's recovery " +
		"action and NVIDIA's catalogue, unless the next probe still reports the recovery action."},
	{"health.xids[].xid", "Code of the XID."},
	{"health.xids[].action", "What the XID means: none, application (the device stays healthy), probe (probes " +
		"decide), reset, reboot, service."},
	{"health.xids[].count", "Number of events that are needed, if more than one."},
	{"health.xids[].within", "Duration within which that many events must happen."},
	{"report-health", "`list` of ways to report the health of the devices to the API server: events, node-condition " +
		"(default: none)"},
	{"service-account-dir", "`directory` with the token and ca.crt of the service account that report-health and DRA use"},
	{"prestart", "How a device is prepared before a container starts with it. If that fails, the container does " +
		"not start, and the kubelet retries."},
	{"prestart.policy", "Policy: none, check (the device is healthy and nothing uses it), clean (also restores its " +
		"settings to their defaults), reset (also resets the GPU, if no other container has it)."},
	{"prestart.strict", "Whether policy reset refuses a device that it cannot reset, instead of only cleaning it."},
	{"prestart.programs", "Names of programs of the host that may use a device."},
	{"prestart.memory-tolerance-mib", "MiB that may be in use on a device without processes."},
	{"prestart.exec", "Program that runs last, with the device in its environment (GPU_DEVICE_UUID, GPU_UUID, " +
		"GPU_PCI_BUS_ID, GPU_POLICY, GPU_SHARED); its failure refuses the device."},
	{"prestart.exec-timeout", "How long that program may run, at most 1h."},
	{"prestart.resources", "Policies of resources that have their own."},
	{"prestart.resources[].name", "Name of the resource."},
	{"prestart.resources[].policy", "Policy of the resource."},
	{"fail-on-init-error", "exit with an error if there is no usable driver at the start; with false wait for " +
		"one, and offer no device until then"},
	{"take-over", "take the place of another serve, which hands over in milliseconds; both must have the same " +
		"runtime-dir"},
	{"leave", "offer no devices, and exit when those that were given are free: never (offer them), unused (exit when no " +
		"container and no ResourceClaim has a device), unprepared (when no ResourceClaim has one)"},
	{"listen", "`host:port` of the server for metrics and health (default: none)"},
	{"pod-metrics", "add the containers that hold devices to the metrics, with their pods and namespaces"},
	{"node-labels", "write the labels of gpu-feature-discovery for node feature discovery, which sets them on the node"},
	{"features-dir", "`directory` from which the worker of node feature discovery reads labels"},
	{"extras", "`list` of what containers get with a GPU if the host has it: gds, gdrcopy, mofed (InfiniBand), " +
		"nvswitch (default: none)"},
	{"imex", "IMEX channels, through which GPUs of several nodes share memory."},
	{"imex.channels", "Numbers of the channels that each container with a device gets, if the host has them."},
	{"imex.required", "Whether all devices are unhealthy while the host lacks one of the channels."},

	{"allocation", "Which of the available devices the kubelet should prefer."},
	{"allocation.policy", "Policy for GPUs: topology (best connected), partition (like NVIDIA's best-effort policy), " +
		"numa (fewest NUMA nodes, then topology)."},
	{"allocation.shared-policy", "Policy for replicas and MIG devices: spread (GPUs with the fewest in use), pack " +
		"(the fullest GPUs that have room; MIG devices count by their compute slices), or one of the others."},
	{"allocation.weights", "Scores for the connection of two GPUs: one for their nearest common point on PCIe, and " +
		"one for each NVLink."},
	{"allocation.weights.system", "SYS: across the link between sockets."},
	{"allocation.weights.node", "NODE: across host bridges of a NUMA node."},
	{"allocation.weights.host-bridge", "PHB: through one host bridge."},
	{"allocation.weights.multiple-switches", "PXB: through several PCIe switches."},
	{"allocation.weights.single-switch", "PIX: through one PCIe switch."},
	{"allocation.weights.same-board", "PSB: on one board."},
	{"allocation.weights.nvlink", "Each NVLink between the two."},
	{"allocation.weights.nvswitch", "Each NVLink through NVSwitches."},

	{"resource", "resource `name` of GPUs; resources of MIG devices have the same vendor"},
	{"mig-strategy", "`strategy` for GPUs in MIG mode: none, single (MIG devices as GPUs), mixed (a resource for " +
		"each profile)"},
	{"gpus", "The GPUs that are offered, with their MIG devices. A GPU is selected by its index, its UUID, or a " +
		"pattern of its product name."},
	{"gpus.include", "GPUs that are offered; an empty list means all."},
	{"gpus.exclude", "GPUs that are not offered even if they are included."},
	{"resources", "Names of resources. The first rule that matches a device names it; * in a pattern is any text, ? " +
		"any character."},
	{"resources.gpus", "Rules for GPUs by product name; they apply to MIG devices with mig-strategy single."},
	{"resources.gpus[].pattern", "Pattern of the product name."},
	{"resources.gpus[].name", "Name of the resource."},
	{"resources.mig", "Rules for MIG devices by profile, with mig-strategy mixed."},
	{"resources.mig[].pattern", "Pattern of the profile, such as 1g.10gb."},
	{"resources.mig[].name", "Name of the resource."},
	{"mps", "allow sharing.mps: GPUs whose MPS control daemon gpu-cdi-plugin mps runs (experimental)"},
	{"sharing", "Devices that several containers share."},
	{"sharing.time-slicing", "Sharing in turns, without isolation: each container may use all of the memory."},
	{"sharing.time-slicing.rename-by-default", "Whether the names of shared resources end in .shared unless a rule " +
		"has a rename."},
	{"sharing.time-slicing.fail-requests-greater-than-one", "Whether requests for more than one device of a shared " +
		"resource are refused: several replicas give no more compute than one."},
	{"sharing.time-slicing.resources", "Rules; the first one that matches a device applies."},
	{"sharing.time-slicing.resources[].name", "Resource that the devices would have without the rule."},
	{"sharing.time-slicing.resources[].devices", "Devices of the resource that are shared, selected as in gpus, or " +
		"MIG devices by UUID or index (0:1); an empty list means all."},
	{"sharing.time-slicing.resources[].replicas", "Number of replicas of each device, at least 2."},
	{"sharing.time-slicing.resources[].rename", "Name of the resource of the replicas."},
	{"sharing.mps", "Sharing at the same time, by CUDA's Multi-Process Service (MPS), with mps: true. Each container " +
		"gets one replica, with its part of the memory and of the threads."},
	{"sharing.mps.rename-by-default", "Whether the names of shared resources end in .shared unless a rule has a " +
		"rename."},
	{"sharing.mps.resources", "Rules; the first one that matches a GPU applies."},
	{"sharing.mps.resources[].name", "Resource that the GPUs would have without the rule."},
	{"sharing.mps.resources[].devices", "GPUs of the resource that are shared, selected as in gpus; an empty list " +
		"means all. A rule of time-slicing must not match them."},
	{"sharing.mps.resources[].replicas", "Number of replicas of each GPU, 2 to 48, or to 16 before compute " +
		"capability 7.0."},
	{"sharing.mps.resources[].rename", "Name of the resource of the replicas."},
}

// values are the accepted values of a key or, for a list, of its items. Other keys accept any value.
var values = map[string][]string{
	"log-level":                   {"debug", "info", "warn", "error"},
	"log-format":                  {"text", "json"},
	"registration":                configfile.Texts(RegisterKubelet, RegisterWatcher),
	"door":                        configfile.Texts(PluginDoor, DRADoor, BothDoors),
	"leave":                       configfile.Texts(LeaveNever, LeaveUnused, LeaveUnprepared),
	"strategy":                    resource.Strategies(),
	"device-id-strategy":          configfile.Texts(ByUUID, ByIndex),
	"extras":                      configfile.Texts(GDS, GDRCopy, MOFED, NVSwitch),
	"allocation.policy":           allocator.Policies(),
	"allocation.shared-policy":    allocator.Policies(),
	"mig-strategy":                resource.MIGStrategies(),
	"report-health":               configfile.Texts(ReportEvents, ReportCondition),
	"health.xids[].action":        health.Actions(),
	"prestart.policy":             configfile.Texts(prepare.Policies()...),
	"prestart.resources[].policy": configfile.Texts(prepare.Policies()...),
}

// examples are values in YAML for keys whose default does not show what a value looks like.
var examples = map[string]string{
	"imex":       "channels: [0]\nrequired: true",
	"prestart":   "policy: clean\nresources:\n  - {name: nvidia.com/gpu, policy: reset}",
	"health":     "xids:\n  - {xid: 48, action: reset}\n  - {xid: 74, action: reset, count: 3, within: 10m}",
	"allocation": "policy: numa\nshared-policy: pack\nweights: {system: 1, nvlink: 200}",
	"gpus": `include: [0, 1, GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c]
exclude: ["*T400*"]`,
	"resources": `gpus:
  - {pattern: "*H100*", name: nvidia.com/h100}
mig:
  - {pattern: "1g.*", name: nvidia.com/mig-small}`,
	"sharing.time-slicing": `rename-by-default: true
resources:
  - {name: nvidia.com/gpu, devices: [0, 1], replicas: 8}
  - {name: nvidia.com/gpu, replicas: 4, rename: nvidia.com/gpu-quarter}`,
	"sharing.mps": `rename-by-default: true
resources:
  - {name: nvidia.com/gpu, devices: [2, 3], replicas: 4}`,
}

// gone has the keys that earlier versions had, also as flags and environment variables, with what replaces them.
var gone = map[string]string{
	"socket-dir": ofManager("socket-dir"),
	"api-socket": ofManager("api-socket"),
	"api-group":  ofManager("api-group"),
	"dialect": "this key was removed: the device manager does not imitate the kubelet's faults; test a plugin " +
		"against a kubelet to see them",
	"sharing.mps.shared-memory-mib": "this key was removed: set the size of the tmpfs in gpu-cdi-mps@.service, or " +
		"mps.sharedMemory of the chart",
	"prestart.kill-orphans": "this key was removed: use prestart.exec with a program that ends such processes, and " +
		"policy none, since the other policies refuse a device in use before the program runs",
	"topology-policy": ofManager("topology-policy"),
	"topology-scope":  ofManager("topology-scope"),
	"seed":            ofManager("seed"),
	"system-reserved": ofManager("system-reserved"),
	"kube-reserved":   ofManager("kube-reserved"),
	"eviction-hard":   ofManager("eviction-hard"),
}

// ofManager says which option of device-manager replaces a key.
func ofManager(key string) string {
	return "this is an option of device-manager now: " + key + " in /etc/device-manager/config.yaml, --" + key +
		" or DEVICE_MANAGER_" + strings.ToUpper(strings.ReplaceAll(key, "-", "_"))
}
