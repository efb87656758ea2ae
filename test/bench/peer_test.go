package bench

import (
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// TestPeerDoesTheSameWork checks that NVIDIA's device plugin and this one are comparable: they advertise the same GPUs
// on the same NUMA nodes, and Allocate gives the same CDI devices.
func TestPeerDoesTheSameWork(t *testing.T) {
	all := newPlugins(t, simtest.Node(t, "dgx-h100"))
	ours, theirs := all[0], all[len(all)-1]
	ours.start()
	theirs.start()
	if diff := cmp.Diff(sorted(ours.devices), sorted(theirs.devices), protocmp.Transform()); diff != "" {
		t.Errorf("advertised devices (-ours +theirs):\n%s", diff)
	}
	for _, n := range []int{1, 4, 8} {
		ids := ours.ids()[:n]
		got := allocated(t, ours, ids)
		if diff := cmp.Diff(got, allocated(t, theirs, ids)); diff != "" || len(got) != n {
			t.Errorf("CDI devices for %d GPUs (-ours +theirs):\n%s", n, diff)
		}
	}
}

func sorted(list []*v1beta1.Device) []*v1beta1.Device {
	return slices.SortedFunc(slices.Values(list),
		func(a, b *v1beta1.Device) int { return strings.Compare(a.GetID(), b.GetID()) })
}

// allocated are the names, without the kind, of the CDI devices in the response to Allocate.
func allocated(t *testing.T, p *plugin, ids []string) []string {
	t.Helper()
	response, err := p.allocate(ids...)
	testenv.Must(t, err)
	var names []string
	for _, d := range response.GetContainerResponses()[0].GetCdiDevices() {
		_, name, _ := strings.Cut(d.GetName(), "=")
		names = append(names, name)
	}
	return names
}
