package plugin

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestPreferredAllocation(t *testing.T) {
	oneLost := gpusOf(4)
	oneLost.Devices[0].Healthy, oneLost.Devices[0].Reason = false, "fell off the bus"
	all := func(r resource.Resource) []string {
		var ids []string
		for _, d := range r.Devices {
			ids = append([]string{d.ID}, ids...)
		}
		return ids
	}
	shared, mig := replicasOf(3, 4), migOf(2)
	m := func(g, i int) string { return mig.Devices[2*g+i].ID }
	quad := machineOf(t, "pcie-quad")
	cases := map[string]struct {
		r               resource.Resource
		gpus            *allocator.GPUs
		policy          Preference
		available, must []string
		size            int
		want            []string
		code            codes.Code
		text            string
	}{
		"the first advertised devices": {
			r: gpusOf(8), available: all(gpusOf(8)), size: 2, want: []string{uuid(0), uuid(1)},
		},
		"a device that must be included, and another": {
			r: gpusOf(8), available: all(gpusOf(8)), must: []string{uuid(5)}, size: 2, want: []string{uuid(0), uuid(5)},
		},
		"the best connected of the available": {
			r: quad.resource, gpus: quad.gpus, available: quad.ids(1, 2, 3), size: 2,
			want: quad.ids(2, 3),
		},
		"replicas are spread over GPUs": {
			r: shared, available: all(shared), size: 4,
			want: []string{uuid(0) + "::0", uuid(0) + "::1", uuid(1) + "::0", uuid(2) + "::0"},
		},
		"replicas are spread away from one that must be included": {
			r: shared, available: all(shared), must: []string{uuid(0) + "::3"}, size: 2,
			want: []string{uuid(0) + "::3", uuid(1) + "::0"},
		},
		"a replica comes from the GPU with the most available": {
			r: shared, available: without(all(shared), uuid(0)+"::0", uuid(1)+"::0"), size: 1,
			want: []string{uuid(2) + "::0"},
		},
		"a packed replica comes from the GPU with the fewest available": {
			r: shared, policy: Preference{SharedPolicy: allocator.Pack},
			available: without(all(shared), uuid(1)+"::0"), size: 1, want: []string{uuid(1) + "::1"},
		},
		"MIG devices are spread over GPUs": {
			r: mig, available: all(mig), size: 3, want: []string{m(0, 0), m(0, 1), m(1, 0)},
		},
		"MIG devices are packed": {
			r: mig, policy: Preference{SharedPolicy: allocator.Pack}, available: without(all(mig), m(0, 1)), size: 1,
			want: []string{m(0, 0)},
		},
		"all devices": {
			r: gpusOf(2), available: all(gpusOf(2)), size: 2, want: []string{uuid(0), uuid(1)},
		},
		"no device": {r: gpusOf(2), available: all(gpusOf(2)), want: []string{}},
		"an unhealthy GPU is not chosen": {
			r: oneLost, available: []string{uuid(0), uuid(2), uuid(3)}, size: 2, want: []string{uuid(2), uuid(3)},
		},
		"too few healthy GPUs": {
			r: oneLost, available: []string{uuid(0), uuid(3)}, size: 2,
			code: codes.FailedPrecondition, text: uuid(0) + `" (fell off the bus)`,
		},
		"an unhealthy GPU must be included": {
			r: oneLost, available: all(oneLost), must: []string{uuid(0)}, size: 2,
			code: codes.FailedPrecondition, text: uuid(0) + `" (fell off the bus)`,
		},
		"an unknown device": {
			r: gpusOf(2), available: []string{uuid(0), "?"}, size: 1, code: codes.NotFound, text: `no such device: "?"`,
		},
		"an unknown device must be included": {
			r: gpusOf(2), available: []string{uuid(0)}, must: []string{"?"}, size: 1,
			code: codes.NotFound, text: `no such device: "?"`,
		},
		"a device is available twice": {
			r: gpusOf(2), available: []string{uuid(1), uuid(1)}, size: 1,
			code: codes.InvalidArgument, text: `listed twice: "` + uuid(1),
		},
		"more than are available": {
			r: gpusOf(2), available: all(gpusOf(2)), size: 3,
			code: codes.InvalidArgument, text: "3 devices requested, but 2 are available",
		},
		"more must be included than requested": {
			r: gpusOf(2), available: all(gpusOf(2)), must: all(gpusOf(2)), size: 1,
			code: codes.InvalidArgument, text: "2 must be included",
		},
		"an unavailable device must be included": {
			r: gpusOf(2), available: []string{uuid(0)}, must: []string{uuid(1)}, size: 1,
			code: codes.InvalidArgument, text: `not available: "` + uuid(1),
		},
		"a negative size": {
			r: gpusOf(2), available: all(gpusOf(2)), size: -1, code: codes.InvalidArgument, text: "-1 devices",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			a := by(resource.CDICRI)
			a.Preference = c.policy
			s := serverOf(t, c.r, a)
			testenv.Must(t, s.update(c.r, c.gpus))
			resp, err := s.GetPreferredAllocation(t.Context(), prefer(c.available, c.must, c.size))
			if c.text != "" {
				if status.Code(err) != c.code || !strings.Contains(err.Error(), c.text) || resp != nil {
					t.Errorf("%v and %v, want %s: %q", resp, err, c.code, c.text)
				}
				return
			}
			testenv.Must(t, err)
			if diff := cmp.Diff(c.want, resp.ContainerResponses[0].DeviceIDs, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("the choice (-want +got):\n%s", diff)
			}
		})
	}
}

// machineGPUs has the GPUs of a simulated machine and their links.
type machineGPUs struct {
	resource resource.Resource
	gpus     *allocator.GPUs
}

func machineOf(t testing.TB, name string) machineGPUs {
	t.Helper()
	snapshot, r, err := benchMachine(name)
	testenv.Must(t, err)
	n, err := allocator.NewGPUs(snapshot, allocator.DefaultWeights())
	testenv.Must(t, err)
	return machineGPUs{r, n}
}

func (m *machineGPUs) ids(indices ...int) []string {
	var ids []string
	for _, i := range indices {
		ids = append(ids, m.resource.Devices[i].ID)
	}
	return ids
}

func without(ids []string, others ...string) []string {
	return slices.DeleteFunc(ids, func(id string) bool { return slices.Contains(others, id) })
}

func prefer(available, must []string, size int) *v1beta1.PreferredAllocationRequest {
	return &v1beta1.PreferredAllocationRequest{ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: available, MustIncludeDeviceIDs: must, AllocationSize: int32(size)},
	}}
}
