package sim

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func h100() *GPU {
	return &GPU{Model: Model{Name: "H100", MIG: "h100-80gb"}, Minor: 2, UUID: "GPU-x"}
}

func TestPartition(t *testing.T) {
	// As profile@start/gi:ci, in the order of the devices.
	for name, c := range map[string]struct{ profiles, want []string }{
		"nothing":                 {nil, []string{}},
		"the whole GPU":           {[]string{"7g.80gb"}, []string{"7g.80gb@0/0:0"}},
		"two halves":              {[]string{"3g.40gb", "3g.40gb"}, []string{"3g.40gb@0/1:0", "3g.40gb@4/2:0"}},
		"a small one first":       {[]string{"1g.10gb", "4g.40gb"}, []string{"4g.40gb@0/1:0", "1g.10gb@4/11:0"}},
		"a small one that blocks": {[]string{"1g.10gb", "3g.40gb", "3g.40gb@0"}, nil},
		"seven of the smallest": {
			slices.Repeat([]string{"1g.10gb"}, 7),
			[]string{
				"1g.10gb@0/7:0", "1g.10gb@1/8:0", "1g.10gb@2/9:0", "1g.10gb@3/10:0", "1g.10gb@4/11:0",
				"1g.10gb@5/12:0", "1g.10gb@6/13:0",
			},
		},
		"eight of the smallest": {slices.Repeat([]string{"1g.10gb"}, 8), nil},
		"a given start":         {[]string{"3g.40gb@4"}, []string{"3g.40gb@4/2:0"}},
		"a given start at last": {
			[]string{"1g.10gb", "1g.10gb", "2g.20gb@0"},
			[]string{"2g.20gb@0/3:0", "1g.10gb@2/9:0", "1g.10gb@3/10:0"},
		},
		"a given start twice": {[]string{"3g.40gb@4", "3g.40gb@4"}, nil},
		"parts share an instance": {
			[]string{"1c.3g.40gb", "2c.3g.40gb", "1c.3g.40gb"},
			[]string{"1c.3g.40gb@0/1:0", "2c.3g.40gb@0/1:1", "1c.3g.40gb@4/2:0"},
		},
		"the only one with media engines, twice": {[]string{"1g.10gb+me", "1g.10gb+me"}, nil},
		"four times two and one": {
			[]string{"2g.20gb", "2g.20gb", "2g.20gb", "1g.10gb"},
			[]string{"2g.20gb@0/3:0", "2g.20gb@2/4:0", "2g.20gb@4/5:0", "1g.10gb@6/13:0"},
		},
		"more than seven compute slices": {[]string{"4g.40gb", "3g.40gb", "1g.10gb"}, nil},
		"double memory at the end": {
			[]string{"4g.40gb", "2g.20gb", "1g.20gb"},
			[]string{"4g.40gb@0/1:0", "2g.20gb@4/5:0", "1g.20gb@6/6:0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			devices, err := partition(h100(), c.profiles)
			if (err != nil) != (c.want == nil) {
				t.Fatalf("error %v, want devices %v", err, c.want)
			}
			got := []string{}
			for _, d := range devices {
				got = append(got,
					fmt.Sprintf("%s@%d/%d:%d", d.Profile, d.Start, d.GPUInstance, d.ComputeInstance))
			}
			if c.want != nil && !cmp.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}
