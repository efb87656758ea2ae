package dist

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

const units = "../../deploy/units"

var exposure = regexp.MustCompile(`Overall exposure level for \S+: ([0-9.]+)`)

// TestUnitsAreConfined has systemd rate what the units may do, from 0 to 10.
func TestUnitsAreConfined(t *testing.T) {
	systemd := testenv.Command(t, "systemd-analyze") //nolint:misspell // its name
	for name, most := range map[string]float64{
		"gpu-cdi-watch.service": 1, "gpu-cdi-plugin.service": 2.8, "gpu-cdi-mps@.service": 4,
		"device-manager.service": 3.1,
	} {
		r := proc.Must(t, 0, proc.Cmd{
			Args: []string{systemd, "security", "--offline=true", "--no-pager", filepath.Join(units, name)},
		})
		found := exposure.FindStringSubmatch(r.Stdout)
		if found == nil {
			t.Fatalf("no score of %s in %v", name, r)
		}
		score, err := strconv.ParseFloat(found[1], 64)
		testenv.Must(t, err)
		if t.Logf("%s: %.1f", name, score); score > most {
			t.Errorf("%s: %.1f, want at most %.1f", name, score, most)
		}
	}
}

// TestSystemdAcceptsTheUnits reads what systemd prints, since it exits with 0 for unknown keys too.
func TestSystemdAcceptsTheUnits(t *testing.T) {
	systemd := testenv.Command(t, "systemd-analyze") //nolint:misspell // its name
	dir := t.TempDir()
	var files []string
	for _, name := range []string{
		"gpu-cdi-watch.service", "gpu-cdi-plugin.service", "gpu-cdi-plugin.path", "gpu-cdi-mps@.service",
		"device-manager.service", "device-manager.socket", "device-manager-leases.socket",
	} {
		text := readFile(t, units, name)
		name = strings.Replace(name, "@", "@GPU-8f6c3a1e-0000-4000-8000-000000000001", 1)
		// The program of a unit must exist.
		changed := strings.NewReplacer("/usr/bin/gpu-cdi-plugin", "/bin/true", "/usr/bin/device-manager", "/bin/true").
			Replace(string(text))
		testenv.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(changed), 0o644))
		files = append(files, filepath.Join(dir, name))
	}
	r := proc.Must(t, 0, proc.Cmd{Args: append([]string{systemd, "verify", "--man=no"}, files...)})
	if r.Stdout+r.Stderr != "" {
		t.Errorf("systemd says of the units: %v", r)
	}
}
