package plugin

import (
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/mps"
)

// Where a container that shares a GPU by MPS finds the GPU's control daemon. Shared memory is at /dev/shm, where CUDA
// looks for it.
const (
	MPSPipePath = "/run/gpu/mps/pipe"
	MPSLogPath  = "/run/gpu/mps/log"

	shmPath = "/dev/shm"
)

// addMPS adds what a client of the devices' MPS control daemon needs. There is one such device at most: that is the
// limit of resources that are shared by MPS. A client connects to a socket in the pipe directory, which it can where that is
// read-only, and makes nothing there.
func (a *Answers) addMPS(resp *v1beta1.ContainerAllocateResponse, devices []*device) {
	for _, d := range devices {
		if d.MPS == nil {
			continue
		}
		dirs := mps.DirsOf(a.MPSDir, d.UUID)
		resp.Mounts = append(resp.Mounts,
			&v1beta1.Mount{ContainerPath: MPSPipePath, HostPath: dirs.Pipe, ReadOnly: true},
			&v1beta1.Mount{ContainerPath: MPSLogPath, HostPath: dirs.Log, ReadOnly: true},
			&v1beta1.Mount{ContainerPath: shmPath, HostPath: dirs.Shm})
		setEnv(resp, "CUDA_MPS_PIPE_DIRECTORY", MPSPipePath)
		setEnv(resp, "CUDA_MPS_LOG_DIRECTORY", MPSLogPath)
	}
}
