package bench

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// TestPeer: NVIDIA's device plugin runs here, and what it is measured at is what ours is. It lists the same GPUs, on the
// same NUMA nodes, and gives the same ones.
func TestPeer(t *testing.T) {
	our, their := plugins(t, "dgx-h100")
	our.start()
	their.start()
	if diff := cmp.Diff(sorted(our.list), sorted(their.list), protocmp.Transform()); diff != "" {
		t.Errorf("the lists (-ours +theirs):\n%s", diff)
	}
	for _, n := range []int{1, 4, 8} {
		ids := our.ids()[:n]
		if diff := cmp.Diff(given(t, our, ids), given(t, their, ids)); diff != "" || len(given(t, our, ids)) != n {
			t.Errorf("of %d GPUs, the names (-ours +theirs):\n%s", n, diff)
		}
	}
}

func sorted(list []*v1beta1.Device) []*v1beta1.Device {
	return slices.SortedFunc(slices.Values(list), func(a, b *v1beta1.Device) int { return strings.Compare(a.GetID(), b.GetID()) })
}

// given are the names, without the kind, of the CDI devices that a container gets.
func given(t *testing.T, s *serving, ids []string) []string {
	t.Helper()
	answer, err := s.allocate(ids...)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, d := range answer.GetContainerResponses()[0].GetCdiDevices() {
		_, name, _ := strings.Cut(d.GetName(), "=")
		names = append(names, name)
	}
	return names
}
