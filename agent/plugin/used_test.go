package plugin

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/resource"
)

// The request has the devices of its own resource already, so they must not be counted twice.
func TestUsedSlicesAreThoseOfOtherResources(t *testing.T) {
	own, other := migOf(2), migOf(2)
	other.Name = "nvidia.com/mig-2g.20gb"
	for i := range other.Devices {
		d := &other.Devices[i]
		d.UUID += "b"
		d.ID, d.Profile = d.UUID+"::0", "2g.20gb"
	}
	held := map[string]bool{own.Devices[0].ID: true, other.Devices[1].ID: true, "example.com/thing-0": true}
	options := by(resource.CDICRI)
	options.Preference.Held = func() map[string]bool { return held }
	p := &Plugin{opts: Options{Allocate: options}, endpoints: map[string]*endpoint{
		own.Name: {server: serverOf(t, own, options)}, other.Name: {server: serverOf(t, other, options)},
	}}
	if diff := cmp.Diff(map[string]int{uuid(0): 2}, p.usedSlices(own.Name)); diff != "" {
		t.Errorf("slices by GPU (-want +got):\n%s", diff)
	}
}
