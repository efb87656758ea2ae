package mps

import (
	"path/filepath"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

// pipePath is the directory in which a container finds the sockets of its GPU's control daemon.
const pipePath = "/run/gpu/mps/pipe"

// Grant returns what a container needs besides the GPU to use it through its control daemon. Dir has a directory for
// each GPU. A read-only mount is enough: a client only connects to a socket in the directory.
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
