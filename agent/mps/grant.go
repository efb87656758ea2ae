package mps

import (
	"path/filepath"
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/resource"
)

// pipePath is where a container finds the sockets of its GPU's control daemon.
const pipePath = "/run/gpu/mps/pipe"

// Grant returns what a container needs besides a GPU to use it through the GPU's control daemon. Dir has a directory for
// each GPU. A client connects to a socket in the pipe directory, which works in a read-only mount too.
func Grant(dir, uuid string) specs.ContainerEdits {
	gpuDir := filepath.Join(dir, uuid)
	return specs.ContainerEdits{
		Env: []string{"CUDA_MPS_PIPE_DIRECTORY=" + pipePath},
		Mounts: []*specs.Mount{
			{ContainerPath: pipePath, HostPath: filepath.Join(gpuDir, pipeName), Options: []string{"ro"}},
			{ContainerPath: devShm, HostPath: filepath.Join(gpuDir, shmName)},
		},
	}
}

// WithGrants returns the resources with the grants of the devices that are shared by MPS completed.
func WithGrants(resources []resource.Resource, dir string) []resource.Resource {
	list := slices.Clone(resources)
	for i := range list {
		list[i].Devices = slices.Clone(list[i].Devices)
		for j := range list[i].Devices {
			d := &list[i].Devices[j]
			if d.MPS == nil || d.Grant == nil {
				continue
			}
			g, add := *d.Grant, Grant(dir, d.UUID)
			g.Always.Mounts = slices.Concat(g.Always.Mounts, add.Mounts)
			g.Always.Env = slices.Concat(g.Always.Env, add.Env)
			d.Grant = &g
		}
	}
	return list
}
