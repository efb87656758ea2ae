package mps

import (
	"path/filepath"
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/resource"
)

// Where a container that shares a GPU by MPS finds the GPU's control daemon. CUDA looks for the shared memory at
// /dev/shm.
const (
	pipePath = "/run/gpu/mps/pipe"
	logPath  = "/run/gpu/mps/log"
	shmPath  = "/dev/shm"
)

// WithGrants returns the resources with what a client of an MPS control daemon needs in the grants of the devices that
// are shared by MPS. A client connects to a socket in the pipe directory, which works in a read-only mount too.
func WithGrants(resources []resource.Resource, dir string) []resource.Resource {
	list := slices.Clone(resources)
	for i := range list {
		list[i].Devices = slices.Clone(list[i].Devices)
		for j := range list[i].Devices {
			d := &list[i].Devices[j]
			if d.MPS == nil || d.Grant == nil {
				continue
			}
			gpuDir, g := filepath.Join(dir, d.UUID), *d.Grant
			g.Always.Mounts = append(slices.Clone(g.Always.Mounts),
				&specs.Mount{ContainerPath: pipePath, HostPath: filepath.Join(gpuDir, pipeName), Options: []string{"ro"}},
				&specs.Mount{ContainerPath: logPath, HostPath: filepath.Join(gpuDir, logName), Options: []string{"ro"}},
				&specs.Mount{ContainerPath: shmPath, HostPath: filepath.Join(gpuDir, shmName)})
			g.Always.Env = append(slices.Clone(g.Always.Env),
				"CUDA_MPS_PIPE_DIRECTORY="+pipePath, "CUDA_MPS_LOG_DIRECTORY="+logPath)
			d.Grant = &g
		}
	}
	return list
}
