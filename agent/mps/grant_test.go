package mps

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/resource"
)

func TestContainersThatShareAGPUByMPSGetItsDaemonsDirectories(t *testing.T) {
	descriptor := &specs.Mount{HostPath: "/state/GPU-1.json", ContainerPath: "/run/gpu/devices/GPU-1.json"}
	whole, shared := &resource.Grant{}, &resource.Grant{
		Always: specs.ContainerEdits{Mounts: []*specs.Mount{descriptor}},
	}
	resources := []resource.Resource{{Devices: []resource.Device{
		{UUID: "GPU-0", Grant: whole},
		{UUID: "GPU-1", Grant: shared, MPS: &resource.MPSLimits{}},
	}}}
	got := WithGrants(resources, "/run/p/mps")[0].Devices
	if got[0].Grant != whole {
		t.Errorf("a GPU that is not shared has the grant %+v", got[0].Grant)
	}
	want := specs.ContainerEdits{
		Mounts: []*specs.Mount{
			descriptor,
			{ContainerPath: "/run/gpu/mps/pipe", HostPath: "/run/p/mps/GPU-1/pipe", Options: []string{"ro"}},
			{ContainerPath: "/dev/shm", HostPath: "/run/p/mps/GPU-1/shm"},
		},
		Env: []string{"CUDA_MPS_PIPE_DIRECTORY=/run/gpu/mps/pipe"},
	}
	if diff := cmp.Diff(want, got[1].Grant.Always); diff != "" {
		t.Errorf("the grant (-want +got):\n%s", diff)
	}
	if !slices.Equal(shared.Always.Mounts, []*specs.Mount{descriptor}) {
		t.Error("the published grant was changed")
	}
}
