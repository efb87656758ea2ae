package mps

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// The check of systemd exits with 0 for unknown keys too, and prints them.
func TestSystemdAcceptsTheUnit(t *testing.T) {
	t.Parallel()
	program, err := exec.LookPath("systemd-analyze") //nolint:misspell // its name
	if err != nil {
		testenv.Skip(t, "there is no systemd here")
	}
	text, err := os.ReadFile("../../deploy/gpu-cdi-mps@.service")
	testenv.Must(t, err)
	unit := filepath.Join(t.TempDir(), "gpu-cdi-mps@"+testGPU+".service")
	// The program of a unit must exist.
	changed := strings.ReplaceAll(string(text), "/usr/local/sbin/gpu-cdi-plugin", "/bin/true")
	testenv.Must(t, os.WriteFile(unit, []byte(changed), 0o644))
	out, err := exec.CommandContext(t.Context(), program, "verify", "--man=no", unit).CombinedOutput()
	if err != nil || len(out) > 0 {
		t.Errorf("verify the unit: %v\n%s", err, out)
	}
}
