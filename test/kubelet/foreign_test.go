package kubelet

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/cdi"
)

// writeForeignSpec writes another program's CDI spec with devices of these names beside the plugin's. It returns its
// path.
func (f *fixture) writeForeignSpec(t *testing.T, names ...string) string {
	t.Helper()
	var devices []string
	for _, name := range names {
		devices = append(devices, fmt.Sprintf(`{"name": %q, "containerEdits": {"env": ["FOREIGN=1"]}}`, name))
	}
	text := fmt.Sprintf(`{"cdiVersion": "0.5.0", "kind": %q, "devices": [%s]}`,
		cdi.DefaultKind, strings.Join(devices, ","))
	path := filepath.Join(f.Host("/var/run/cdi"), "foreign.json")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(path) })
	return path
}

// TestAForeignSpecTakesOnlyTheDevicesItNames adds and removes CDI specs of another program: one that defines names that
// no allocation needs, and one that defines a GPU's UUID.
func TestAForeignSpecTakesOnlyTheDevicesItNames(t *testing.T) {
	f := setUp(t, "pcie-quad")
	all := f.uuids(t)
	f.awaitDevices(t, gpuName, all)
	f.writeForeignSpec(t, "0", cdi.AllDevices)
	f.reconcile(t)
	p := newPod("whole", gpuName, 4)
	f.check(t, p, f.launch(t, p))
	if err := f.Remove(t.Context(), p.Name); err != nil {
		t.Fatal(err)
	}

	path := f.writeForeignSpec(t, all[1])
	f.awaitDevices(t, gpuName, slices.Concat(all[:1], all[2:]))
	p = newPod("rest", gpuName, 3)
	f.check(t, p, f.launch(t, p))
	f.expectRefusal(t, newPod("late", gpuName, 1))
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	f.awaitDevices(t, gpuName, all)
	p = newPod("last", gpuName, 1)
	f.check(t, p, f.launch(t, p))
}
