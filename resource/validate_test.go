package resource

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestValidateReportsAllProblemsWithTheirKeys(t *testing.T) {
	c := Config{
		Resource:    "nvidia.com/gpu",
		MIGStrategy: "mixd",
		GPUs:        Filter{Include: []Selector{"0", ""}, Exclude: []Selector{"GPU-1"}},
		Names: Names{
			GPUs: []NameRule{{"*", "a.b/c"}, {"", "c"}},
			MIG:  []NameRule{{"1g.*", "a.b/c+d"}},
		},
		Sharing: Sharing{TimeSlicing: TimeSlicing{RenameByDefault: true, Resources: []SharingRule{
			{Name: "a.b/" + strings.Repeat("x", 60), Replicas: 2},
			{Name: "a.b/c", Replicas: 1, Devices: []Selector{"MIG-x"}, Rename: "d"},
			{Name: "a.b/c", Replicas: 2},
			{Name: "a.b/c", Replicas: 3, Devices: []Selector{"0"}},
			{Replicas: 2},
		}}},
	}
	want := []string{
		`mig-strategy: unknown value "mixd"; known are none, single, mixed`,
		"gpus.include[1]: is empty",
		`gpus.exclude[0]: "GPU-1" is not GPU- or MIG- followed by a UUID`,
		"resources.gpus[1].pattern: is empty; * matches everything",
		`resources.gpus[1].name: resource name "c": want VENDOR/NAME, such as nvidia.com/gpu`,
		`resources.mig[0].name: resource name "a.b/c+d": ` +
			`the part after the slash may have letters, digits and - _ . between letters or digits`,
		`sharing.time-slicing.resources[0].rename: resource name "a.b/` + strings.Repeat(
			"x",
			60,
		) + `.shared": the part after the slash has 67 characters, more than 63`,
		`sharing.time-slicing.resources[1].rename: resource name "d": want VENDOR/NAME, such as nvidia.com/gpu`,
		"sharing.time-slicing.resources[1].replicas: want 2 or more, got 1",
		`sharing.time-slicing.resources[1].devices[0]: "MIG-x" is not GPU- or MIG- followed by a UUID`,
		"sharing.time-slicing.resources[3]: has no effect: sharing.time-slicing.resources[2] matches all devices of a.b/c",
		`sharing.time-slicing.resources[4].name: resource name "": want VENDOR/NAME, such as nvidia.com/gpu`,
	}
	err := c.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}
