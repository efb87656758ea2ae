package nvml

import (
	"regexp"
	"testing"

	"gpu-cdi-plugin/gpu"
)

var (
	uuidPattern    = regexp.MustCompile(`^(GPU|MIG)-[0-9a-f-]+$`)
	addressPattern = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
)

// checkSnapshot checks what holds for the snapshot of any machine with any library.
func checkSnapshot(t testing.TB, s *gpu.Snapshot) {
	t.Helper()
	names, usable := map[string]bool{}, 0
	once := func(kind, name string) {
		if names[kind+name] {
			t.Errorf("%s %s occurs twice", kind, name)
		}
		names[kind+name] = true
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		if d.Index != i {
			t.Errorf("the device at position %d has index %d", i, d.Index)
		}
		if !d.Usable() {
			continue
		}
		usable++
		once("UUID", d.UUID)
		once("PCI address", d.PCIBusID)
		if !uuidPattern.MatchString(d.UUID) || !addressPattern.MatchString(d.PCIBusID) || d.Minor < 0 {
			t.Errorf("GPU %d without an error has UUID %q, address %q, minor %d", i, d.UUID, d.PCIBusID, d.Minor)
		}
		if len(d.MIG) > 0 && !d.MIGEnabled {
			t.Errorf("GPU %d has MIG devices with MIG off", i)
		}
		for j, m := range d.MIG {
			once("UUID", m.UUID)
			if j > 0 && m.Index <= d.MIG[j-1].Index || !profilePattern().MatchString(m.Profile) || m.MemoryBytes == 0 {
				t.Errorf("GPU %d has the MIG device %+v at position %d", i, m, j)
			}
		}
	}
	checkLinks(t, s, usable)
}

func checkLinks(t testing.TB, s *gpu.Snapshot, usable int) {
	t.Helper()
	if want := usable * (usable - 1) / 2; len(s.Links) != want {
		t.Errorf("%d links between %d usable GPUs, want %d", len(s.Links), usable, want)
	}
	for i, l := range s.Links {
		if l.A >= l.B || !s.Devices[l.A].Usable() || !s.Devices[l.B].Usable() {
			t.Errorf("link %+v is between GPUs in the wrong order or unusable", l)
		}
		if i > 0 && (s.Links[i-1].A > l.A || s.Links[i-1].A == l.A && s.Links[i-1].B >= l.B) {
			t.Errorf("link %+v is out of order", l)
		}
		if l.Switched && l.NVLinks == 0 {
			t.Errorf("link %+v is through switches without links", l)
		}
	}
}
