// Package config defines the configuration file of device-manager: the options of all verbs and those of `serve`, with
// defaults, validation and documentation.
package config

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"

	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/internal/wording"
)

// DefaultFile is the configuration file that is read by default.
const DefaultFile = "/etc/device-manager/config.yaml"

// Config is the whole configuration. Keys documents each key.
type Config struct {
	Common `yaml:",inline"`
	Serve  `yaml:",inline"`
}

// Common are the options of all verbs.
type Common struct {
	// Root is the directory with the host's /proc, /sys and /etc/cdi.
	Root string `yaml:"root" json:"root"`
	// CDIDir is the directory for CDI specs that programs write, besides /etc/cdi.
	CDIDir string `yaml:"cdi-dir" json:"cdi-dir"`
	// APISocket is the path of the API's socket.
	APISocket string `yaml:"api-socket" json:"api-socket"`
	// InsecurePaths allows directories and files that users other than root can change.
	InsecurePaths bool `yaml:"insecure-paths" json:"insecure-paths"`
	// LogLevel is the minimum level to log, and LogFormat the format.
	LogLevel  string `yaml:"log-level" json:"log-level"`
	LogFormat string `yaml:"log-format" json:"log-format"`
}

// LeaseSocket returns the path of the socket for leases, which is beside that of the API: api-leases.sock by default.
func (c *Common) LeaseSocket() string {
	return strings.TrimSuffix(c.APISocket, ".sock") + leaseSuffix
}

const leaseSuffix = "-leases.sock"

// Serve are the options of the device manager.
type Serve struct {
	// Plugin is the command line of a plugin to run as a child process; empty means none.
	Plugin string `yaml:"plugin" json:"plugin"`
	// SocketDir is the directory of the registration socket kubelet.sock and of the plugins' sockets.
	SocketDir string `yaml:"socket-dir" json:"socket-dir"`
	// PluginsRegistryDir is the directory in which plugins make sockets to be registered by the plugin watcher.
	PluginsRegistryDir string `yaml:"plugins-registry-dir" json:"plugins-registry-dir"`
	// StateDir is the directory of the placements.
	StateDir string `yaml:"state-dir" json:"state-dir"`
	// PodResourcesSocket is the path of the PodResources service's socket; empty disables the service.
	PodResourcesSocket string `yaml:"pod-resources-socket" json:"pod-resources-socket"`
	// APIGroup is the group that may use the API, by name or number; empty means only root.
	APIGroup string `yaml:"api-group" json:"api-group"`
	// LeaseGroup is the group that may lease devices, by name or number; empty means only root.
	LeaseGroup string `yaml:"lease-group" json:"lease-group"`
	// DeviceInfo is the directory of the files in which the plugin describes devices.
	DeviceInfo string `yaml:"device-info" json:"device-info"`
	// TopologyPolicy and TopologyScope configure the Topology Manager.
	TopologyPolicy string `yaml:"topology-policy" json:"topology-policy"`
	TopologyScope  string `yaml:"topology-scope" json:"topology-scope"`
	// Seed makes the choice of devices random; empty means the order of their IDs.
	Seed string `yaml:"seed" json:"seed"`
	// SystemReserved and KubeReserved are quantities of resources (cpu=500m) that pods cannot have. EvictionHard has
	// signals with thresholds (memory.available<100Mi).
	SystemReserved []string `yaml:"system-reserved" json:"system-reserved"`
	KubeReserved   []string `yaml:"kube-reserved" json:"kube-reserved"`
	EvictionHard   []string `yaml:"eviction-hard" json:"eviction-hard"`
	// MaxPods is the number of pods that can be placed. If PodsPerCore is not 0, it limits that number too.
	MaxPods     int `yaml:"max-pods" json:"max-pods"`
	PodsPerCore int `yaml:"pods-per-core" json:"pods-per-core"`
}

// Default returns the default configuration.
func Default() Config {
	return Config{
		Common: Common{
			Root:      "/",
			CDIDir:    "/var/run/cdi",
			APISocket: "/run/device-manager/api.sock",
			LogLevel:  "info",
			LogFormat: "text",
		},
		Serve: Serve{
			SocketDir:          "/var/lib/kubelet/device-plugins",
			PluginsRegistryDir: "/var/lib/kubelet/plugins_registry",
			StateDir:           "/var/lib/device-manager",
			PodResourcesSocket: "/var/lib/kubelet/pod-resources/kubelet.sock",
			DeviceInfo:         "/var/lib/gpu-cdi-plugin/devices",
			TopologyPolicy:     "none",
			TopologyScope:      "container",
			SystemReserved:     []string{},
			KubeReserved:       []string{},
			EvictionHard:       []string{"memory.available<100Mi", "nodefs.available<10%"},
			MaxPods:            110,
		},
	}
}

// Keys documents the configuration file, in the order of Config.
var Keys = &configfile.Keys{
	List: [][2]string{
		{"root", "`directory` with the host's /proc, /sys and /etc/cdi"},
		{"cdi-dir", "`directory` of CDI specs besides /etc/cdi, for admit -o oci"},
		{"api-socket", "`path` of the API's socket, on which admit, pods, node and release call serve; run and leases use " +
			"a socket beside it, api-leases.sock"},
		{"insecure-paths", "allow that other users can change the directories of api-socket and " +
			"pod-resources-socket, the program of plugin and the CDI specs, with a warning; for development"},
		{"log-level", "minimum log `level`: debug, info, warn, error"},
		{"log-format", "log `format`: text, json"},

		{"plugin", "`command` that starts a plugin, to run it as long as the manager; split like in a shell, but " +
			"nothing is expanded (default: none)"},
		{"socket-dir", "`directory` of the registration socket and of the sockets of plugins, which are " +
			"given it as the kubelet's directory"},
		{"plugins-registry-dir", "`directory` in which plugins that do not call the registration socket " +
			"make a socket to register"},
		{"state-dir", "`directory` for the placements of pods, which must survive a reboot"},
		{"pod-resources-socket", "`path` of the PodResources service's socket; empty for none"},
		{"api-group", "`group` that may use the API besides root, by name or number (default: none)"},
		{"lease-group", "`group` that may lease devices besides root, by name or number (default: none)"},
		{"device-info", "`directory` in which the plugin describes each device in a file ID.json, and " +
			"says in ID.use what uses it without a lease"},
		{"topology-policy", "`policy` for the alignment of devices to NUMA nodes: none, best-effort, " +
			"restricted, single-numa-node"},
		{"topology-scope", "`scope` of that alignment: container, pod"},
		{"seed", "`number` with which devices are chosen at random (default: the first in the order of " +
			"their IDs)"},
		{"system-reserved", "`list` of resources that pods cannot have, such as cpu=500m,memory=1Gi " +
			"(default: none)"},
		{"kube-reserved", "`list` of more resources that pods cannot have (default: none)"},
		{"eviction-hard", "`list` of thresholds that pods cannot have, such as " +
			"memory.available<100Mi,nodefs.available<10%"},
		{"max-pods", "`number` of pods that can be placed at a time"},
		{"pods-per-core", "`number` of pods for each CPU, at most max-pods in all (0: max-pods is the only limit)"},
	},
	Values: map[string][]string{
		"log-level":       {"debug", "info", "warn", "error"},
		"log-format":      {"text", "json"},
		"topology-policy": {"none", "best-effort", "restricted", "single-numa-node"},
		"topology-scope":  {"container", "pod"},
	},
	Gone: map[string]string{
		"dialect": "this key was removed: the device manager does not imitate the kubelet's faults; test a plugin " +
			"against a kubelet to see them",
		"cdi-kind":     ofPlugin,
		"dev-root":     ofPlugin,
		"driver-root":  ofPlugin,
		"hook-path":    ofPlugin,
		"nvml-library": ofPlugin,
	},
}

// ofPlugin is the text for options of GPUs, which the device manager had when it was a verb of gpu-cdi-plugin.
const ofPlugin = "this is an option of gpu-cdi-plugin only: the device manager does not read the driver"

// Validate returns all problems of the configuration that can be found without the host. Each message begins with the
// key. Quantities of resources are checked later, by the package nodestatus.
func (c *Config) Validate() error {
	return errors.Join(
		configfile.NotEmpty("root", c.Root),
		configfile.NotEmpty("cdi-dir", c.CDIDir),
		configfile.NotEmpty("api-socket", c.APISocket),
		checkSocket("api-socket", c.APISocket, leaseSuffix),
		checkOutside("api-socket", c.APISocket, c.SocketDir),
		checkValue("log-level", c.LogLevel),
		checkValue("log-format", c.LogFormat),
		checkCommand("plugin", c.Plugin),
		configfile.Absolute("socket-dir", c.SocketDir),
		checkSocket("socket-dir", c.SocketDir, "/kubelet.sock"),
		configfile.NotEmpty("plugins-registry-dir", c.PluginsRegistryDir),
		configfile.Absolute("state-dir", c.StateDir),
		configfile.Absolute("device-info", c.DeviceInfo),
		checkSocket("pod-resources-socket", c.PodResourcesSocket, ""),
		checkOutside("pod-resources-socket", c.PodResourcesSocket, c.SocketDir),
		checkValue("topology-policy", c.TopologyPolicy),
		checkValue("topology-scope", c.TopologyScope),
		checkSeed(c.Seed),
		checkNumber("max-pods", c.MaxPods, 1),
		checkNumber("pods-per-core", c.PodsPerCore, 0),
	)
}

// maxNumber is the largest number in the kubelet's configuration.
const maxNumber = math.MaxInt32

func checkNumber(key string, n, minimum int) error {
	if n < minimum || n > maxNumber {
		return fmt.Errorf("%s %d: want %d to %d", key, n, minimum, maxNumber)
	}
	return nil
}

func checkValue(key, value string) error { return configfile.OneOf(key, value, Keys.Values[key]) }

// checkSocket checks the length of a socket's path. If name is not empty, it follows the path.
func checkSocket(key, path, name string) error {
	if size, limit := len(path), unixsocket.MaxPath-len(name); size > limit {
		return fmt.Errorf("%s %q: it has %d bytes; at most %d are possible, since the path of a socket has at most %d",
			key, path, size, limit, unixsocket.MaxPath)
	}
	return nil
}

// checkOutside returns an error if a socket is in socket-dir: `serve` removes all sockets there when it starts.
func checkOutside(key, path, socketDir string) error {
	if path != "" && filepath.Dir(path) == filepath.Clean(socketDir) {
		return fmt.Errorf("%s %q: want another directory than socket-dir, whose sockets are removed", key, path)
	}
	return nil
}

func checkCommand(key, line string) error {
	if _, err := wording.Split(line); err != nil {
		return fmt.Errorf("%s %q: %w", key, line, err)
	}
	return nil
}

func checkSeed(seed string) error {
	if _, err := strconv.ParseUint(seed, 10, 64); seed != "" && err != nil {
		return fmt.Errorf("seed %q: want a whole number", seed)
	}
	return nil
}
