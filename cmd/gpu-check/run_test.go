package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

var shared *suite.Suite

func TestMain(m *testing.M) { os.Exit(suite.Run(m, &shared)) }

// check runs the program on a node.
func check(t *testing.T, root, report string) (cli.Code, string) {
	t.Helper()
	var out bytes.Buffer
	code := run(t.Context(), []string{
		"-bin", filepath.Dir(shared.Program(t, "gpu-cdi-plugin")), "-runc", shared.Peer(t, "runc"),
		"-root", root, "-report", report,
	}, &out, &out)
	return code, out.String()
}

// TestSimulatedNodes runs all checks on simulated nodes. Computing needs a real GPU: that step is not possible.
func TestSimulatedNodes(t *testing.T) {
	testenv.Root(t)
	const one, other = "nvidia-smi -L in a container with one", "a GPU that the container was not given"
	for machine, want := range map[string][]string{
		"dgx-h100":    {"ok            " + one, "ok            " + other},
		"mig-h100":    {"ok            " + one, "ok            " + other},
		"workstation": {"ok            nvidia-smi -L in a container with all", "not possible  " + other},
	} {
		t.Run(machine, func(t *testing.T) {
			t.Parallel()
			report := filepath.Join(t.TempDir(), "hardware.md")
			root := shared.Node(t, machine).Root()
			code, out := check(t, root, report)
			for _, line := range want {
				if code != cli.OK || !strings.Contains(out, line) {
					t.Fatalf("want %q and exit status 0, got %d and\n%s", line, code, out)
				}
			}
			if machine == "workstation" {
				check(t, root, report)
				checkReport(t, report)
			}
		})
	}
}

// checkReport checks a report of two runs: one heading, two sections, every step in both.
func checkReport(t *testing.T, file string) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for want, n := range map[string]int{
		"# Seen on real hardware\n": 1, "\n## ": 2, "driver 580.126.09\n": 2, "| cdi generate | ok |": 2,
	} {
		if got := strings.Count(text, want); got != n {
			t.Errorf("the report has %q %d times, want %d:\n%s", want, got, n, text)
		}
	}
}

func TestWithoutADriverNoReportIsWritten(t *testing.T) {
	report := filepath.Join(t.TempDir(), "hardware.md")
	code, out := check(t, t.TempDir(), report)
	if code != cli.NoDriver || !strings.Contains(out, "nothing to check here") {
		t.Errorf("want exit status %d and the reason, got %d and\n%s", cli.NoDriver, code, out)
	}
	if _, err := os.Stat(report); err == nil {
		t.Error("a report was written")
	}
}

func TestALostGPUIsAFailure(t *testing.T) {
	testenv.Root(t)
	n := shared.Node(t, "workstation")
	if err := n.Lose(0); err != nil {
		t.Fatal(err)
	}
	code, out := check(t, n.Root(), filepath.Join(t.TempDir(), "hardware.md"))
	if code == cli.OK || !strings.Contains(out, "FAILED        GPUs") {
		t.Errorf("want a lost GPU to be a failure, got exit status %d and\n%s", code, out)
	}
}
