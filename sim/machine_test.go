package sim

import (
	"bytes"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

func load(t *testing.T, name string) *Machine {
	t.Helper()
	m, err := LoadMachine(name)
	testenv.Must(t, err)
	return m
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
		"a value of the wrong type": {
			"sms: 10", "sms: many",
			"line 3: models.x.sms: want a whole number, got \"many\"",
		},
		"a second document":        {"nvlink:", "---\nnvlink:", "more than one YAML document"},
		"no GPUs":                  {good[strings.Index(good, "gpus:"):], "", "gpus: want 1 to 128 GPUs, not 0"},
		"a PCI id without a colon": {"10de:2330", "10de2330", "line 3: models.x.pci: \"10de2330\" is not a PCI id"},
		"an unknown architecture": {
			"hopper", "hooper",
			"models.x.architecture: \"hooper\" is not one of ada, ampere, blackwell, hopper",
		},
		"memory that overflows":      {"8GiB", "99999999999GiB", "is not an amount"},
		"a name with a control sign": {"name: X", "name: \"X\\e\"", "models.x.name: want 1 to 95 printable"},
		"a NUMA node without CPUs": {
			"bus: \"0000:01:00.0\", numa: 0", "bus: \"0000:01:00.0\", numa: 1",
			"line 6: gpus.0.numa: the CPUs of node 1",
		},
		"a bus address twice": {
			"0000:02:00.0", "0000:01:00.0",
			"line 7: gpus.1.bus: GPU 0 has the same address",
		},
		"a minor out of range": {
			"bus: \"0000:01:00.0\",", "bus: \"0000:01:00.0\", minor: 128,",
			"line 6: gpus.0.minor: a minor is 0 to 127",
		},
		"MIG beyond the capabilities": {
			"bus: \"0000:01:00.0\",", "bus: \"0000:01:00.0\", minor: 32, mig: [],",
			"line 6: gpus.0.mig: GPU 0 has the minor 32; the driver has capabilities for 0 to 31 only",
		},
		"an unknown model": {
			"bus: \"0000:01:00.0\",", "bus: \"0000:01:00.0\", model: y,",
			"gpus.0.model: \"y\" is not one of x",
		},
		"profiles that do not fit": {
			"bus: \"0000:01:00.0\",", "bus: \"0000:01:00.0\", mig: [7g.80gb, 1g.10gb],",
			"line 6: gpus.0.mig: the profiles 7g.80gb, 1g.10gb do not fit",
		},
		"a matrix of another size": {"[[0, 2], [2, 0]]", "[[0, 2]]", "line 8: nvlink.matrix: want 2 rows"},
		"a matrix with one direction": {
			"[[0, 2], [2, 0]]", "[[0, 2], [1, 0]]",
			"GPU 0 has 2 links to GPU 1, which has 1 to it",
		},
		"switches and a matrix": {
			"matrix:", "perGPU: 1, switches: [[\"0000:05:00.0\"]], matrix:",
			"want either switches or a matrix",
		},
		"too many links to switches": {
			"matrix: [[0, 2], [2, 0]]", "perGPU: 19, switches: [[\"0000:05:00.0\"]]",
			"nvlink.perGPU",
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

func FuzzParseMachine(f *testing.F) {
	f.Add([]byte(good))
	for _, name := range Machines() {
		data, err := machineFiles.ReadFile("machines/" + name + ".yaml")
		testenv.Must(f, err)
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
