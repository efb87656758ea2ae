package nvml

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
)

var update = flag.Bool("update", false, "write the golden files")

// Every machine's snapshot is what the machine is made of, and what stands in its golden file.
func TestGolden(t *testing.T) {
	if len(sim.Machines()) < 7 {
		t.Errorf("there are the machines %q, want at least seven", sim.Machines())
	}
	for _, machine := range sim.Machines() {
		t.Run(machine, func(t *testing.T) {
			if !alone(t) {
				return
			}
			node := nodeOf(t, machine)
			session, h := opened(t, node)
			got := topologyOf(t, session, h)
			compareToNode(t, node, got)
			compareToGolden(t, filepath.Join("testdata", machine+".golden.json"), got)
			must(t, session.Close())
			devices, err := ReadDevices(t.Context(), Options{Host: h})
			must(t, err)
			if diff := cmp.Diff(got.Devices, devices.Devices); diff != "" || len(devices.Links) > 0 {
				t.Errorf("ReadDevices has %d links and differs from ReadTopology (-topology +devices):\n%s", len(devices.Links), diff)
			}
		})
	}
}

// A large machine has no golden file: it is generated, and its thousands of links would be one.
func TestLargeMachine(t *testing.T) {
	if !alone(t) {
		return
	}
	node := nodeOf(t, "pcie-fabric-128")
	session, h := opened(t, node)
	got := topologyOf(t, session, h)
	if len(got.Devices) != 128 || len(got.Links) != 128*127/2 {
		t.Errorf("%d devices and %d links", len(got.Devices), len(got.Links))
	}
	compareToNode(t, node, got)
}

// nodeOf is a simulated node with plain files for its device nodes: the library only opens them, and so the tests need
// no root.
func nodeOf(t testing.TB, machine string) *sim.Node {
	t.Helper()
	return simtest.Node(t, machine, simtest.PlainNodes())
}

// opened is a session that has opened the node's library.
func opened(t testing.TB, node *sim.Node) (*Session, host.Host) {
	t.Helper()
	h := hostOf(t, node)
	session := NewSession(Options{Host: h, Timeout: 20 * time.Second})
	must(t, session.Open(t.Context()))
	t.Cleanup(func() {
		if err := session.Close(); err != nil {
			t.Error(err)
		}
	})
	return session, h
}

func hostOf(t testing.TB, node *sim.Node) host.Host {
	t.Helper()
	h, err := host.New(node.Root(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// compareToNode compares a snapshot to what the node says that it is.
func compareToNode(t testing.TB, node *sim.Node, got *gpu.Snapshot) {
	t.Helper()
	want, err := node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("snapshot (-node +got):\n%s", diff)
	}
}

func compareToGolden(t testing.TB, path string, got *gpu.Snapshot) {
	t.Helper()
	text, err := json.MarshalIndent(got, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	text = append(text, '\n')
	if *update {
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(text)); diff != "" {
		t.Errorf("%s (-want +got; -update writes it):\n%s", path, diff)
	}
}
