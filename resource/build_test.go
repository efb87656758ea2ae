package resource

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// loadSnapshot returns the snapshot of a simulated machine.
func loadSnapshot(t testing.TB, machine string) *gpu.Snapshot {
	t.Helper()
	m, err := sim.LoadMachine(machine)
	testenv.Must(t, err)
	return m.Snapshot(sim.DefaultDriver)
}

func defaults() Config {
	return Config{
		Resource: "nvidia.com/gpu", MIGStrategy: MIGNone,
	}
}

// changed returns the default configuration with a change.
func changed(change func(*Config)) Config {
	c := defaults()
	change(&c)
	return c
}

func build(t testing.TB, s *gpu.Snapshot, c Config) ([]Resource, []string) {
	t.Helper()
	resources, findings, err := Build(s, c)
	testenv.Must(t, err)
	var texts []string
	for _, f := range findings {
		texts = append(texts, f.Text)
	}
	checkInvariants(t, resources)
	return resources, texts
}

// checkInvariants checks what holds for every result.
func checkInvariants(t testing.TB, resources []Resource) {
	t.Helper()
	if !slices.IsSortedFunc(resources, func(a, b Resource) int { return strings.Compare(a.Name, b.Name) }) {
		t.Error("the resources are not sorted")
	}
	ids := map[string]string{}
	uuids := map[string]string{}
	for _, r := range resources {
		if err := kubelet.CheckResourceName(r.Name); err != nil {
			t.Error(err)
		}
		for _, d := range r.Devices {
			if other, ok := ids[d.ID]; ok {
				t.Errorf("%s is in %s and in %s", d.ID, other, r.Name)
			}
			ids[d.ID] = r.Name
			if other, ok := uuids[d.UUID]; ok && other != r.Name {
				t.Errorf("%s is in %s and in %s", d.UUID, other, r.Name)
			}
			uuids[d.UUID] = r.Name
			if d.ID == "" || len(d.ID) > maxID {
				t.Errorf("the ID %q has %d characters", d.ID, len(d.ID))
			}
			if d.Healthy != (d.Reason == "") {
				t.Errorf("%s: healthy %t, reason %q", d.ID, d.Healthy, d.Reason)
			}
		}
	}
}

// formatResources formats resources as "NAME: INDEX INDEX:MIG INDEX::REPLICA ...", with a ! after unhealthy devices.
func formatResources(resources []Resource) []string {
	var lines []string
	for _, r := range resources {
		line := r.Name + ":"
		for _, d := range r.Devices {
			line += fmt.Sprintf(" %d", d.Index)
			if d.MIGIndex != NoMIG {
				line += fmt.Sprintf(":%d", d.MIGIndex)
			}
			if d.Shared() {
				line += fmt.Sprintf("::%d", d.Replica)
			}
			if !d.Healthy {
				line += "!"
			}
		}
		if r.Limit > 0 {
			line += fmt.Sprintf(" (at most %d)", r.Limit)
		}
		lines = append(lines, line)
	}
	return lines
}

// timeSlice sets the rules of time-slicing.
func timeSlice(list ...SharingRule) func(*Config) {
	return func(c *Config) { c.Sharing.TimeSlicing.Resources = list }
}

func TestBuildOnKnownMachines(t *testing.T) {
	for name, tt := range map[string]struct {
		machine  string
		change   func(*Config)
		want     []string
		findings []string
	}{
		"GPUs are offered under the default name": {
			"dgx-h100", func(*Config) {},
			[]string{"nvidia.com/gpu: 0 1 2 3 4 5 6 7"},
			nil,
		},
		"MIG devices are not offered with mig-strategy none, with a finding": {
			"mig-h100", func(*Config) {},
			[]string{"nvidia.com/gpu: 6 7"},
			func() (list []string) {
				for i := range 6 {
					list = append(list, fmt.Sprintf("GPU %d is in MIG mode and is not offered with mig-strategy none; "+
						"set mig-strategy to single or mixed", i))
				}
				return list
			}(),
		},
		"each profile is a resource with mig-strategy mixed, besides whole GPUs": {
			"mig-h100", func(c *Config) { c.MIGStrategy = MIGMixed },
			[]string{
				"nvidia.com/gpu: 6 7",
				"nvidia.com/mig-1c.3g.40gb: 1:0",
				"nvidia.com/mig-1g.10gb: 0:2 4:0 4:1 4:2 4:3 4:4 4:5 4:6 5:2",
				"nvidia.com/mig-1g.10gb.me: 0:3",
				"nvidia.com/mig-1g.20gb: 5:1",
				"nvidia.com/mig-2c.3g.40gb: 1:1",
				"nvidia.com/mig-2g.20gb: 0:1",
				"nvidia.com/mig-3g.40gb: 0:0 1:2",
				"nvidia.com/mig-4g.40gb: 5:0",
				"nvidia.com/mig-7g.80gb: 2:0",
			},
			[]string{"GPU 3 is in MIG mode and has no MIG device"},
		},
		"different profiles are unhealthy with mig-strategy single": {
			"mig-h100", func(c *Config) { c.MIGStrategy = MIGSingle; c.GPUs.Include = []Selector{"2", "4"} },
			[]string{"nvidia.com/gpu: 2:0! 4:0! 4:1! 4:2! 4:3! 4:4! 4:5! 4:6!"},
			append(excluded(0, 1, 3, 5, 6, 7),
				"mig-strategy single needs the same profile on all GPUs, but there are: 1g.10gb, 7g.80gb; "+
					"partition them alike, or use mixed"),
		},
		"whole GPUs besides MIG devices are unhealthy with mig-strategy single": {
			"mig-h100", func(c *Config) { c.MIGStrategy = MIGSingle; c.GPUs.Include = []Selector{"2", "6"} },
			[]string{"nvidia.com/gpu: 2:0! 6!"},
			append(excluded(0, 1, 3, 4, 5, 7),
				"mig-strategy single needs the same profile on all GPUs, but there are: 7g.80gb, whole GPUs; "+
					"partition them alike, or use mixed"),
		},
		"MIG devices of one profile are offered as GPUs with mig-strategy single": {
			"mig-h100", func(c *Config) { c.MIGStrategy = MIGSingle; c.GPUs.Include = []Selector{"3", "4"} },
			[]string{"nvidia.com/gpu: 4:0 4:1 4:2 4:3 4:4 4:5 4:6"},
			slices.Concat(excluded(0, 1, 2), []string{"GPU 3 is in MIG mode and has no MIG device"}, excluded(5, 6, 7)),
		},
		"GPUs without MIG mode are offered with mig-strategy single": {
			"workstation", func(c *Config) { c.MIGStrategy = MIGSingle },
			[]string{"nvidia.com/gpu: 0"},
			nil,
		},
		"resources of profiles have the vendor of the default resource": {
			"mig-h100", func(c *Config) {
				c.Resource, c.MIGStrategy, c.GPUs.Include = "example.com/accelerator", MIGMixed, []Selector{"2"}
			},
			[]string{"example.com/accelerator:", "example.com/mig-7g.80gb: 2:0"},
			excluded(0, 1, 3, 4, 5, 6, 7),
		},
		"the filter selects by index, UUID and model, and exclusion wins": {
			"pcie-quad", func(c *Config) {
				c.GPUs.Include = []Selector{"0", "2", "*no such*", "3"}
				c.GPUs.Exclude = []Selector{"2", "17"}
			},
			[]string{"nvidia.com/gpu: 0 3"},
			append(excluded(1, 2),
				"gpus.include[2] matches nothing on this node", "gpus.exclude[1] matches nothing on this node"),
		},
		"the default resource is empty if all GPUs are excluded": {
			"workstation", func(c *Config) { c.GPUs.Exclude = []Selector{"*"} },
			[]string{"nvidia.com/gpu:"},
			append(excluded(0), noneOffered),
		},
		"a rule names a model": {
			"dgx-h100", func(c *Config) {
				c.Names.GPUs = []NameRule{
					{"*A100*", "nvidia.com/a100"}, {"nvidia-h100-*", "nvidia.com/h100"}, {"*", "nvidia.com/other"},
				}
			},
			[]string{"nvidia.com/h100: 0 1 2 3 4 5 6 7"},
			[]string{
				"resources.gpus[0] matches nothing on this node", "resources.gpus[2] matches nothing on this node",
			},
		},
		"the first matching rule names a profile": {
			"mig-h100", func(c *Config) {
				c.MIGStrategy = MIGMixed
				c.GPUs.Include = []Selector{"0", "5"}
				c.Names.MIG = []NameRule{{"1g.10gb", "nvidia.com/small"}, {"1g.*", "nvidia.com/small-special"}}
			},
			[]string{
				"nvidia.com/gpu:",
				"nvidia.com/mig-2g.20gb: 0:1",
				"nvidia.com/mig-3g.40gb: 0:0",
				"nvidia.com/mig-4g.40gb: 5:0",
				"nvidia.com/small: 0:2 5:2",
				"nvidia.com/small-special: 0:3 5:1",
			},
			excluded(1, 2, 3, 4, 6, 7),
		},
		"a rule for a model names its MIG devices with mig-strategy single": {
			"mig-h100", func(c *Config) {
				c.MIGStrategy, c.GPUs.Include = MIGSingle, []Selector{"2"}
				c.Names.GPUs = []NameRule{{"*h100*", "nvidia.com/h100"}}
				c.Names.MIG = []NameRule{{"*", "nvidia.com/slice"}}
			},
			[]string{"nvidia.com/h100: 2:0"},
			append(excluded(0, 1, 3, 4, 5, 6, 7), "resources.mig[0] matches nothing on this node"),
		},
		"replicas": {
			"workstation", timeSlice(SharingRule{Name: "nvidia.com/gpu", Replicas: 3}),
			[]string{"nvidia.com/gpu: 0::0 0::1 0::2"},
			nil,
		},
		"rename-by-default appends .shared to the name": {
			"workstation", func(c *Config) {
				c.Sharing.TimeSlicing = TimeSlicing{
					RenameByDefault: true, FailRequestsGreaterThanOne: true,
					Resources: []SharingRule{{Name: "nvidia.com/gpu", Replicas: 2}},
				}
			},
			[]string{"nvidia.com/gpu.shared: 0::0 0::1 (at most 1)"},
			nil,
		},
		"each rule has its own replicas and name": {
			"pcie-quad", func(c *Config) {
				c.Sharing.TimeSlicing = TimeSlicing{RenameByDefault: true, Resources: []SharingRule{
					{Name: "nvidia.com/gpu", Devices: []Selector{"1"}, Replicas: 2},
					{Name: "nvidia.com/gpu", Devices: []Selector{"2", "1"}, Replicas: 3, Rename: "nvidia.com/third"},
				}}
			},
			[]string{"nvidia.com/gpu: 0 3", "nvidia.com/gpu.shared: 1::0 1::1", "nvidia.com/third: 2::0 2::1 2::2"},
			nil,
		},
		"shared and unshared devices of one resource are a problem": {
			"pcie-quad", timeSlice(SharingRule{Name: "nvidia.com/gpu", Devices: []Selector{"1"}, Replicas: 2}),
			[]string{"nvidia.com/gpu: 0 1::0 1::1 2 3"},
			[]string{
				"nvidia.com/gpu has devices that are shared and devices that are not; set rename for the shared ones",
			},
		},
		"a rule for a MIG resource shares its devices": {
			"mig-h100", func(c *Config) {
				c.MIGStrategy, c.GPUs.Include = MIGMixed, []Selector{"0", "2"}
				c.Sharing.TimeSlicing = TimeSlicing{RenameByDefault: true, Resources: []SharingRule{
					{Name: "nvidia.com/mig-7g.80gb", Replicas: 2},
					{Name: "nvidia.com/mig-3g.40gb", Devices: []Selector{"0:1"}, Replicas: 2},
					{Name: "nvidia.com/mig-2g.20gb", Devices: []Selector{"0:1"}, Replicas: 2},
					{Name: "nvidia.com/no-such", Replicas: 2},
				}}
			},
			[]string{
				"nvidia.com/gpu:", "nvidia.com/mig-1g.10gb: 0:2", "nvidia.com/mig-1g.10gb.me: 0:3",
				"nvidia.com/mig-2g.20gb.shared: 0:1::0 0:1::1", "nvidia.com/mig-3g.40gb: 0:0",
				"nvidia.com/mig-7g.80gb.shared: 2:0::0 2:0::1",
			},
			append(excluded(1, 3, 4, 5, 6, 7),
				"sharing.time-slicing.resources[1] matches nothing on this node",
				"sharing.time-slicing.resources[3] matches nothing on this node"),
		},
		"a rule for sharing refers to renamed resources": {
			"workstation", func(c *Config) {
				c.Names.GPUs = []NameRule{{"*", "nvidia.com/desk"}}
				c.Sharing.TimeSlicing.Resources = []SharingRule{
					{Name: "nvidia.com/gpu", Replicas: 2}, {Name: "nvidia.com/desk", Replicas: 2},
				}
			},
			[]string{"nvidia.com/desk: 0::0 0::1"},
			[]string{"sharing.time-slicing.resources[0] matches nothing on this node"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			resources, findings := build(t, loadSnapshot(t, tt.machine), changed(tt.change))
			if diff := cmp.Diff(tt.want, formatResources(resources)); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if diff := cmp.Diff(tt.findings, findings); diff != "" {
				t.Errorf("findings: -want +got\n%s", diff)
			}
		})
	}
}

// excluded returns the findings about GPUs that the filter excludes.
func excluded(indices ...int) []string {
	var list []string
	for _, i := range indices {
		list = append(list, fmt.Sprintf("GPU %d is excluded by gpus.include or gpus.exclude", i))
	}
	return list
}

func TestDevicesHaveTheFieldsOfTheSnapshot(t *testing.T) {
	s := loadSnapshot(t, "mig-h100")
	c := changed(func(c *Config) {
		c.MIGStrategy = MIGMixed
		c.Sharing.TimeSlicing.Resources = []SharingRule{{Name: "nvidia.com/mig-2g.20gb", Replicas: 2}}
	})
	resources, _ := build(t, s, c)
	whole, parent, mig := s.Devices[6], s.Devices[0], s.Devices[0].MIG[1]
	want := Device{
		ID: whole.UUID, UUID: whole.UUID, Parent: whole.UUID, Index: 6, MIGIndex: NoMIG, Replica: NoReplica,
		NUMANode: 1, Healthy: true, Model: "NVIDIA H100 80GB HBM3", PCIBusID: "0000:d1:00.0",
		MemoryBytes: whole.MemoryBytes, IndexName: "6",
	}
	if diff := cmp.Diff(want, find(t, resources, "nvidia.com/gpu", 0)); diff != "" {
		t.Errorf("whole GPU: -want +got\n%s", diff)
	}
	want = Device{
		ID: mig.UUID + "::1", UUID: mig.UUID, Parent: parent.UUID, Index: 0, MIGIndex: 1, Replica: 1, NUMANode: 0,
		Healthy: true, Model: "NVIDIA H100 80GB HBM3", Profile: "2g.20gb", PCIBusID: "0000:1b:00.0",
		MemoryBytes: mig.MemoryBytes, IndexName: "0:1",
	}
	if diff := cmp.Diff(want, find(t, resources, "nvidia.com/mig-2g.20gb", 1)); diff != "" {
		t.Errorf("replica of a MIG device: -want +got\n%s", diff)
	}
}

func find(t *testing.T, resources []Resource, name string, i int) Device {
	t.Helper()
	at := slices.IndexFunc(resources, func(r Resource) bool { return r.Name == name })
	if at < 0 || i >= len(resources[at].Devices) {
		t.Fatalf("no device %d of %s in %v", i, name, formatResources(resources))
	}
	return resources[at].Devices[i]
}

func TestBuildIsDeterministicAndPure(t *testing.T) {
	s, untouched := loadSnapshot(t, "mig-h100"), loadSnapshot(t, "mig-h100")
	c := changed(func(c *Config) {
		c.MIGStrategy = MIGMixed
		c.Sharing.TimeSlicing.Resources = []SharingRule{{Name: "nvidia.com/mig-1g.10gb", Replicas: 3}}
	})
	first, findings := build(t, s, c)
	for range 20 {
		again, same := build(t, s, c)
		if diff := cmp.Diff(first, again) + cmp.Diff(findings, same); diff != "" {
			t.Fatalf("-first +again\n%s", diff)
		}
	}
	if diff := cmp.Diff(untouched, s); diff != "" {
		t.Errorf("the snapshot changed\n%s", diff)
	}
}

func TestBuildOnDamagedNodes(t *testing.T) {
	for name, tt := range map[string]struct {
		damage   func(*gpu.Snapshot)
		change   func(*Config)
		want     []string
		findings []string
	}{
		"GPUs in MIG mode without MIG devices are not offered": {
			allInMIGMode, func(c *Config) { c.MIGStrategy = MIGMixed },
			[]string{"nvidia.com/gpu:"},
			[]string{
				"GPU 0 is in MIG mode and has no MIG device", "GPU 1 is in MIG mode and has no MIG device",
				"GPU 2 is in MIG mode and has no MIG device", "GPU 3 is in MIG mode and has no MIG device",
				noneOffered,
			},
		},
		"nor with mig-strategy single": {
			allInMIGMode, func(c *Config) { c.MIGStrategy = MIGSingle; c.GPUs.Include = []Selector{"0"} },
			[]string{"nvidia.com/gpu:"},
			slices.Concat([]string{"GPU 0 is in MIG mode and has no MIG device"}, excluded(1, 2, 3), []string{noneOffered}),
		},
		"nor with mig-strategy none": {
			allInMIGMode, func(c *Config) { c.GPUs.Include = []Selector{"1"} },
			[]string{"nvidia.com/gpu:"},
			slices.Concat(excluded(0),
				[]string{"GPU 1 is in MIG mode and is not offered with mig-strategy none; " +
					"set mig-strategy to single or mixed"},
				excluded(2, 3), []string{noneOffered}),
		},
		"a node without GPUs": {
			func(s *gpu.Snapshot) { s.Devices = nil }, func(*Config) {}, []string{"nvidia.com/gpu:"}, nil,
		},
		"all replicas of an unreadable GPU are unhealthy": {
			func(s *gpu.Snapshot) { s.Devices[1].Error = "GPU is lost" },
			timeSlice(SharingRule{Name: "nvidia.com/gpu", Replicas: 2}),
			[]string{"nvidia.com/gpu: 0::0 0::1 1::0! 1::1! 2::0 2::1 3::0 3::1"},
			[]string{"GPU 1 is unhealthy: cannot be read: GPU is lost"},
		},
		"a GPU without a UUID is not offered": {
			func(s *gpu.Snapshot) {
				s.Devices[1] = gpu.Device{Index: 1, Minor: gpu.NoMinor, NUMANode: gpu.NoNUMANode, Error: "GPU is lost"}
				s.Devices[2].UUID = ""
			}, func(*Config) {},
			[]string{"nvidia.com/gpu: 0 3"},
			[]string{
				"GPU 1 is not offered: it has no UUID (PCI address unknown); it cannot be read: GPU is lost",
				"GPU 2 is not offered: it has no UUID",
			},
		},
		"an unreadable GPU does not count for mig-strategy single": {
			func(s *gpu.Snapshot) {
				inMIGMode(&s.Devices[0], "1g.10gb")
				s.Devices[3].Error = "GPU is lost"
			}, func(c *Config) { c.MIGStrategy = MIGSingle; c.GPUs.Exclude = []Selector{"1", "2"} },
			[]string{"nvidia.com/gpu: 0:0 3!"},
			append(excluded(1, 2), "GPU 3 is unhealthy: cannot be read: GPU is lost"),
		},
		"a device without minor numbers is unhealthy": {
			func(s *gpu.Snapshot) {
				s.Devices[0].Minor = gpu.NoMinor
				inMIGMode(&s.Devices[1], "1g.10gb", "1g.10gb")
				s.Devices[1].MIG[1].ComputeInstanceCap = gpu.NoMinor
			}, func(c *Config) { c.MIGStrategy = MIGMixed },
			[]string{"nvidia.com/gpu: 0! 2 3", "nvidia.com/mig-1g.10gb: 1:0 1:1!"},
			[]string{
				"GPU 0 is unhealthy: has a device node whose minor number is unknown",
				"MIG device 1:1 (1g.10gb) is unhealthy: has device nodes in /dev/nvidia-caps whose minor numbers are unknown",
			},
		},
		"the first of two devices with the same UUID is offered": {
			func(s *gpu.Snapshot) { s.Devices[2].UUID = s.Devices[0].UUID },
			func(c *Config) { c.GPUs.Exclude = []Selector{"1", "3"} },
			[]string{"nvidia.com/gpu: 0"},
			slices.Concat(excluded(1),
				[]string{"GPU 2 is not offered: another device has the same UUID GPU-0"}, excluded(3)),
		},
		"a UUID longer than a device ID is not offered": {
			func(s *gpu.Snapshot) {
				s.Devices[0].UUID = "GPU-" + strings.Repeat("0", 60)
				s.Devices[1].UUID = "GPU-" + strings.Repeat("1", 59)
				s.Devices[2].UUID = "GPU-" + strings.Repeat("2", 56)
			}, timeSlice(SharingRule{
				Name: "nvidia.com/gpu", Devices: []Selector{"0", "1", "2"}, Replicas: 10, Rename: "a.b/c",
			}),
			[]string{
				"a.b/c: 2::0 2::1 2::2 2::3 2::4 2::5 2::6 2::7 2::8 2::9",
				"nvidia.com/gpu: 1 3",
			},
			[]string{
				`GPU 0 is not offered: its UUID "GPU-` + strings.Repeat("0", 60) + `" has 64 characters, more than 63`,
				"GPU-" + strings.Repeat("1", 59) + " is not shared: the IDs of 10 replicas would have 66 characters, " +
					"more than 63",
			},
		},
		"a profile without a valid resource name is not offered": {
			func(s *gpu.Snapshot) {
				inMIGMode(&s.Devices[0], "1g 10gb", "1g.24gb+me,gfx", "1g.12gb-me", strings.Repeat("x", 60))
			}, func(c *Config) { c.MIGStrategy = MIGMixed; c.GPUs.Include = []Selector{"0"} },
			[]string{"nvidia.com/gpu:", "nvidia.com/mig-1g.12gb-me: 0:2", "nvidia.com/mig-1g.24gb.me.gfx: 0:1"},
			append([]string{
				`MIG device 0:0 (1g 10gb) is not offered: resource name "nvidia.com/mig-1g 10gb": ` +
					`the part after the slash may have letters, digits and - _ . between letters or digits`,
				"MIG device 0:3 (" + strings.Repeat("x", 60) + `) is not offered: resource name "nvidia.com/mig-` +
					strings.Repeat("x", 60) + `": ` +
					`the part after the slash has 64 characters, more than 63`,
			}, excluded(1, 2, 3)...),
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := loadSnapshot(t, "pcie-quad")
			for i := range s.Devices {
				s.Devices[i].UUID = fmt.Sprintf("GPU-%d", i)
			}
			tt.damage(s)
			resources, findings := build(t, s, changed(tt.change))
			if diff := cmp.Diff(tt.want, formatResources(resources)); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if diff := cmp.Diff(tt.findings, findings); diff != "" {
				t.Errorf("findings: -want +got\n%s", diff)
			}
		})
	}
}

func allInMIGMode(s *gpu.Snapshot) {
	for i := range s.Devices {
		inMIGMode(&s.Devices[i])
	}
}

func inMIGMode(d *gpu.Device, profiles ...string) {
	d.MIGEnabled = true
	for i, p := range profiles {
		d.MIG = append(d.MIG, gpu.MIGDevice{Index: i, UUID: fmt.Sprintf("MIG-%d-%d", d.Index, i), Profile: p})
	}
}

func TestBuildFollowsARepartitionedNode(t *testing.T) {
	c := changed(func(c *Config) { c.MIGStrategy = MIGMixed; c.GPUs.Include = []Selector{"0", "1"} })
	s := loadSnapshot(t, "pcie-quad")
	for i, step := range []struct {
		change func()
		want   []string
	}{
		{func() {}, []string{"nvidia.com/gpu: 0 1"}},
		{func() { inMIGMode(&s.Devices[0]) }, []string{"nvidia.com/gpu: 1"}},
		{
			func() { inMIGMode(&s.Devices[0], "1g.10gb", "1g.10gb") },
			[]string{"nvidia.com/gpu: 1", "nvidia.com/mig-1g.10gb: 0:0 0:1"},
		},
		{
			func() { s.Devices[0].MIG = nil; inMIGMode(&s.Devices[0], "7g.80gb") },
			[]string{"nvidia.com/gpu: 1", "nvidia.com/mig-7g.80gb: 0:0"},
		},
		{func() { s.Devices[0].MIG, s.Devices[0].MIGEnabled = nil, false }, []string{"nvidia.com/gpu: 0 1"}},
	} {
		step.change()
		resources, _ := build(t, s, c)
		if diff := cmp.Diff(step.want, formatResources(resources)); diff != "" {
			t.Errorf("step %d: -want +got\n%s", i, diff)
		}
	}
}

func TestFindingsAreProblemsOrNotes(t *testing.T) {
	s := loadSnapshot(t, "pcie-quad")
	s.Devices[1].Error = "GPU is lost"
	s.Devices[2].MIGEnabled = true
	s.Devices[3].MIGEnabled, s.Devices[3].Error = true, "GPU is lost"
	_, findings, err := Build(s, changed(func(c *Config) {
		c.GPUs.Exclude, c.MIGStrategy = []Selector{"0"}, MIGMixed
	}))
	want := []Finding{
		{Text: "GPU 0 is excluded by gpus.include or gpus.exclude"},
		{Text: "GPU 1 is unhealthy: cannot be read: GPU is lost", Severe: true},
		{Text: "GPU 2 is in MIG mode and has no MIG device"},
		{Text: "GPU 3 cannot be read: GPU is lost", Severe: true},
	}
	if diff := cmp.Diff(want, findings); diff != "" || err != nil {
		t.Errorf("%v -want +got\n%s", err, diff)
	}
}
