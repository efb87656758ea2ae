package drivers

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// statusNotLoaded is the exit status of gpu-cdi-plugin if the kernel module is not loaded.
const statusNotLoaded = 10

// testWithoutModule holds the real library to its answer when there is no kernel module, and the programs to theirs.
func (d *driver) testWithoutModule(t *testing.T) {
	const cause, hint = "nvmlInit: Driver Not Loaded", "hint: load the kernel module (modprobe nvidia)"
	t.Run("devices", func(t *testing.T) {
		res := plugin(t, statusNotLoaded, d.root, "devices")
		contains(t, "devices", res.Stderr, cause)
		contains(t, "devices", res.Stderr, hint)
	})
	t.Run("cdi generate", func(t *testing.T) {
		contains(t, "cdi generate", plugin(t, statusNotLoaded, d.root, "cdi", "generate").Stderr, cause)
	})
	t.Run("doctor", func(t *testing.T) {
		res := plugin(t, 4, d.root, "doctor")
		if !strings.HasPrefix(res.Stdout, "error: driver-not-loaded: ") || strings.Count(res.Stdout, "error: ") != 1 {
			t.Errorf("want the error driver-not-loaded and no other one, got %v", res)
		}
	})
	t.Run("device-manager", func(t *testing.T) {
		dir, err := os.MkdirTemp("", "dm") //nolint:usetesting // t.TempDir may be too long for the paths of sockets
		testenv.Must(t, err)
		t.Cleanup(func() { testenv.Must(t, os.RemoveAll(dir)) })
		serve := []string{
			shared.Program(t, "gpu-cdi-plugin"), "--root", d.root, "--cdi-dir", filepath.Join(dir, "cdi"), "serve",
			"--state-dir", filepath.Join(dir, "plugin"), "--runtime-dir", filepath.Join(dir, "run"),
		}
		res := proc.Must(t, 1, proc.Cmd{Args: withoutDev(
			shared.Program(t, "device-manager"), "serve", "--plugin", strings.Join(serve, " "),
			"--socket-dir", filepath.Join(dir, "sockets"), "--state-dir", filepath.Join(dir, "state"),
			"--api-socket", filepath.Join(dir, "api.sock"), "--plugins-registry-dir", filepath.Join(dir, "registry"),
			"--pod-resources-socket=",
		)})
		contains(t, "device-manager", res.Stderr, cause)
		contains(t, "device-manager", res.Stderr, "exit status 10")
	})
	t.Run("nvidia-smi", func(t *testing.T) {
		res := proc.Must(t, 9, proc.Cmd{Args: []string{"/usr/bin/nvidia-smi"}, Chroot: d.root, Env: []string{}})
		contains(t, "nvidia-smi", res.Stdout, "couldn't communicate with the NVIDIA driver")
	})
	t.Run("nvidia-modprobe", func(t *testing.T) {
		for _, args := range [][]string{{"-c", "0"}, {"-u"}} {
			proc.Must(t, 1, proc.Cmd{
				Args: append([]string{"/usr/bin/nvidia-modprobe"}, args...), Chroot: d.root, Env: []string{},
			})
		}
	})
}
