package resource

import specs "tags.cncf.io/container-device-interface/specs-go"

// Grant is what a container gets. It is not changed after it was published.
type Grant struct {
	// CDIDevices are qualified CDI names, such as "nvidia.com/gpu=GPU-...".
	CDIDevices []string
	// WithoutCDI are the device nodes, mounts and variables of the CDI devices, for runtimes without CDI.
	WithoutCDI specs.ContainerEdits
	// Always are the mounts and variables that a container gets besides, whatever its runtime.
	Always specs.ContainerEdits
}
