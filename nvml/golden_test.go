package nvml

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

// Every machine's snapshot is that of the simulated node and that of its golden file.
func TestGolden(t *testing.T) {
	if len(sim.Machines()) < 7 {
		t.Errorf("there are the machines %q, want at least seven", sim.Machines())
	}
	for _, machine := range sim.Machines() {
		t.Run(machine, func(t *testing.T) {
			if !runAlone(t) {
				return
			}
			node := createNode(t, machine)
			session, h := openNode(t, node)
			got := readTopology(t, session, h)
			compareToNode(t, node, got)
			compareToGolden(t, filepath.Join("testdata", machine+".golden.json"), got)
			testenv.Must(t, session.Close())
			devices, err := ReadDevices(t.Context(), Options{Host: h})
			testenv.Must(t, err)
			if diff := cmp.Diff(got.Devices, devices.Devices); diff != "" || len(devices.Links) > 0 {
				t.Errorf("ReadDevices has %d links and differs (-topology +devices):\n%s", len(devices.Links), diff)
			}
		})
	}
}

// A large machine has no golden file, which would have thousands of links.
func TestLargeMachine(t *testing.T) {
	if !runAlone(t) {
		return
	}
	node := createNode(t, "pcie-fabric-128")
	session, h := openNode(t, node)
	got := readTopology(t, session, h)
	if len(got.Devices) != 128 || len(got.Links) != 128*127/2 {
		t.Errorf("%d devices and %d links", len(got.Devices), len(got.Links))
	}
	compareToNode(t, node, got)
}

func compareToGolden(t testing.TB, path string, got *gpu.Snapshot) {
	t.Helper()
	text, err := json.MarshalIndent(got, "", "  ")
	testenv.Must(t, err)
	text = append(text, '\n')
	if *update {
		testenv.Must(t, os.WriteFile(path, text, 0o644))
		return
	}
	want, err := os.ReadFile(path)
	testenv.Must(t, err)
	if diff := cmp.Diff(string(want), string(text)); diff != "" {
		t.Errorf("%s (-want +got; -update writes it):\n%s", path, diff)
	}
}
