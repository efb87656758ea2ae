package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/hook/check"
	"gpu-cdi-plugin/hook/inject"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Names and texts of an image cannot change the terminal of who reads what the hook prints.
func TestTheHookPrintsNoControlCharacters(t *testing.T) {
	t.Parallel()
	const hostile = "\x1b]0;x\a\u009b\r"
	for name, print := range map[string]func(out *strings.Builder){
		"the name of a damaged descriptor": func(out *strings.Builder) {
			root := t.TempDir()
			dir := filepath.Join(root, "run/gpu/devices")
			testenv.Must(t, os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, hostile+".json"), []byte("x"), 0o600))
			if status := runCheck([]string{"check"}, root, out, out); status != statusFailure {
				t.Errorf("the status is %d", status)
			}
		},
		"a report": func(out *strings.Builder) {
			testenv.Must(t, printReport(out, &check.Report{
				Driver: hostile, CUDA: hostile, Nodes: []check.Node{{Path: hostile, Error: hostile}},
				Libraries: []check.Library{{Name: hostile, Found: hostile}}, Devices: []check.Device{{UUID: hostile}},
				Problems: []check.Problem{{Subject: hostile, Problem: hostile, Fix: hostile}},
			}, "table"))
		},
		"a problem": func(out *strings.Builder) {
			(&problems{stderr: out, in: inject.Injector{PolicyFile: filepath.Join(t.TempDir(), "none")}}).report(
				inject.Error, errors.New("open "+hostile))
		},
		"a problem in one line": func(out *strings.Builder) { out.WriteString(oneLine(errors.New(hostile)).Error()) },
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			print(&out)
			text := out.String()
			if strings.ContainsAny(text, "\x1b\a\u009b\r") || !strings.Contains(text, `\x1b]0;x\a`) {
				t.Errorf("it prints %q", text)
			}
		})
	}
}
