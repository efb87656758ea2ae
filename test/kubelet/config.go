package kubelet

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Paths as the node's programs see them.
const (
	searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

	containerdSocket = "/run/containerd/containerd.sock"
	cniConfig        = "/var/lib/cni/net.d"
	staticPods       = "/var/lib/kubelet/manifests"
	// nodeName is the node's name. The kubelet appends it to the names of static pods.
	nodeName = "node"
	// nodeIP is the address of the node's network interface; see setup.
	nodeIP = "192.0.2.10"
	// readOnlyPort is the kubelet's port for the status of pods, on the node's own loopback interface.
	readOnlyPort = 10255
)

// containerdConfig returns containerd's configuration: its defaults, except where they need privileges or paths that
// the machine may lack.
func containerdConfig(runc string, cniPlugins []string) string {
	var dirs []string
	for _, d := range cniPlugins {
		dirs = append(dirs, fmt.Sprintf("%q", d))
	}
	return fmt.Sprintf(`version = 3
# This plugin makes a directory in /opt.
disabled_plugins = ["io.containerd.internal.v1.opt"]

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = %q

[plugins.'io.containerd.cri.v1.runtime']
# Lowering a process' oom_score_adj needs CAP_SYS_RESOURCE.
restrict_oom_score_adj = true

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = [%s]
conf_dir = %q

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
options.BinaryName = %q
`, pauseImage, strings.Join(dirs, ", "), cniConfig, runc)
}

// network configures the pods' network as on most nodes: a bridge, with host ports and bandwidth limits.
const network = `{
	"cniVersion": "1.0.0", "name": "pods", "plugins": [
		{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
			"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.7.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
		{"type": "portmap", "capabilities": {"portMappings": true}},
		{"type": "bandwidth", "capabilities": {"bandwidth": true}}
	]
}
`

// kubeletConfig returns a KubeletConfiguration as JSON, which is valid YAML. Without an API server the kubelet runs
// static pods, which are below the cgroup.
func kubeletConfig(cgroup string) ([]byte, error) {
	config := map[string]any{
		"apiVersion":                "kubelet.config.k8s.io/v1beta1",
		"kind":                      "KubeletConfiguration",
		"staticPodPath":             staticPods,
		"containerRuntimeEndpoint":  "unix://" + containerdSocket,
		"fileCheckFrequency":        "1s",
		"syncFrequency":             "1s",
		"nodeStatusUpdateFrequency": "1s",
		"volumePluginDir":           "/var/lib/kubelet/volume-plugins",
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false},
		},
		"authorization": map[string]any{"mode": "AlwaysAllow"},
		"address":       "127.0.0.1",
		"readOnlyPort":  readOnlyPort,
		// The node's namespaces have the kernel settings that the kubelet requires; see setup.
		"protectKernelDefaults":  true,
		"makeIPTablesUtilChains": false,
		// Pods must run on a small machine too, and with cgroup v1.
		"failCgroupV1":                  false,
		"failSwapOn":                    false,
		"cgroupDriver":                  "cgroupfs",
		"cgroupRoot":                    cgroup,
		"cgroupsPerQOS":                 true,
		"enforceNodeAllocatable":        []string{},
		"localStorageCapacityIsolation": false,
		"evictionHard":                  map[string]string{"memory.available": "1Mi"},
		"registerNode":                  false,
	}
	return json.MarshalIndent(config, "", "  ")
}
