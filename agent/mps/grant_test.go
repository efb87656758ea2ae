package mps

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

func TestAContainerThatSharesAGPUByMPSGetsItsDaemonsDirectories(t *testing.T) {
	want := specs.ContainerEdits{
		Mounts: []*specs.Mount{
			{ContainerPath: "/run/gpu/mps/pipe", HostPath: "/run/p/mps/GPU-1/pipe", Options: []string{"ro"}},
			{ContainerPath: "/dev/shm", HostPath: "/run/p/mps/GPU-1/shm"},
		},
		Env: []string{"CUDA_MPS_PIPE_DIRECTORY=/run/gpu/mps/pipe"},
	}
	if diff := cmp.Diff(want, Grant("/run/p/mps", "GPU-1")); diff != "" {
		t.Errorf("the grant (-want +got):\n%s", diff)
	}
}
