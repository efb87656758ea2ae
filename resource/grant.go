package resource

import specs "tags.cncf.io/container-device-interface/specs-go"

// Grant is what a container gets. It is not changed after it was published.
type Grant struct {
	// CDIDevices are qualified CDI names, such as "nvidia.com/gpu=GPU-...".
	CDIDevices []string
	// Edits are the device nodes, mounts and variables that the CDI devices stand for, for runtimes that do not know
	// CDI.
	Edits specs.ContainerEdits
	// Additional are the mounts and variables that a container gets besides its CDI devices, whatever its runtime
	// knows.
	Additional specs.ContainerEdits
}
