package mps

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// systemd-analyze exits with 0 for unknown keys too, and prints them.
func TestSystemdAcceptsTheUnit(t *testing.T) {
	t.Parallel()
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("there is no systemd here")
	}
	text, err := os.ReadFile("../../deploy/gpu-cdi-mps@.service")
	must(t, err)
	unit := filepath.Join(t.TempDir(), "gpu-cdi-mps@"+testGPU+".service")
	// The program of a unit must exist.
	must(t, os.WriteFile(unit, []byte(strings.ReplaceAll(string(text), "/usr/local/sbin/gpu-cdi-plugin", "/bin/true")), 0o644))
	if out, err := exec.CommandContext(t.Context(), analyze, "verify", "--man=no", unit).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}
