package labels

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

// node returns a simulated machine with the default configuration, changed.
func node(t *testing.T, machine string, change func(*Node)) *Node {
	t.Helper()
	m, err := sim.LoadMachine(machine)
	testenv.Must(t, err)
	n := &Node{
		Snapshot: m.Snapshot("580.126.09"), Machine: "DGXH100",
		Config: resource.Config{Resource: "nvidia.com/gpu", MIGStrategy: resource.MIGNone},
	}
	if change != nil {
		change(n)
	}
	n.Resources, _, err = resource.Build(n.Snapshot, n.Config)
	testenv.Must(t, err)
	return n
}

func (n *Node) timeSlice(rules ...resource.SharingRule) {
	n.Config.Sharing.TimeSlicing.Resources = rules
}

func mixed(n *Node) { n.Config.MIGStrategy = resource.MIGMixed }

// single leaves only a GPU with MIG devices of one profile.
func single(n *Node) {
	n.Config.MIGStrategy = resource.MIGSingle
	n.Snapshot.Devices = n.Snapshot.Devices[4:5]
}

func TestFamily(t *testing.T) {
	for capability, want := range map[string]string{
		"7.5": "turing", "8.9": "ada-lovelace", "12.1": "blackwell", "13.0": "rubin", "99.0": "undefined",
	} {
		if got := familyOf(&gpu.Device{ComputeCapability: capability}); got != want {
			t.Errorf("%s: %q, want %q", capability, got, want)
		}
	}
}

func TestGolden(t *testing.T) {
	first := resource.Selector("0")
	for name, c := range map[string]struct {
		machine string
		change  func(*Node)
	}{
		"whole GPUs":              {"dgx-h100", nil},
		"a GPU with a display":    {"workstation", nil},
		"GPUs without a MIG mode": {"dgx1-v100", func(n *Node) { n.Machine = "" }},
		"an excluded GPU": {"pcie-quad", func(n *Node) {
			n.Config.GPUs.Exclude = []resource.Selector{first}
		}},
		"a GPU that cannot be read": {"pcie-pair", func(n *Node) {
			d := &n.Snapshot.Devices[0]
			*d = gpu.Device{
				UUID: d.UUID, Name: d.Name, PCIBusID: d.PCIBusID, PCIClass: d.PCIClass, MIGCapable: d.MIGCapable,
				Minor: gpu.NoMinor, Error: "GPU is lost",
			}
		}},
		"two products": {"pcie-quad", func(n *Node) {
			n.Snapshot.Devices[0].Name, n.Snapshot.Devices[0].PCIClass = "NVIDIA T4", "0x030000"
		}},
		"shared GPUs": {"dgx-a100", func(n *Node) {
			n.timeSlice(resource.SharingRule{Name: "nvidia.com/gpu", Replicas: 4})
		}},
		"shared GPUs under another name": {"dgx-a100", func(n *Node) {
			n.Config.Sharing.TimeSlicing.RenameByDefault = true
			n.timeSlice(resource.SharingRule{Name: "nvidia.com/gpu", Replicas: 4})
		}},
		"one of the GPUs is shared": {"dgx-a100", func(n *Node) {
			n.timeSlice(resource.SharingRule{
				Name: "nvidia.com/gpu", Replicas: 4, Devices: []resource.Selector{first}, Rename: "nvidia.com/quarter",
			})
		}},
		"GPUs that MPS shares": {"dgx-h100", func(n *Node) {
			n.Config.MPS = true
			n.Config.Sharing.MPS.Resources = []resource.SharingRule{{Name: "nvidia.com/gpu", Replicas: 10}}
		}},
		"MIG devices that are not offered": {"mig-h100", nil},
		"MIG devices, mixed":               {"mig-h100", mixed},
		"shared MIG devices, mixed": {"mig-h100", func(n *Node) {
			mixed(n)
			n.timeSlice(resource.SharingRule{Name: "nvidia.com/mig-1g.10gb", Replicas: 2})
		}},
		"MIG devices, single": {"mig-h100", single},
		"shared MIG devices, single": {"mig-h100", func(n *Node) {
			single(n)
			n.timeSlice(resource.SharingRule{Name: "nvidia.com/gpu", Replicas: 3})
		}},
		"several profiles, single": {"mig-h100", func(n *Node) { n.Config.MIGStrategy = resource.MIGSingle }},
		"no GPU in MIG mode, single": {"dgx-h100", func(n *Node) {
			n.Config.MIGStrategy = resource.MIGSingle
		}},
		"a GPU without a MIG device beside whole GPUs, single": {"dgx-h100", func(n *Node) {
			n.Config.MIGStrategy = resource.MIGSingle
			n.Snapshot.Devices[0].MIGEnabled = true
		}},
		"a fabric of several hosts": {"dgx-h100", func(n *Node) {
			for i := range n.Snapshot.Devices {
				n.Snapshot.Devices[i].FabricClique = "0f2a3b4c-0000-4000-8000-00000000abcd.7"
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got := format(node(t, c.machine, c.change).Labels())
			file := filepath.Join("testdata", strings.NewReplacer(" ", "-", ",", "").Replace(name)+".golden")
			if *update {
				testenv.Must(t, os.WriteFile(file, []byte(got), 0o644))
				return
			}
			want, err := os.ReadFile(file)
			testenv.Must(t, err)
			if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
				t.Errorf("labels (-want +got; -update writes them):\n%s", diff)
			}
			checkValid(t, got)
		})
	}
}

// Keys and values of labels, from the API conventions of Kubernetes. The prefix of a key is nvidia.com.
var (
	validKey   = regexp.MustCompile(`^nvidia\.com/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$`)
	validValue = regexp.MustCompile(`^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$`)
)

func checkValid(t *testing.T, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		if !validKey.MatchString(key) || !validValue.MatchString(value) {
			t.Errorf("invalid label %q", line)
		}
	}
}

// Unhealthy devices do not change the labels.
func TestHealthIsNoLabel(t *testing.T) {
	n := node(t, "dgx-h100", nil)
	want := n.Labels()
	n.Resources = resource.MarkUnhealthy(n.Resources, func(*resource.Device) string { return "is faulty" })
	if diff := cmp.Diff(want, n.Labels()); diff != "" {
		t.Errorf("-healthy +unhealthy:\n%s", diff)
	}
}

func TestANodeWithoutGPUsHasNoLabels(t *testing.T) {
	n := node(t, "dgx-h100", func(n *Node) { n.Snapshot.Devices = nil })
	if got := n.Labels(); len(got) > 0 {
		t.Errorf("labels %v", got)
	}
}

func TestGPUsOfSeveralCliquesHaveNoCliqueLabel(t *testing.T) {
	n := node(t, "dgx-h100", func(n *Node) {
		n.Snapshot.Devices[1].FabricClique, n.Snapshot.Devices[2].FabricClique = "a.1", "a.2"
	})
	if got, there := n.Labels()["nvidia.com/gpu.clique"]; there {
		t.Errorf("clique %q", got)
	}
}

// A product whose name is too long keeps the suffixes, by which pods select.
func TestALongNameLosesItsEnd(t *testing.T) {
	n := node(t, "mig-h100", func(n *Node) {
		single(n)
		n.Snapshot.Devices[0].Name = "NVIDIA " + strings.Repeat("x", 80)
		n.timeSlice(resource.SharingRule{Name: "nvidia.com/gpu", Replicas: 3})
	})
	got := n.Labels()["nvidia.com/gpu.product"]
	if len(got) != maxValue || !strings.HasPrefix(got, "NVIDIA-xxx") || !strings.HasSuffix(got, "xx-MIG-1g.10gb-SHARED") {
		t.Errorf("product %q", got)
	}
}

// Whatever text the host gives, each line is one valid label.
func FuzzLabels(f *testing.F) {
	f.Add("NVIDIA H100 80GB HBM3", "DGXH100", "580.126.09", "13.0", "1g.10gb+me", "9.0", "id.1")
	f.Add("a\nnvidia.com/b=c", "To Be Filled By O.E.M.", "580\n", "x.y.z", "1g.10gb\n=", "-.-", "\x00")
	f.Add(strings.Repeat("é", 70), strings.Repeat("-", 70), "", "", strings.Repeat("1", 70), ".", ".")
	m, err := sim.LoadMachine("mig-h100")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, name, machine, driver, cuda, profile, compute, clique string) {
		for _, strategy := range []resource.MIGStrategy{resource.MIGNone, resource.MIGSingle, resource.MIGMixed} {
			s := m.Snapshot(driver)
			s.CUDAVersion = cuda
			for i := range s.Devices {
				d := &s.Devices[i]
				d.Name, d.ComputeCapability, d.FabricClique, d.PCIClass = name, compute, clique, compute
				for j := range d.MIG {
					d.MIG[j].Profile = profile
				}
			}
			c := resource.Config{Resource: "nvidia.com/gpu", MIGStrategy: strategy}
			resources, _, err := resource.Build(s, c)
			if err != nil {
				t.Skip(err)
			}
			n := Node{Snapshot: s, Resources: resources, Config: c, Machine: machine}
			text := format(n.Labels())
			checkValid(t, text)
			if slices.Contains(strings.Split(text, "\n"), "nvidia.com/b=c") {
				t.Error("a name made a label of its own")
			}
		}
	})
}
