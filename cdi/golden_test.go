package cdi

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

// goldenRoot replaces the directory of the simulated node in golden files.
const goldenRoot = "/node"

// generate is the spec of a simulated node.
func generate(t testing.TB, n *sim.Node, o Options) []byte {
	t.Helper()
	h, err := host.New(n.Root(), "", "")
	testenv.Must(t, err)
	s, err := n.Snapshot()
	testenv.Must(t, err)
	d, err := driver.Discover(h, s.DriverVersion)
	testenv.Must(t, err)
	data, err := Marshal(mustGenerate(t, s, d, o), JSON)
	testenv.Must(t, err)
	return data
}

// The specs of all known machines are in specs/, so that a change of the generator can be reviewed.
func TestGolden(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		testenv.Skip(t, "the golden specs are those of amd64")
	}
	for _, machine := range sim.Machines() {
		t.Run(machine, func(t *testing.T) {
			t.Parallel()
			n := simtest.Node(t, machine)
			got := bytes.ReplaceAll(generate(t, n, Options{}), []byte(n.Root()+"/"), []byte(goldenRoot+"/"))
			path := filepath.Join("..", "specs", machine+".json")
			if *update {
				testenv.Must(t, os.WriteFile(path, got, 0o644))
			}
			want, err := os.ReadFile(path)
			testenv.Must(t, err)
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("spec (-want +got); -update writes it:\n%s", diff)
			}
			if bytes.Contains(got, []byte(t.TempDir())) {
				t.Error("a path of this test is in the golden file")
			}
			if _, err := cdilib.ReadSpec(path, 0); err != nil {
				t.Errorf("the CDI library refuses the spec: %v", err)
			}
		})
	}
}

// Every golden file is one of a known machine.
func TestGoldenFilesAreOfMachines(t *testing.T) {
	files, err := filepath.Glob("../specs/*.json")
	testenv.Must(t, err)
	var got []string
	for _, f := range files {
		if name := strings.TrimSuffix(filepath.Base(f), ".json"); !strings.HasSuffix(name, ".schema") {
			got = append(got, name)
		}
	}
	if diff := cmp.Diff(sim.Machines(), got); diff != "" {
		t.Errorf("golden files (-machines +files):\n%s", diff)
	}
}

// validate finds no problem in the spec of a simulated node, with the path of a program that exists as its hook.
func TestGeneratedSpecsAreValid(t *testing.T) {
	n := simtest.Node(t, "mig-h100")
	spec, err := cdilib.ParseSpec(generate(t, n, Options{HookPath: n.SMI()}))
	testenv.Must(t, err)
	if problems := validate(spec); len(problems) > 0 {
		t.Errorf("problems: %v", problems)
	}
}

func BenchmarkDiscoverAndGenerate(b *testing.B) {
	n := simtest.Node(b, "dgx-h100")
	h, err := host.New(n.Root(), "", "")
	testenv.Must(b, err)
	s, err := n.Snapshot()
	testenv.Must(b, err)
	d, err := driver.Discover(h, s.DriverVersion)
	testenv.Must(b, err)
	b.Run("discover", func(b *testing.B) {
		for b.Loop() {
			if _, err := driver.Discover(h, s.DriverVersion); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("generate", func(b *testing.B) {
		for b.Loop() {
			mustGenerate(b, s, d, Options{})
		}
	})
	b.Run("marshal", func(b *testing.B) {
		spec := mustGenerate(b, s, d, Options{})
		for b.Loop() {
			if _, err := Marshal(spec, JSON); err != nil {
				b.Fatal(err)
			}
		}
	})
}
