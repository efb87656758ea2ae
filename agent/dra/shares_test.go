package dra

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// sharedNode returns the one device of a node whose GPU has so much memory and so many replicas, and the remarks about
// it.
func sharedNode(t testing.TB, memory uint64, replicas int) (*Device, []string) {
	t.Helper()
	s := &gpu.Snapshot{Devices: []gpu.Device{{UUID: "GPU-0", MemoryBytes: memory}}}
	list, omitted := Slices(onNode, stateOf(t, s, resource.Config{
		Sharing: resource.Sharing{TimeSlicing: resource.TimeSlicing{Resources: []resource.SharingRule{
			{Name: "nvidia.com/gpu", Replicas: replicas},
		}}},
	}), nil)
	if len(list) == 0 {
		return nil, omitted
	}
	if len(list) != 1 || len(list[0].Spec.Devices) != 1 {
		t.Fatalf("the slices are %v, want one device", list)
	}
	return &list[0].Spec.Devices[0], omitted
}

func TestADeviceThatIsSharedInTime(t *testing.T) {
	d, _ := sharedNode(t, 80<<30, 4)
	got, err := json.MarshalIndent(d, "", "\t")
	testenv.Must(t, err)
	const want = `{
	"name": "gpu-0",
	"attributes": {
		"replicas": {
			"int": 4
		},
		"resource.kubernetes.io/numaNode": {
			"int": 0
		},
		"resourceName": {
			"string": "nvidia.com/gpu"
		},
		"sharing": {
			"string": "time-slicing"
		},
		"type": {
			"string": "gpu"
		},
		"uuid": {
			"string": "GPU-0"
		}
	},
	"capacity": {
		"memory": {
			"value": "80Gi",
			"requestPolicy": {
				"default": "20Gi",
				"validRange": {
					"min": "1Mi",
					"step": "1Ki"
				}
			}
		}
	},
	"allowMultipleAllocations": true
}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

// As many claims with the default fit as there are replicas. The API server's rules for the policy hold.
func TestTheDefaultShareIsThatOfAReplica(t *testing.T) {
	for _, memory := range []uint64{80 << 30, 81559 << 20, 4864 << 20, 16*1000*1000*1000 + 7} {
		for _, replicas := range []int{2, 3, 4, 7, 10, 48, 100, 1000} {
			d, omitted := sharedNode(t, memory, replicas)
			if d == nil {
				t.Errorf("%d bytes and %d replicas: %v", memory, replicas, omitted)
				continue
			}
			c := d.Capacity["memory"]
			value, share, least, step := bytesIn(t, c.Value), bytesIn(t, c.Policy.Default), bytesIn(t, c.Policy.Range.Min),
				bytesIn(t, c.Policy.Range.Step)
			if n := value / share; n != uint64(replicas) {
				t.Errorf("%d bytes: %d claims fit, want %d", memory, n, replicas)
			}
			if share < least || (share-least)%step != 0 || least+step > value || value > memory {
				t.Errorf("%d bytes and %d replicas: the capacity is %+v", memory, replicas, c)
			}
		}
	}
	d, omitted := sharedNode(t, 8<<20, 9)
	want := "GPU 0 is not offered by DRA: its memory cannot be divided among 9 replicas"
	if diff := cmp.Diff([]string{want}, omitted); d != nil || diff != "" {
		t.Errorf("too many replicas: the device is %v, and omitted (-want +got)\n%s", d, diff)
	}
}

func bytesIn(t testing.TB, quantity string) uint64 {
	t.Helper()
	n, err := parseQuantity(quantity)
	testenv.Must(t, err)
	return n
}

func TestQuantities(t *testing.T) {
	for bytes, want := range map[uint64]string{
		80 << 30: "80Gi", 81559 << 20: "81559Mi", 1 << 40: "1Ti", 3 << 10: "3Ki", 3<<10 + 5: "3Ki", 1 << 60: "1024Pi",
	} {
		got := quantity(bytes)
		if got != want {
			t.Errorf("%d: %s, want %s", bytes, got, want)
		}
		if n := bytesIn(t, got); n != bytes>>10<<10 {
			t.Errorf("%s is %d, want %d", got, n, bytes)
		}
	}
	for text, want := range map[string]string{
		"": "no whole number", "Gi": "no whole number", "1.5Gi": "no whole number", "-1Gi": "no whole number",
		"1G": "no whole number", "1 Gi": "no whole number", "16384Pi": "too much", "18446744073709551616": "no whole number",
	} {
		if n, err := parseQuantity(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %d, %v, want an error with %q", text, n, err, want)
		}
	}
}

func FuzzParseQuantity(f *testing.F) {
	for _, text := range []string{"20Gi", "1024", "16383Pi", "16384Pi", "1e3", "0Ki"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		n, err := parseQuantity(text)
		if err != nil {
			if n != 0 {
				t.Errorf("%q: %d and the error %v", text, n, err)
			}
			return
		}
		if again, err := parseQuantity(fmt.Sprint(n)); err != nil || again != n {
			t.Errorf("%q is %d, which is %d: %v", text, n, again, err)
		}
	})
}
