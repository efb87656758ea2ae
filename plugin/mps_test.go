package plugin

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/resource"
)

// byMPS are two GPUs, each twice by MPS.
func byMPS() resource.Resource {
	r := replicasOf(2, 2)
	r.Limit, r.LimitReason = 1, "a process can use one MPS control daemon only"
	for i := range r.Devices {
		r.Devices[i].MPS = &resource.MPSLimits{MemoryBytes: 40 << 30, ThreadPercent: 50}
	}
	return r
}

func TestAContainerGetsTheDirectoriesOfItsMPSDaemon(t *testing.T) {
	for _, strategies := range [][]Strategy{{CDICRI}, {CDIAnnotations}, {DeviceSpecs}, {Envvar}, Strategies()} {
		a := answers(strategies...)
		a.MPSDir, a.Spec = "/run/p/mps", testSpec
		resp, err := allocated(serverOf(t, byMPS(), a), allocate(uuid(1)+"::1"))
		must(t, err)
		answer := resp.ContainerResponses[0]
		dir := "/run/p/mps/" + uuid(1)
		want := []*v1beta1.Mount{
			{ContainerPath: "/run/gpu/mps/pipe", HostPath: dir + "/pipe", ReadOnly: true},
			{ContainerPath: "/run/gpu/mps/log", HostPath: dir + "/log", ReadOnly: true},
			{ContainerPath: "/dev/shm", HostPath: dir + "/shm"},
		}
		got := answer.Mounts[max(0, len(answer.Mounts)-len(want)):]
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%v: the mounts (-want +got):\n%s", strategies, diff)
		}
		for name, value := range map[string]string{"PIPE": "/run/gpu/mps/pipe", "LOG": "/run/gpu/mps/log"} {
			if got := answer.Envs["CUDA_MPS_"+name+"_DIRECTORY"]; got != value {
				t.Errorf("%v: %s is %q", strategies, name, got)
			}
		}
	}
}

func TestOthersGetNothingOfMPS(t *testing.T) {
	resp, err := allocated(serverOf(t, replicasOf(2, 2), answers(CDICRI)), allocate(uuid(1)+"::1"))
	must(t, err)
	if answer := resp.ContainerResponses[0]; len(answer.Mounts)+len(answer.Envs) > 0 {
		t.Errorf("got %v", answer)
	}
}

func TestAContainerHasOnePartByMPS(t *testing.T) {
	_, err := serverOf(t, byMPS(), answers(CDICRI)).Allocate(t.Context(), allocate(uuid(0)+"::0", uuid(1)+"::0"))
	const want = "allocate nvidia.com/gpu.shared: a container asks for 2 devices, and may have 1; a process can use one MPS control daemon only"
	if status.Code(err) != codes.InvalidArgument || status.Convert(err).Message() != want {
		t.Errorf("error %v", err)
	}
}

func TestAContainerCanReadItsLimits(t *testing.T) {
	r := byMPS()
	r.Devices[0].MPS = &resource.MPSLimits{MemoryBytes: 40 << 30}
	a := answers(CDICRI)
	a.AllocationDir = filepath.Join(t.TempDir(), "allocations")
	s := serverOf(t, r, a)
	for id, want := range map[string]AllocatedMPS{
		uuid(1) + "::1": {MemoryLimitBytes: 40 << 30, ActiveThreadPercentage: 50},
		uuid(0) + "::0": {MemoryLimitBytes: 40 << 30},
	} {
		resp, err := allocated(s, allocate(id))
		must(t, err)
		for _, m := range resp.ContainerResponses[0].Mounts {
			if !strings.HasSuffix(m.ContainerPath, ".json") {
				continue
			}
			text, err := os.ReadFile(m.HostPath)
			must(t, err)
			var got Allocation
			must(t, json.Unmarshal(text, &got))
			if diff := cmp.Diff(&want, got.Devices[0].MPS); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		}
	}
}
