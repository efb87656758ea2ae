package endpoint

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
)

func TestNormalise(t *testing.T) {
	device := plugintest.Device
	long := strings.Repeat("x", 64)
	empty := device("a", true)
	empty.Topology = &v1beta1.TopologyInfo{}
	tests := map[string]struct {
		list     []*v1beta1.Device
		want     []model.Device
		problems string
	}{
		"no devices": {want: []model.Device{}},
		"devices in any order": {
			list: []*v1beta1.Device{device("b", true), device("a", false)},
			want: []model.Device{{ID: "a"}, {ID: "b", Healthy: true}},
		},
		"NUMA nodes in any order, and some twice": {
			list: []*v1beta1.Device{device("a", true, 3, 1, 3)},
			want: []model.Device{{ID: "a", Healthy: true, NUMA: []int{1, 3}}},
		},
		"a topology without nodes": {
			list: []*v1beta1.Device{empty},
			want: []model.Device{{ID: "a", Healthy: true, NUMA: []int{}}},
		},
		"a negative NUMA node": {
			list: []*v1beta1.Device{device("a", true, -1, 2)},
			want: []model.Device{{ID: "a", Healthy: true, NUMA: []int{2}}},
		},
		"NUMA nodes that no Topology Manager has": {
			list:     []*v1beta1.Device{device("a", true, 1<<40, 63, 64), device("b", true, 100)},
			want:     []model.Device{{ID: "a", Healthy: true, NUMA: []int{63}}, {ID: "b", Healthy: true, NUMA: []int{}}},
			problems: `2 devices have NUMA nodes above 63, which are ignored, such as "a"`,
		},
		"a device twice, once unhealthy": {
			list:     []*v1beta1.Device{device("a", true, 1), device("b", true), device("a", false, 0)},
			want:     []model.Device{{ID: "a", NUMA: []int{0, 1}}, {ID: "b", Healthy: true}},
			problems: `1 device IDs are duplicates, such as "a"`,
		},
		"a device three times, always healthy": {
			list:     []*v1beta1.Device{device("a", true), device("a", true, 1), device("a", true)},
			want:     []model.Device{{ID: "a", Healthy: true, NUMA: []int{1}}},
			problems: `2 device IDs are duplicates, such as "a"`,
		},
		"unusual IDs": {
			list: []*v1beta1.Device{device(long, true), device("", true), device("a b", true)},
			want: []model.Device{{Healthy: true}, {ID: "a b", Healthy: true}, {ID: long, Healthy: true}},
			problems: "3 device IDs are empty, longer than 63 bytes or not printable, such as \"" +
				strings.Repeat("x", 64) + `"`,
		},
		"nothing in place of a device": {
			list:     []*v1beta1.Device{nil},
			want:     []model.Device{{}},
			problems: `1 device IDs are empty, longer than 63 bytes or not printable, such as ""`,
		},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			got, problems := normalise(test.list)
			if d := cmp.Diff(test.want, got); d != "" {
				t.Error(d)
			}
			if problems != test.problems {
				t.Errorf("problems: %s", problems)
			}
		})
	}
}

// A plugin can list one device a million times, each time near a NUMA node.
func TestNormaliseTakesTimeInProportion(t *testing.T) {
	list := make([]*v1beta1.Device, 300_000)
	want := make([]int, maxNode+1)
	for i := range list {
		list[i] = plugintest.Device("a", true, int64(i%len(want)))
		want[i%len(want)] = i % len(want)
	}
	done := make(chan []model.Device, 1)
	go func() {
		devices, _ := normalise(list)
		done <- devices
	}()
	select {
	case got := <-done:
		if len(got) != 1 || !slices.Equal(got[0].NUMA, want) {
			t.Errorf("got %d devices", len(got))
		}
	case <-time.After(20 * time.Second): // it takes 0.1 s, and minutes if each time costs a copy
		t.Fatal("the list takes too long")
	}
}

func TestSetLabel(t *testing.T) {
	dir := t.TempDir()
	if err := setLabel(dir); errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOTSUP) {
		t.Skipf("labels cannot be set here: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 100)
	n, err := unix.Lgetxattr(dir, "security.selinux", buffer)
	if err != nil || string(buffer[:n]) != "system_u:object_r:container_file_t:s0\x00" {
		t.Errorf("the label: %q, %v", buffer[:max(n, 0)], err)
	}
}

func BenchmarkNormalise(b *testing.B) {
	list := plugintest.Devices(10_000)
	for b.Loop() {
		normalise(list)
	}
}
