package demo

import (
	"encoding/json"
	"fmt"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"

	"gpu-cdi-plugin/internal/atomicfile"
)

// searchPath has the directories that drivers put nvidia-smi into.
const searchPath = "PATH=/usr/local/nvidia/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// WriteBundle writes dir's config.json for a container that runs args in dir/rootfs, without a network, a terminal
// or a device of the host.
func WriteBundle(dir string, args []string) error {
	data, err := json.MarshalIndent(config(args), "", "  ")
	if err != nil {
		return fmt.Errorf("describe a container: %w", err)
	}
	return atomicfile.Write(filepath.Join(dir, "config.json"), data, 0o644)
}

func config(args []string) *specs.Spec {
	return &specs.Spec{
		Version:  "1.0.2",
		Hostname: "demo",
		Root:     &specs.Root{Path: "rootfs"},
		Process: &specs.Process{
			Args:            args,
			Env:             []string{searchPath},
			Cwd:             "/",
			NoNewPrivileges: true,
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		},
		Linux: &specs.Linux{
			Resources: &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace},
				{Type: specs.MountNamespace},
				{Type: specs.NetworkNamespace},
			},
		},
	}
}
