package sim

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
)

func load(t *testing.T, name string) *Machine {
	t.Helper()
	m, err := LoadMachine(name)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMachines(t *testing.T) {
	want := []string{"dgx-a100", "dgx-h100", "dgx1-v100", "hgx-16", "mig-h100", "pcie-pair", "pcie-quad", "workstation"}
	if diff := cmp.Diff(want, Machines()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// matrix returns the links of a machine in the form of nvidia-smi topo -m.
func matrix(m *Machine) string {
	s := m.Snapshot(DefaultDriver)
	var b strings.Builder
	for i := range m.GPUs {
		var row []string
		for j := range m.GPUs {
			l, ok := s.Link(i, j)
			cell := "X"
			if ok {
				cell = l.String()
			}
			row = append(row, cell)
		}
		b.WriteString(strings.Join(row, " ") + "\n")
	}
	return b.String()
}

func TestTopology(t *testing.T) {
	for name, want := range map[string]string{
		"workstation": "X\n",
		"pcie-pair":   "X PHB\nPHB X\n",
		"pcie-quad":   "X NODE SYS SYS\nNODE X SYS SYS\nSYS SYS X PIX\nSYS SYS PIX X\n",
		// As in the DGX-1 paper and in published outputs of nvidia-smi topo -m.
		"dgx1-v100": `X NV1 NV1 NV2 NV2 SYS SYS SYS
NV1 X NV2 NV1 SYS NV2 SYS SYS
NV1 NV2 X NV2 SYS SYS NV1 SYS
NV2 NV1 NV2 X SYS SYS SYS NV1
NV2 SYS SYS SYS X NV1 NV1 NV2
SYS NV2 SYS SYS NV1 X NV2 NV1
SYS SYS NV1 SYS NV1 NV2 X NV2
SYS SYS SYS NV1 NV2 NV1 NV2 X
`,
	} {
		if diff := cmp.Diff(want, matrix(load(t, name))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestSwitchedMachines(t *testing.T) {
	for name, want := range map[string]struct{ gpus, links, switches int }{
		"dgx-a100": {8, 12, 6}, "dgx-h100": {8, 18, 4}, "hgx-16": {16, 6, 12}, "mig-h100": {8, 18, 4},
	} {
		m := load(t, name)
		s := m.Snapshot(DefaultDriver)
		if len(m.GPUs) != want.gpus || len(m.NVSwitches) != want.switches || len(s.Links) != want.gpus*(want.gpus-1)/2 {
			t.Errorf("%s has %d GPUs, %d switches, %d links", name, len(m.GPUs), len(m.NVSwitches), len(s.Links))
		}
		for _, l := range s.Links {
			if l.NVLinks != want.links || !l.Switched {
				t.Errorf("%s: link %+v, want %d through switches", name, l, want.links)
			}
		}
	}
}

func TestPCIePaths(t *testing.T) {
	paths := map[gpu.PCIePath]int{}
	for _, p := range load(t, "hgx-16").Pairs {
		paths[p.PCIe]++
	}
	want := map[gpu.PCIePath]int{
		gpu.PathSingleSwitch: 8, gpu.PathMultipleSwitches: 16, gpu.PathNode: 32, gpu.PathSystem: 64,
	}
	if diff := cmp.Diff(want, paths); diff != "" {
		t.Errorf("hgx-16 (-want +got):\n%s", diff)
	}
	dgx1 := load(t, "dgx1-v100")
	if p := pciePath(&dgx1.GPUs[1], &dgx1.GPUs[2]); p != gpu.PathHostBridge {
		t.Errorf("DGX-1: GPU 1 and 2 are at %v, want PHB", p)
	}
}

func TestFabrics(t *testing.T) {
	names := fabrics()
	if len(names) != 8 || names[0] != "pcie-fabric-16" || names[7] != "pcie-fabric-128" {
		t.Fatalf("fabrics are %v", names)
	}
	for name, want := range map[string]map[gpu.PCIePath]int{
		"pcie-fabric-16": {
			gpu.PathSingleSwitch: 8, gpu.PathMultipleSwitches: 16, gpu.PathHostBridge: 32,
			gpu.PathNode: 64,
		},
		"pcie-fabric-128": {
			gpu.PathSingleSwitch: 64, gpu.PathMultipleSwitches: 128, gpu.PathHostBridge: 256, gpu.PathNode: 512,
			gpu.PathSystem: 128*127/2 - 960,
		},
	} {
		paths := map[gpu.PCIePath]int{}
		for _, p := range load(t, name).Pairs {
			paths[p.PCIe]++
		}
		if diff := cmp.Diff(want, paths); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	for _, name := range []string{"pcie-fabric-0", "pcie-fabric-20", "pcie-fabric-144", "pcie-fabric-"} {
		if _, err := LoadMachine(name); err == nil || !strings.Contains(err.Error(), "unknown machine") {
			t.Errorf("%s: the error is %v, want ErrUnknownMachine", name, err)
		}
	}
}

func TestIdentitiesAreStableAndDistinct(t *testing.T) {
	seen := map[string]string{}
	for _, name := range append(Machines(), "pcie-fabric-128") {
		m := load(t, name)
		if diff := cmp.Diff(m, load(t, name), cmp.AllowUnexported(Machine{})); diff != "" {
			t.Errorf("%s differs when loaded again:\n%s", name, diff)
		}
		for _, g := range m.GPUs {
			for _, id := range append([]string{g.UUID, g.Serial}, migUUIDs(&g)...) {
				if other, ok := seen[id]; ok {
					t.Errorf("%s and %s have %s", name, other, id)
				}
				seen[id] = name
			}
		}
	}
	// Specs and scripts of users may depend on it.
	if got := load(t, "dgx-h100").GPUs[0].UUID; got != "GPU-0dfbb736-f28f-8264-9719-deb434eaecae" {
		t.Errorf("the UUID of dgx-h100's GPU 0 is now %s", got)
	}
}

func migUUIDs(g *GPU) (list []string) {
	for _, m := range g.MIG {
		list = append(list, m.UUID)
	}
	return list
}

func TestMinorsAreNotAlwaysIndices(t *testing.T) {
	for name, want := range map[string][]int{"pcie-quad": {2, 3, 0, 1}, "mig-h100": {0, 2, 1, 3, 4, 5, 6, 7}} {
		var got []int
		for _, g := range load(t, name).GPUs {
			got = append(got, g.Minor)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: minors %v, want %v", name, got, want)
		}
	}
}

// good is a machine file that the cases of TestMalformedMachineFiles damage.
const good = `description: a test
models:
  x: {name: X, pci: "10de:2330", subsystem: "10de:16c1", architecture: hopper, compute: "9.0", ` +
	`memory: 8GiB, sms: 10, power: 100, mig: h100-80gb}
numa: {0: 0-3}
gpus:
  - {bus: "0000:01:00.0", numa: 0, pcie: "pci0000:00/0000:00:01.0"}
  - {bus: "0000:02:00.0", numa: 0, pcie: "pci0000:00/0000:00:02.0"}
nvlink: {version: 4, speed: 25000, matrix: [[0, 2], [2, 0]]}
`

func TestMalformedMachineFiles(t *testing.T) {
	if _, err := parseMachine("good", []byte(good)); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ old, new, says string }{
		"a malformed driver version": {
			"models:", "driver: newest\nmodels:",
			"line 2: driver: \"newest\" is not a driver version",
		},
		"an unknown key": {"description", "remark", "line 1: unknown key remark"},
		"an unknown key of a GPU": {
			"numa: 0, pcie: \"pci0000:00/0000:00:02.0\"", "nuna: 0",
			"line 7: unknown key gpus[1].nuna; did you mean numa?",
		},
		"a value of the wrong type": {
			"sms: 10", "sms: many",
			"line 3: models.x.sms: want a whole number, got \"many\"",
		},
		"a number for the GPUs": {
			good[strings.Index(good, "gpus:"):], "gpus: 3\n",
			"line 5: gpus: want a list, got \"3\"",
		},
		"a second document":        {"nvlink:", "---\nnvlink:", "more than one YAML document"},
		"text that is not YAML":    {"description: a test", "description: [", "did not find expected"},
		"no GPUs":                  {good[strings.Index(good, "gpus:"):], "", "gpus: want 1 to 128 GPUs, not 0"},
		"a PCI id without a colon": {"10de:2330", "10de2330", "line 3: models.x.pci: \"10de2330\" is not a PCI id"},
		"an unknown architecture": {
			"hopper", "hooper",
			"models.x.architecture: \"hooper\" is not one of ada, ampere, blackwell, hopper",
		},
		"an unknown MIG table":        {"h100-80gb", "h100", "models.x.mig: \"h100\" is not one of a100-40gb"},
		"memory without a number":     {"8GiB", "GiB", "models.x.memory: \"GiB\" is not an amount"},
		"memory that overflows":       {"8GiB", "99999999999GiB", "is not an amount"},
		"a name with a control sign":  {"name: X", "name: \"X\\e\"", "models.x.name: want 1 to 95 printable"},
		"a compute capability of one": {"9.0", "9", "is not a compute capability"},
		"no multiprocessors":          {"sms: 10", "sms: 0", "models.x.sms"},
		"no power":                    {"power: 100", "power: -1", "models.x.power"},
		"a NUMA node without CPUs": {
			"bus: \"0000:01:00.0\", numa: 0", "bus: \"0000:01:00.0\", numa: 1",
			"line 6: gpus.0.numa: the CPUs of node 1",
		},
		"a malformed list of CPUs":  {"0-3", "all", "line 4: numa.0: \"all\" is not a list of CPUs"},
		"a bus address in capitals": {"0000:01:00.0", "0000:1B:00.0", "line 6: gpus.0.bus"},
		"a bus address twice": {
			"0000:02:00.0", "0000:01:00.0",
			"line 7: gpus.1.bus: GPU 0 has the same address",
		},
		"a minor twice": {
			"bus: \"0000:01:00.0\",", "bus: \"0000:01:00.0\", minor: 1,",
			"gpus.1.minor: GPU 0 has the same minor 1",
		},
		"a minor out of range": {
			"bus: \"0000:01:00.0\",", "bus: \"0000:01:00.0\", minor: 128,",
			"line 6: gpus.0.minor: a minor is 0 to 127",
		},
		"MIG beyond the capabilities": {
			"bus: \"0000:01:00.0\",", "bus: \"0000:01:00.0\", minor: 32, mig: [],",
			"line 6: gpus.0.mig: GPU 0 has the minor 32; the driver has capabilities for 0 to 31 only",
		},
		"an upstream without a bridge": {"pci0000:00/0000:00:01.0", "0000:00:01.0", "line 6: gpus.0.pcie"},
		"an unknown model": {
			"bus: \"0000:01:00.0\",", "bus: \"0000:01:00.0\", model: y,",
			"gpus.0.model: \"y\" is not one of x",
		},
		"profiles that do not fit": {
			"bus: \"0000:01:00.0\",", "bus: \"0000:01:00.0\", mig: [7g.80gb, 1g.10gb],",
			"line 6: gpus.0.mig: the profiles 7g.80gb, 1g.10gb do not fit",
		},
		"a matrix of another size": {"[[0, 2], [2, 0]]", "[[0, 2]]", "line 8: nvlink.matrix: want 2 rows"},
		"a row of another size": {
			"[[0, 2], [2, 0]]", "[[0, 2], [2]]",
			"line 8: nvlink.matrix.1: want 2 numbers",
		},
		"a matrix with one direction": {
			"[[0, 2], [2, 0]]", "[[0, 2], [1, 0]]",
			"GPU 0 has 2 links to GPU 1, which has 1 to it",
		},
		"a GPU linked to itself": {
			"[[0, 2], [2, 0]]", "[[1, 2], [2, 0]]",
			"nvlink.matrix.0.0: a GPU has no links to itself",
		},
		"a negative number of links": {"[[0, 2], [2, 0]]", "[[0, -2], [-2, 0]]", "a pair has 0 to 18 links"},
		"switches and a matrix": {
			"matrix:", "perGPU: 1, switches: [[\"0000:05:00.0\"]], matrix:",
			"want either switches or a matrix",
		},
		"too many links to switches": {
			"matrix: [[0, 2], [2, 0]]", "perGPU: 19, switches: [[\"0000:05:00.0\"]]",
			"nvlink.perGPU",
		},
		"GPUs that cannot be divided": {
			"matrix: [[0, 2], [2, 0]]",
			"perGPU: 1, switches: [[\"0000:05:00.0\"], [\"0000:06:00.0\"], [\"0000:07:00.0\"]]",
			"2 GPUs cannot be divided among 3",
		},
		"a switch at a GPU's address": {
			"matrix: [[0, 2], [2, 0]]", "perGPU: 1, switches: [[\"0000:01:00.0\"]]",
			"the address 0000:01:00.0 occurs twice",
		},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(good, c.old, c.new, 1)
			if text == good {
				t.Fatal("the case changes nothing")
			}
			m, err := parseMachine("bad", []byte(text))
			if err == nil || m != nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v and error:\n%v\nwant %q in it", m, err, c.says)
			}
		})
	}
}

func TestErrorListsAllProblems(t *testing.T) {
	text := strings.NewReplacer("hopper", "x", "10de:2330", "y", "0000:01:00.0", "z", "0-3", "w").Replace(good)
	_, err := parseMachine("bad", []byte(text))
	if err == nil || strings.Count(err.Error(), "\n") != 3 {
		t.Errorf("want four problems, got:\n%v", err)
	}
}

func TestLoadMachineFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "mine.yml")
	if err := os.WriteFile(path, []byte(good), 0o600); err != nil {
		t.Fatal(err)
	}
	m := load(t, path)
	if m.Name != "mine" || len(m.GPUs) != 2 {
		t.Errorf("got %s with %d GPUs", m.Name, len(m.GPUs))
	}
	large := filepath.Join(dir, "large.yaml")
	if err := os.WriteFile(large, bytes.Repeat([]byte("#"), maxMachineFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	for file, unknown := range map[string]bool{large: false, dir + "/": false, "no-such": true} {
		if _, err := LoadMachine(file); err == nil || errors.Is(err, ErrUnknownMachine) != unknown {
			t.Errorf("%s: the error is %v", file, err)
		}
	}
}

func FuzzParseMachine(f *testing.F) {
	f.Add([]byte(good))
	for _, name := range Machines() {
		data, err := machineFiles.ReadFile("machines/" + name + ".yaml")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := parseMachine("fuzz", data)
		if (m == nil) == (err == nil) {
			t.Fatalf("got %v and error %v, want exactly one", m, err)
		}
		if m == nil {
			return
		}
		if _, err := parseRecords(bytes.TrimPrefix(describe(m, DefaultDriver, "usr/lib64"),
			[]byte(descriptionHeader))); err != nil {
			t.Errorf("its description: %v", err)
		}
	})
}
