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

// foreign writes the CDI spec of another program beside the plugin's, with devices of those names, and returns its path.
func (f *fixture) foreign(t *testing.T, names ...string) string {
	t.Helper()
	var devices []string
	for _, name := range names {
		devices = append(devices, fmt.Sprintf(`{"name": %q, "containerEdits": {"env": ["FOREIGN=1"]}}`, name))
	}
	text := fmt.Sprintf(`{"cdiVersion": "0.5.0", "kind": %q, "devices": [%s]}`, cdi.DefaultKind, strings.Join(devices, ","))
	path := filepath.Join(f.Host("/var/run/cdi"), "foreign.json")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(path) })
	return path
}

// TestAnotherSpecCostsOnlyTheDevicesItTakes has another CDI spec come and go: one that takes names which no allocation
// needs, and one that takes a GPU's UUID.
func TestAnotherSpecCostsOnlyTheDevicesItTakes(t *testing.T) {
	f := setUp(t, "pcie-quad")
	all := f.uuids(t)
	f.awaitDevices(t, gpuName, all)
	f.foreign(t, "0", cdi.AllDevices)
	f.reconcile(t)
	p := pod("whole", gpuName, 4)
	f.check(t, p, f.launch(t, p))
	if err := f.Remove(t.Context(), p.Name); err != nil {
		t.Fatal(err)
	}

	path := f.foreign(t, all[1])
	f.awaitDevices(t, gpuName, slices.Concat(all[:1], all[2:]))
	p = pod("rest", gpuName, 3)
	f.check(t, p, f.launch(t, p))
	f.refused(t, pod("late", gpuName, 1))
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	f.awaitDevices(t, gpuName, all)
	p = pod("last", gpuName, 1)
	f.check(t, p, f.launch(t, p))
}
