package resource

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/gpu"
)

// realSize returns the size of the message with the devices, all unhealthy.
func realSize(r Resource) int {
	list := &api.ListAndWatchResponse{}
	for _, d := range r.Devices {
		device := &api.Device{ID: d.ID, Health: api.Unhealthy}
		if d.NUMANode != gpu.NoNUMANode {
			device.Topology = &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: int64(d.NUMANode)}}}
		}
		list.Devices = append(list.Devices, device)
	}
	return proto.Size(list)
}

func TestListSizeIsAtLeastTheSizeOfTheMessage(t *testing.T) {
	uuid := "GPU-" + strings.Repeat("0", maxID-len("GPU-::1000"))
	for name, tt := range map[string]struct{ numa, replicas int }{
		"a whole GPU without a NUMA node": {gpu.NoNUMANode, 0},
		"on node 0":                       {0, 0},
		"on node 20000":                   {20000, 0},
		"on the last node":                {math.MaxInt32, 0},
		"ten replicas":                    {1, 10},
		"a thousand":                      {math.MaxInt32, 1000},
	} {
		t.Run(name, func(t *testing.T) {
			p := plan{replicas: tt.replicas, device: Device{ID: uuid, UUID: uuid, NUMANode: tt.numa}}
			size := realSize(expand("nvidia.com/gpu", []plan{p}))
			if got := p.listSize(); got < size || got > size*5/4 {
				t.Errorf("%d bytes, and the message has %d", got, size)
			}
		})
	}
}

// The kubelet would close the connection, and have no device of the node.
func TestAListThatIsTooLargeIsRefused(t *testing.T) {
	s := loadSnapshot(t, "hgx-16")
	share := func(n int) Config {
		return changed(timeSlice(SharingRule{Name: "nvidia.com/gpu", Replicas: n}))
	}
	_, _, err := Build(s, share(10_000))
	tooMany, ok := errors.AsType[*TooManyDevicesError](err)
	if !ok {
		t.Fatalf("got %v", err)
	}
	if want := "resource nvidia.com/gpu: a list of 160000 devices takes "; !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	if tooMany.Rules != "sharing.time-slicing.resources" || tooMany.Shared != 16 {
		t.Errorf("%d devices are shared by %s", tooMany.Shared, tooMany.Rules)
	}
	resources, _ := build(t, s, share(tooMany.Replicas))
	if size := realSize(resources[0]); size > MaxList || size < MaxList*9/10 {
		t.Errorf("with %d replicas the list has %d bytes", tooMany.Replicas, size)
	}
}

func TestAListOfTooManyWholeDevicesIsRefused(t *testing.T) {
	s := &gpu.Snapshot{}
	for i := range 80_000 {
		s.Devices = append(s.Devices, gpu.Device{Index: i, UUID: fmt.Sprintf("GPU-%036d", i)})
	}
	_, _, err := Build(s, defaults())
	tooMany, ok := errors.AsType[*TooManyDevicesError](err)
	if !ok || tooMany.Shared != 0 || tooMany.Rules != "" {
		t.Errorf("got %v", err)
	}
}

// The maximum number of replicas of one GPU fits into a list.
func TestTheMaximumOfReplicas(t *testing.T) {
	s := loadSnapshot(t, "workstation")
	s.Devices[0].NUMANode = 1 << 30
	resources, _ := build(t, s, changed(timeSlice(SharingRule{Name: "nvidia.com/gpu", Replicas: maxReplicas})))
	if size := realSize(resources[0]); size > MaxList {
		t.Errorf("%d replicas take %d bytes", maxReplicas, size)
	}
	for _, n := range []int{-1, 0, 1, maxReplicas + 1, 1 << 62} {
		c := changed(timeSlice(SharingRule{Name: "nvidia.com/gpu", Replicas: n}))
		if err := c.Validate(); err == nil {
			t.Errorf("%d replicas are accepted", n)
		}
	}
}

func BenchmarkBuild(b *testing.B) {
	for name, c := range map[string]Config{
		"whole":       defaults(),
		"16 replicas": changed(timeSlice(SharingRule{Name: "nvidia.com/gpu", Replicas: 16})),
	} {
		b.Run(name, func(b *testing.B) {
			s := loadSnapshot(b, "hgx-16")
			b.ReportAllocs()
			for b.Loop() {
				if _, _, err := Build(s, c); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
