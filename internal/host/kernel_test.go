package host

import (
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestDriverVersion(t *testing.T) {
	const sys, proc = "sys/module/nvidia/version", "proc/driver/nvidia/version"
	for name, c := range map[string]struct{ file, text, want string }{
		"the module's version": {sys, "580.126.09\n", "580.126.09"},
		"the driver's line": {
			proc, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.57.08  Sat May 24 07:01:00 UTC 2025\n" +
				"GCC version:  gcc version 12.2.0\n", "575.57.08",
		},
		"the open module's line": {
			proc, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release Build  (dvs-builder)\n",
			"580.65",
		},
		"a version with a suffix": {sys, "580.65.06-custom\n", "580.65.06"},
		"no module":               {"sys/module/other/version", "1.0\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			h, err := New(t.TempDir(), "", "")
			testenv.Must(t, err)
			path := filepath.Join(h.Root(), c.file)
			testenv.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
			testenv.Must(t, os.WriteFile(path, []byte(c.text), 0o600))
			if got := DriverVersion(h); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestMaySuspend(t *testing.T) {
	const address = "0000:01:00.0"
	for name, c := range map[string]struct {
		text string
		want bool
	}{
		"runtime power management is on":  {"auto\n", true},
		"runtime power management is off": {"on\n", false},
		"the kernel has none":             {"", false},
	} {
		t.Run(name, func(t *testing.T) {
			h, err := New(t.TempDir(), "", "")
			testenv.Must(t, err)
			path := h.Sys("bus", "pci", "devices", address, "power", "control")
			testenv.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
			if c.text != "" {
				testenv.Must(t, os.WriteFile(path, []byte(c.text), 0o600))
			}
			if got := MaySuspend(h, address); got != c.want {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}
