package e2e

import (
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
)

// libDirs assigns to machines the directories that drivers are installed in. Debian's loader searches only its own
// multiarch directory without a cache.
var libDirs = map[string]string{
	"workstation": "usr/lib64",
	"dgx-a100":    "usr/local/nvidia/lib64",
	"dgx1-v100":   "usr/lib/x86_64-linux-gnu/nvidia/current",
	"hgx-16":      "usr/lib64",
	"mig-h100":    "usr/local/nvidia/lib64",
}

// TestEveryMachine requests GPUs of each simulated machine in every way, through runc and podman.
func TestEveryMachine(t *testing.T) {
	t.Parallel()
	for _, machine := range sim.Machines() {
		t.Run(machine, func(t *testing.T) {
			t.Parallel()
			n := shared.Node(t, machine, simtest.LibDir(libDirs[machine]))
			for name, r := range requests(t, n) {
				for _, e := range shared.Engines()[:2] {
					t.Run(name+"/"+e.String(), func(t *testing.T) {
						t.Parallel()
						c := engine.Container{Image: image.Glibc, Args: smi()}
						checkList(t, run(t, e, n, c, r.names...), r.want)
					})
				}
			}
		})
	}
}
