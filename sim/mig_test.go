package sim

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
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

func TestInvalidProfiles(t *testing.T) {
	for name, c := range map[string]struct{ profile, says string }{
		"an unknown profile":                {"5g.50gb", `unknown MIG profile "5g.50gb"; this model has 1g.10gb, `},
		"a part of an unknown profile":      {"1c.5g.50gb", "unknown MIG profile"},
		"a part that is larger":             {"4c.3g.40gb", "3g.40gb has no compute instances of 4 slices"},
		"a part that does not exist":        {"3c.4g.40gb", "4g.40gb has no compute instances of 3 slices"},
		"a part without a number":           {"xc.3g.40gb", "no compute instances of x slices"},
		"a start where it cannot begin":     {"3g.40gb@2", "3g.40gb can begin at [0 4]"},
		"a start without a number":          {"3g.40gb@end", "the start after @"},
		"a negative start":                  {"3g.40gb@-1", "3g.40gb can begin at [0 4]"},
		"an empty name":                     {"", "unknown MIG profile"},
		"a profile of another model's size": {"1g.5gb", "unknown MIG profile"},
	} {
		t.Run(name, func(t *testing.T) {
			devices, err := partition(h100(), []string{c.profile})
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v and error %v, want %q in it", devices, err, c.says)
			}
		})
	}
	if _, err := partition(&GPU{}, nil); err == nil {
		t.Error("a GPU without MIG was partitioned")
	}
}

// TestProfileTablesAreConsistent checks that the rows agree: a profile's limit, the guide's "instances total", is the
// number of its starts, and that many instances fit.
func TestProfileTablesAreConsistent(t *testing.T) {
	for model, table := range migTables {
		ids := map[int]string{}
		for _, p := range table {
			if other, ok := ids[p.id]; ok {
				t.Errorf("%s: %s and %s have the id %d", model, p.name, other, p.id)
			}
			ids[p.id] = p.name
			if media := strings.HasSuffix(p.name, "+me"); media && p.limit != 1 || !media && p.limit != len(p.starts) {
				t.Errorf("%s: %s: limit %d and %d starts", model, p.name, p.limit, len(p.starts))
			}
			if !strings.HasPrefix(p.name, strconv.Itoa(p.slices)+"g.") {
				t.Errorf("%s: %s has %d slices", model, p.name, p.slices)
			}
			g := &GPU{Model: Model{MIG: model}}
			if _, err := partition(g, slices.Repeat([]string{p.name}, p.limit)); err != nil {
				t.Errorf("%s: %d times %s: %v", model, p.limit, p.name, err)
			}
			if _, err := partition(g, slices.Repeat([]string{p.name}, p.limit+1)); err == nil {
				t.Errorf("%s: %d times %s fit", model, p.limit+1, p.name)
			}
		}
	}
}

func TestCapabilityMinors(t *testing.T) {
	d, err := partition(h100(), []string{"2g.20gb@4"})
	if err != nil {
		t.Fatal(err)
	}
	// Minor 2 of the GPU: 3 + (2*15 + 5)*9, as in a real mig-minors: gpu2/gi5/access 318.
	if d[0].GPUInstanceCap != 318 || d[0].ComputeInstanceCap != 319 {
		t.Errorf("caps %d and %d, want 318 and 319", d[0].GPUInstanceCap, d[0].ComputeInstanceCap)
	}
	minors := migMinors()
	for _, line := range []string{
		"config 1\n", "monitor 2\n", "gpu0/gi0/access 3\n", "gpu0/gi1/access 12\n", "gpu0/gi1/ci0/access 13\n",
		"gpu1/gi0/access 138\n", "gpu2/gi5/access 318\n", "gpu2/gi5/ci0/access 319\n",
	} {
		if !strings.Contains(minors, line) {
			t.Errorf("mig-minors has no line %q", line)
		}
	}
}
