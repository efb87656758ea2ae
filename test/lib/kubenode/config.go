package kubenode

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
)

// Paths as the node's programs see them.
const (
	searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

	containerdFile   = "/var/lib/containerd.toml"
	containerdSocket = "/run/containerd/containerd.sock"
	cniConfig        = "/var/lib/cni/net.d"
	kubeletFile      = "/var/lib/kubelet.yaml"
	// StaticPods is the directory of the manifests of static pods.
	StaticPods = "/var/lib/kubelet/manifests"
	// Loopback is the address of the loopback interface.
	Loopback = "127.0.0.1"
	// readOnlyPort is the kubelet's port for the status of pods.
	readOnlyPort = 10255
)

// environment is that of all programs in namespaces.
var environment = []string{"PATH=" + searchPath, "HOME=/root", "TMPDIR=/tmp"}

// containerdConfig returns containerd's configuration: its defaults, except where they need privileges or paths that
// the machine may lack.
func containerdConfig(p Programs) string {
	var dirs []string
	for _, d := range p.CNI {
		dirs = append(dirs, fmt.Sprintf("%q", d))
	}
	shim := filepath.Join(filepath.Dir(p.Containerd), "containerd-shim-runc-v2")
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
runtime_path = %q
options.BinaryName = %q
`, PauseImage, strings.Join(dirs, ", "), cniConfig, shim, p.Runc)
}

// network configures the pods' network as on most nodes: a bridge, with host ports and bandwidth limits.
const network = `{
	"cniVersion": "1.0.0", "name": "pods", "plugins": [
		{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
			"ipam": {"type": "host-local", "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}]}},
		{"type": "portmap", "capabilities": {"portMappings": true}},
		{"type": "bandwidth", "capabilities": {"bandwidth": true}}
	]
}
`

// kubeletConfig returns a KubeletConfiguration as JSON, which is valid YAML. The kubelet runs
// static pods without an API server, unless the settings say otherwise. Pods are below the cgroup.
func kubeletConfig(cgroup string, settings map[string]any) ([]byte, error) {
	config := map[string]any{
		"apiVersion":                "kubelet.config.k8s.io/v1beta1",
		"kind":                      "KubeletConfiguration",
		"staticPodPath":             StaticPods,
		"containerRuntimeEndpoint":  "unix://" + containerdSocket,
		"fileCheckFrequency":        "1s",
		"syncFrequency":             "1s",
		"nodeStatusUpdateFrequency": "1s",
		"volumePluginDir":           "/var/lib/kubelet/volume-plugins",
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false},
		},
		"authorization": map[string]any{"mode": "AlwaysAllow"},
		"address":       Loopback,
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
	maps.Copy(config, settings)
	return json.MarshalIndent(config, "", "  ")
}
