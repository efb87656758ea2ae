package manager_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

func readCheckpoint(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "internal", "kubelet", "testdata", name))
	testenv.Must(t, err)
	return data
}

const (
	pod1 = "6ba7b810-9dad-11d1-80b4-000000000001"
	pod2 = "6ba7b810-9dad-11d1-80b4-000000000002"
)

func TestPlacementsOfAKubeletsFile(t *testing.T) {
	container := func(resource string, devices int) []model.Container {
		return []model.Container{{Name: "ctr", Limits: map[string]int{resource: devices}}}
	}
	for name, c := range map[string]struct {
		file string
		want []model.Placement
	}{
		"of the present format": {"kubelet-1.36.json", []model.Placement{
			{
				Pod: model.Pod{UID: pod1, Containers: container("example.com/dev", 2)},
				Allocations: []model.Allocation{{
					Container: "ctr", Resource: "example.com/dev", IDs: []string{"GPU-0", "GPU-1"},
					NUMA: map[string][]int{"GPU-0": {0}, "GPU-1": {0, 1}},
					Response: []byte("\n\f\n\aVISIBLE\x12\x011\x1a\x16\n\a/dev/x0\x12\a/dev/x0\x1a\x02rw*\x13\n\x11" +
						"example.com/dev=0"),
				}},
			},
			{
				Pod: model.Pod{UID: pod2, Containers: container("example.com/notopo", 1)},
				Allocations: []model.Allocation{{
					Container: "ctr", Resource: "example.com/notopo", IDs: []string{"n0"}, Response: []byte{},
				}},
			},
		}},
		"of kubelets before 1.20": {"kubelet-1.19.json", []model.Placement{
			{
				Pod: model.Pod{UID: pod1, Containers: container("nvidia.com/gpu", 2)},
				Allocations: []model.Allocation{{
					Container: "ctr", Resource: "nvidia.com/gpu", IDs: []string{"GPU-0", "GPU-1"},
					NUMA: map[string][]int{"GPU-0": {0}, "GPU-1": {0}}, Response: []byte("\n\f\n\aVISIBLE\x12\x011"),
				}},
			},
			{
				Pod: model.Pod{UID: pod2, Containers: container("example.com/notopo", 1)},
				Allocations: []model.Allocation{{
					Container: "ctr", Resource: "example.com/notopo", IDs: []string{"n0"},
					NUMA: map[string][]int{"n0": {0}}, Response: []byte{},
				}},
			},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			parsed, err := kubelet.ParseCheckpoint(readCheckpoint(t, c.file))
			testenv.Must(t, err)
			if diff := cmp.Diff(c.want, manager.PlacementsOf(parsed)); diff != "" {
				t.Errorf("placements (-want +got):\n%s", diff)
			}
		})
	}
}

// A pod keeps its place, and the last of two entries for a container and a resource counts, as for the kubelet.
func TestPlacementsAreGroupedByPod(t *testing.T) {
	entry := func(uid, container, resource string, ids ...string) kubelet.Entry {
		return kubelet.Entry{
			PodUID: uid, ContainerName: container, ResourceName: resource, DeviceIDs: map[int64][]string{1: ids},
		}
	}
	c := kubelet.Checkpoint{PodDeviceEntries: []kubelet.Entry{
		entry("b", "one", "x/r", "1", "2"), entry("a", "one", "x/r", "3"), entry("b", "two", "x/r", "4"),
		entry("b", "one", "x/s", "5"), entry("b", "one", "x/r", "6", "6"),
	}}
	allocation := func(container, resource, id string) model.Allocation {
		return model.Allocation{
			Container: container, Resource: resource, IDs: []string{id}, NUMA: map[string][]int{id: {1}},
		}
	}
	want := []model.Placement{
		{
			Pod: model.Pod{UID: "b", Containers: []model.Container{
				{Name: "one", Limits: map[string]int{"x/r": 1, "x/s": 1}},
				{Name: "two", Limits: map[string]int{"x/r": 1}},
			}},
			Allocations: []model.Allocation{
				allocation("one", "x/r", "6"), allocation("two", "x/r", "4"), allocation("one", "x/s", "5"),
			},
		},
		{
			Pod: model.Pod{UID: "a", Containers: []model.Container{
				{Name: "one", Limits: map[string]int{"x/r": 1}},
			}},
			Allocations: []model.Allocation{allocation("one", "x/r", "3")},
		},
	}
	if diff := cmp.Diff(want, manager.PlacementsOf(&c)); diff != "" {
		t.Errorf("placements (-want +got):\n%s", diff)
	}
}

// What NewCheckpoint makes of placements comes back, written and read.
func TestPlacementsSurvive(t *testing.T) {
	for _, file := range []string{"kubelet-1.36.json", "kubelet-1.19.json"} {
		parsed, err := kubelet.ParseCheckpoint(readCheckpoint(t, file))
		testenv.Must(t, err)
		want := manager.PlacementsOf(parsed)
		data, err := manager.NewCheckpoint(want, parsed.RegisteredDevices).Marshal()
		testenv.Must(t, err)
		again, err := kubelet.ParseCheckpoint(data)
		testenv.Must(t, err)
		if diff := cmp.Diff(want, manager.PlacementsOf(again)); diff != "" {
			t.Errorf("%s: placements (-want +got):\n%s", file, diff)
		}
		if diff := cmp.Diff(parsed.RegisteredDevices, again.RegisteredDevices); diff != "" {
			t.Errorf("%s: registered devices (-want +got):\n%s", file, diff)
		}
	}
}
