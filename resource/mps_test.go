package resource

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

// shareByMPS sets the rules of MPS.
func shareByMPS(list ...SharingRule) func(*Config) {
	return func(c *Config) { c.MPS, c.Sharing.MPS.Resources = true, list }
}

// formatLimits formats the devices that MPS shares as "NAME: INDEX::REPLICA MIB/PERCENT ...".
func formatLimits(resources []Resource) []string {
	var lines []string
	for _, r := range resources {
		line := ""
		for _, d := range r.Devices {
			if d.MPS != nil {
				line += fmt.Sprintf(" %d::%d %d/%d", d.Index, d.Replica, d.MPS.MemoryBytes>>20, d.MPS.ThreadPercent)
			}
		}
		if line != "" {
			lines = append(lines, r.Name+":"+line)
		}
	}
	return lines
}

func TestMPS(t *testing.T) {
	for name, tt := range map[string]struct {
		machine  string
		change   func(*Config)
		damage   func(*gpu.Snapshot)
		want     []string
		limits   []string
		findings []string
	}{
		"each replica has a part of memory and threads, rounded down": {
			machine: "dgx1-v100",
			change: shareByMPS(SharingRule{
				Name: "nvidia.com/gpu", Devices: []Selector{"0"}, Replicas: 3, Rename: "nvidia.com/third",
			}),
			want:   []string{"nvidia.com/gpu: 1 2 3 4 5 6 7", "nvidia.com/third: 0::0 0::1 0::2 (at most 1)"},
			limits: []string{"nvidia.com/third: 0::0 5461/33 0::1 5461/33 0::2 5461/33"},
		},
		"rename-by-default appends .shared to the name": {
			machine: "workstation",
			change: func(c *Config) {
				shareByMPS(SharingRule{Name: "nvidia.com/gpu", Replicas: 2})(c)
				c.Sharing.MPS.RenameByDefault = true
			},
			want:   []string{"nvidia.com/gpu.shared: 0::0 0::1 (at most 1)"},
			limits: []string{"nvidia.com/gpu.shared: 0::0 12282/50 0::1 12282/50"},
		},
		"a GPU before Volta has no thread limit and at most 16 clients": {
			machine: "pcie-quad",
			change: shareByMPS(
				SharingRule{Name: "nvidia.com/gpu", Devices: []Selector{"0"}, Replicas: 17, Rename: "a.b/c"},
				SharingRule{Name: "nvidia.com/gpu", Devices: []Selector{"1"}, Replicas: 2, Rename: "a.b/c"},
				SharingRule{Name: "nvidia.com/gpu", Devices: []Selector{"2"}, Replicas: 17, Rename: "a.b/c"},
			),
			damage: func(s *gpu.Snapshot) {
				for i, capability := range []string{"6.1", "6.1", ""} {
					s.Devices[i].ComputeCapability = capability
				}
			},
			want:   []string{"a.b/c: 1::0 1::1 (at most 1)", "nvidia.com/gpu: 0 2 3"},
			limits: []string{"a.b/c: 1::0 23034/0 1::1 23034/0"},
			findings: []string{
				"GPU-0 is not shared: MPS supports at most 16 clients on this GPU (compute capability 6.1), " +
					"but there are 17 replicas",
				"GPU-2 is not shared: MPS supports at most 16 clients on this GPU (compute capability unknown), " +
					"but there are 17 replicas",
			},
		},
		"MIG devices are not shared": {
			machine: "mig-h100",
			change: func(c *Config) {
				c.MIGStrategy, c.GPUs.Include = MIGMixed, []Selector{"2"}
				shareByMPS(SharingRule{Name: "nvidia.com/mig-7g.80gb", Replicas: 2})(c)
			},
			want:     []string{"nvidia.com/gpu:", "nvidia.com/mig-7g.80gb: 2:0"},
			findings: append(excluded(0, 1, 3, 4, 5, 6, 7), "MIG-2-0 is not shared: MPS cannot share MIG devices"),
		},
		"a GPU of unknown memory size is not shared": {
			machine: "workstation",
			change:  shareByMPS(SharingRule{Name: "nvidia.com/gpu", Replicas: 2}),
			damage:  func(s *gpu.Snapshot) { s.Devices[0].MemoryBytes = 0 },
			want:    []string{"nvidia.com/gpu: 0"},
			findings: []string{
				"GPU-0 is not shared: its memory size is unknown, so containers cannot be limited to a part of it",
			},
		},
		"an unreadable GPU retains its replicas": {
			machine: "workstation",
			change:  shareByMPS(SharingRule{Name: "nvidia.com/gpu", Replicas: 2}),
			damage: func(s *gpu.Snapshot) {
				s.Devices[0].MemoryBytes, s.Devices[0].ComputeCapability, s.Devices[0].Error = 0, "", "GPU is lost"
			},
			want:     []string{"nvidia.com/gpu: 0::0! 0::1! (at most 1)"},
			limits:   []string{"nvidia.com/gpu: 0::0 0/0 0::1 0/0"},
			findings: []string{"GPU 0 is unhealthy: cannot be read: GPU is lost"},
		},
		"a GPU that rules of two methods match is not shared": {
			machine: "pcie-quad",
			change: func(c *Config) {
				shareByMPS(SharingRule{Name: "nvidia.com/gpu", Devices: []Selector{"1", "2"}, Replicas: 2})(c)
				timeSlice(SharingRule{
					Name: "nvidia.com/gpu", Replicas: 3,
					Devices: []Selector{"GPU-00000000-0000-0000-0000-000000000001"},
				})(c)
			},
			damage: func(s *gpu.Snapshot) { s.Devices[1].UUID = "GPU-00000000-0000-0000-0000-000000000001" },
			want:   []string{"nvidia.com/gpu: 0 1 2::0 2::1 3 (at most 1)"},
			limits: []string{"nvidia.com/gpu: 2::0 23034/50 2::1 23034/50"},
			findings: []string{
				"GPU-00000000-0000-0000-0000-000000000001 is not shared: " +
					"both sharing.time-slicing.resources[0] and sharing.mps.resources[0] match it",
				"nvidia.com/gpu has devices that are shared and devices that are not; set rename for the shared ones",
			},
		},
		"two methods for one resource are a problem": {
			machine: "pcie-quad",
			change: func(c *Config) {
				c.GPUs.Include = []Selector{"1", "2"}
				shareByMPS(SharingRule{Name: "nvidia.com/gpu", Devices: []Selector{"1"}, Replicas: 2})(c)
				timeSlice(SharingRule{Name: "nvidia.com/gpu", Devices: []Selector{"2"}, Replicas: 2})(c)
			},
			want:   []string{"nvidia.com/gpu: 1::0 1::1 2::0 2::1 (at most 1)"},
			limits: []string{"nvidia.com/gpu: 1::0 23034/50 1::1 23034/50"},
			findings: []string{
				excluded(0)[0], excluded(3)[0],
				"nvidia.com/gpu has devices shared by time-slicing and devices shared by MPS; " +
					"set rename for one of them",
			},
		},
		"a GPU has at most 48 clients": {
			machine: "pcie-quad",
			change: func(c *Config) {
				c.GPUs.Include = []Selector{"1"}
				shareByMPS(SharingRule{Name: "nvidia.com/gpu", Replicas: 49})(c)
			},
			want: []string{"nvidia.com/gpu: 1"},
			findings: append(excluded(0, 2, 3),
				"GPU-1 is not shared: MPS supports at most 48 clients on this GPU (compute capability 8.9), "+
					"but there are 49 replicas"),
		},
		"a rule that matches nothing is reported": {
			machine:  "workstation",
			change:   shareByMPS(SharingRule{Name: "nvidia.com/other", Replicas: 2}),
			want:     []string{"nvidia.com/gpu: 0"},
			findings: []string{"sharing.mps.resources[0] matches nothing on this node"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := loadSnapshot(t, tt.machine)
			for i := range s.Devices {
				s.Devices[i].UUID = fmt.Sprintf("GPU-%d", i)
				for j := range s.Devices[i].MIG {
					s.Devices[i].MIG[j].UUID = fmt.Sprintf("MIG-%d-%d", i, j)
				}
			}
			if tt.damage != nil {
				tt.damage(s)
			}
			resources, findings := build(t, s, changed(tt.change))
			if diff := cmp.Diff(tt.want, formatResources(resources)); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if diff := cmp.Diff(tt.limits, formatLimits(resources)); diff != "" {
				t.Errorf("limits: -want +got\n%s", diff)
			}
			if tt.machine == "dgx1-v100" {
				findings = nil // mixed resources are another case
			}
			if diff := cmp.Diff(tt.findings, findings); diff != "" {
				t.Errorf("findings: -want +got\n%s", diff)
			}
		})
	}
}

func TestValidateMPS(t *testing.T) {
	slicing := []SharingRule{
		{Name: "a.b/c", Devices: []Selector{"0", "1"}, Replicas: 2},
		{Name: "a.b/d", Replicas: 2},
	}
	for name, tt := range map[string]struct {
		off  bool
		mps  []SharingRule
		want []string
	}{
		"rules for other devices and other resources": {
			mps: []SharingRule{{Name: "a.b/c", Devices: []Selector{"2"}, Replicas: 48}, {Name: "a.b/e", Replicas: 2}},
		},
		"rules without mps: true": {
			off: true, mps: []SharingRule{{Name: "a.b/e", Replicas: 2}},
			want: []string{
				"sharing.mps.resources: requires mps: true, since MPS is experimental and runs programs of the driver",
			},
		},
		"devices that time-slicing shares too": {
			mps: []SharingRule{
				{Name: "a.b/c", Devices: []Selector{"3", "1"}, Replicas: 2},
				{Name: "a.b/d", Devices: []Selector{"5"}, Replicas: 2},
				{Name: "a.b/c", Replicas: 2},
			},
			want: []string{
				"sharing.mps.resources[0]: sharing.time-slicing.resources[0] matches the same devices of a.b/c; " +
					"only one method can share a device",
				"sharing.mps.resources[1]: sharing.time-slicing.resources[1] matches the same devices of a.b/d; " +
					"only one method can share a device",
				"sharing.mps.resources[2]: sharing.time-slicing.resources[0] matches the same devices of a.b/c; " +
					"only one method can share a device",
			},
		},
		"all kinds of problems in rules": {
			mps: []SharingRule{
				{Name: "a.b/e", Replicas: 49},
				{Name: "e", Replicas: 1, Devices: []Selector{""}},
				{Name: "a.b/e", Replicas: 2, Rename: "x"},
			},
			want: []string{
				`sharing.mps.resources[1].name: resource name "e": want VENDOR/NAME, such as nvidia.com/gpu`,
				"sharing.mps.resources[1].replicas: want 2 or more, got 1",
				"sharing.mps.resources[1].devices[0]: is empty",
				`sharing.mps.resources[2].rename: resource name "x": want VENDOR/NAME, such as nvidia.com/gpu`,
				"sharing.mps.resources[2]: has no effect: sharing.mps.resources[0] matches all devices of a.b/e",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := changed(func(c *Config) {
				timeSlice(slicing...)(c)
				shareByMPS(tt.mps...)(c)
				c.MPS = !tt.off
			})
			var got []string
			if err := c.Validate(); err != nil {
				got = strings.Split(err.Error(), "\n")
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}
