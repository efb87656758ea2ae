package checkpoint_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/manager/checkpoint"
	"gpu-cdi-plugin/manager/model"
)

func read(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// The file was written by a kubelet 1.36.3: a device on NUMA node 0, one on two nodes, one without topology.
func TestAKubeletsFileIsWrittenAgainByteForByte(t *testing.T) {
	want := read(t, "kubelet-1.36.json")
	c, err := checkpoint.Parse(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := c.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("the file (-want +got):\n%s", diff)
	}
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
			parsed, err := checkpoint.Parse(read(t, c.file))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, parsed.Placements()); diff != "" {
				t.Errorf("placements (-want +got):\n%s", diff)
			}
		})
	}
}

// A pod keeps its place, and the last of two entries for a container and a resource counts, as for the kubelet.
func TestPlacementsAreGroupedByPod(t *testing.T) {
	entry := func(uid, container, resource string, ids ...string) checkpoint.Entry {
		return checkpoint.Entry{
			PodUID: uid, ContainerName: container, ResourceName: resource, DeviceIDs: map[int64][]string{1: ids},
		}
	}
	c := checkpoint.Checkpoint{PodDeviceEntries: []checkpoint.Entry{
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
	if diff := cmp.Diff(want, c.Placements()); diff != "" {
		t.Errorf("placements (-want +got):\n%s", diff)
	}
}

// What New makes of placements comes back, written and read.
func TestPlacementsSurvive(t *testing.T) {
	for _, file := range []string{"kubelet-1.36.json", "kubelet-1.19.json"} {
		parsed, err := checkpoint.Parse(read(t, file))
		if err != nil {
			t.Fatal(err)
		}
		want := parsed.Placements()
		data, err := checkpoint.New(want, parsed.RegisteredDevices).Marshal()
		if err != nil {
			t.Fatal(err)
		}
		again, err := checkpoint.Parse(data)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, again.Placements()); diff != "" {
			t.Errorf("%s: placements (-want +got):\n%s", file, diff)
		}
		if diff := cmp.Diff(parsed.RegisteredDevices, again.RegisteredDevices); diff != "" {
			t.Errorf("%s: registered devices (-want +got):\n%s", file, diff)
		}
	}
}

// The kubelet writes null for no entries, and an object for no resources.
func TestAnEmptyCheckpoint(t *testing.T) {
	data, err := checkpoint.New(nil, nil).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}`
	if diff := cmp.Diff(want, string(data)); diff != "" {
		t.Errorf("the file (-want +got):\n%s", diff)
	}
}

func TestParseRefuses(t *testing.T) {
	v2, v1 := string(read(t, "kubelet-1.36.json")), string(read(t, "kubelet-1.19.json"))
	for name, c := range map[string]struct{ data, want string }{
		"another device": {
			strings.Replace(v2, `"GPU-1","GPU-0"`, `"GPU-1","GPU-2"`, 1),
			"the checksum does not match: the file says 3586343820, its content has 489764122",
		},
		"another order":              {strings.Replace(v2, `"GPU-1","GPU-0"`, `"GPU-0","GPU-1"`, 1), "does not match"},
		"another checksum":           {strings.Replace(v2, "3586343820", "3586343821", 1), "says 3586343821"},
		"another device before 1.20": {strings.Replace(v1, `"GPU-1","GPU-0"`, `"GPU-1","GPU-2"`, 1), "file says 3352954356"},
		"half a file":                {v2[:len(v2)/2], "unexpected end of JSON input"},
		"an empty file":              {"", "unexpected end of JSON input"},
		"no JSON":                    {"\x00\x00", "invalid character"},
		"two files":                  {v2 + v2, "after top-level value"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := checkpoint.Parse([]byte(c.data))
			if err == nil || got != nil {
				t.Fatalf("got %v, want an error", got)
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %q, want one with %q", err, c.want)
			}
			if errors.Is(err, checkpoint.ErrChecksum) != strings.Contains(err.Error(), "does not match") {
				t.Errorf("the error %v is ErrChecksum: %v", err, errors.Is(err, checkpoint.ErrChecksum))
			}
		})
	}
}

// The kubelet could not read such a file.
func TestMarshalRefusesNamesThatAreNotUTF8(t *testing.T) {
	c := checkpoint.New(nil, map[string][]string{"x/r": {"a\xff"}})
	if data, err := c.Marshal(); err == nil || data != nil {
		t.Errorf("got %q and the error %v", data, err)
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range []string{"kubelet-1.36.json", "kubelet-1.19.json"} {
		f.Add(read(f, name))
	}
	f.Add([]byte(`{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := checkpoint.Parse(data)
		if (c == nil) == (err == nil) {
			t.Fatalf("got the value %v and the error %v", c, err)
		}
		if err != nil {
			return
		}
		written, err := c.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		again, err := checkpoint.Parse(written)
		if err != nil {
			t.Fatalf("%q is refused: %v", written, err)
		}
		if diff := cmp.Diff(c, again); diff != "" {
			t.Errorf("read again (-want +got):\n%s", diff)
		}
		if twice, err := again.Marshal(); err != nil || !bytes.Equal(written, twice) {
			t.Errorf("written again: %q and %v, want %q", twice, err, written)
		}
		c.Placements()
	})
}
