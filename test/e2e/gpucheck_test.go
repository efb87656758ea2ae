package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// gpuCheck runs scripts/gpu-check on a node, and returns the file that it appends to.
func gpuCheck(t *testing.T, root string) (res proc.Result, report string) {
	t.Helper()
	testenv.Root(t)
	dir, err := suite.Root()
	testenv.Must(t, err)
	report = filepath.Join(t.TempDir(), "hardware.md")
	res, err = proc.Run(t.Context(), proc.Cmd{
		Args: []string{filepath.Join(dir, "scripts/gpu-check"), "--root", root, "--report", report, "--watch", "1"},
		Env: append(os.Environ(), "BIN="+filepath.Dir(shared.Program(t, "gpu-cdi-plugin")),
			"RUNC="+testenv.Command(t, "runc")),
	})
	testenv.Must(t, err)
	return res, report
}

func TestSlowGPUCheckOfAHealthyNode(t *testing.T) {
	t.Parallel()
	for machine, impossible := range map[string]int{
		"dgx-h100": 2, "mig-h100": 2, // no nvcc
		"workstation": 4, // and one GPU only
	} {
		t.Run(machine, func(t *testing.T) {
			t.Parallel()
			res, report := gpuCheck(t, simtest.Node(t, machine).Root())
			if res.Code != 0 || strings.Count(res.Stdout, "not possible") != impossible {
				t.Fatalf("want exit status 0 and %d steps that are not possible, got %v", impossible, res)
			}
			text, err := os.ReadFile(report)
			if err != nil || strings.Count(string(text), "| ok |") != 16-impossible {
				t.Errorf("want %d steps that are ok in the report, got %v\n%s", 16-impossible, err, text)
			}
		})
	}
}

func TestSlowGPUCheckReportsALostGPU(t *testing.T) {
	t.Parallel()
	n := simtest.Node(t, "workstation")
	testenv.Must(t, n.Lose(0))
	if res, _ := gpuCheck(t, n.Root()); res.Code != 1 || !strings.Contains(res.Stdout, "FAILED        GPUs") {
		t.Errorf("want exit status 1 and a failed step, got %v", res)
	}
}

func TestSlowGPUCheckWithoutADriverWritesNoReport(t *testing.T) {
	t.Parallel()
	res, report := gpuCheck(t, t.TempDir())
	if res.Code != 10 || !strings.Contains(res.Stderr, "nothing to check here") {
		t.Errorf("want exit status 10 and the reason, got %v", res)
	}
	if _, err := os.Stat(report); err == nil {
		t.Error("a report was written")
	}
}
