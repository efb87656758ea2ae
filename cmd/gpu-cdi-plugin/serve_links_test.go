package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

// Links are kept for GPUs, not for their indices: a GPU that comes or goes gives others to those behind it.
func TestLinksFollowTheirGPUs(t *testing.T) {
	snapshot := func(uuids ...string) *gpu.Snapshot {
		s := &gpu.Snapshot{}
		for i, uuid := range uuids {
			d := gpu.Device{Index: i, UUID: uuid}
			if uuid == "lost" {
				d = gpu.Device{Index: i, Error: "GPU is lost"}
			}
			s.Devices = append(s.Devices, d)
		}
		return s
	}
	read := snapshot("a", "b", "c")
	read.Links = []gpu.Link{{A: 0, B: 1, NVLinks: 1}, {A: 0, B: 2, NVLinks: 2}, {A: 1, B: 2, NVLinks: 3}}
	for name, c := range map[string]struct {
		linked, now *gpu.Snapshot
		want        []gpu.Link
	}{
		"nothing has changed":     {read, snapshot("a", "b", "c"), read.Links},
		"nothing was read yet":    {nil, snapshot("a", "b", "c"), nil},
		"one is gone":             {read, snapshot("b", "c"), []gpu.Link{{A: 0, B: 1, NVLinks: 3}}},
		"one is lost":             {read, snapshot("a", "lost", "c"), []gpu.Link{{A: 0, B: 2, NVLinks: 2}}},
		"one was lost":            {&gpu.Snapshot{Devices: snapshot("lost", "b", "c").Devices, Links: read.Links[2:]}, snapshot("a", "b", "c"), read.Links[2:]},
		"another is in its place": {read, snapshot("d", "b", "c"), read.Links[2:]},
		"they are in another order": {
			read, snapshot("c", "b", "a"), []gpu.Link{{A: 0, B: 1, NVLinks: 3}, {A: 0, B: 2, NVLinks: 2}, {A: 1, B: 2, NVLinks: 1}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := &nodeDriver{linked: c.linked}
			if diff := cmp.Diff(c.want, d.linksOf(c.now)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
