package bench

import (
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/nvml"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/proc"
)

// floor builds the program that only opens the driver's library, and returns how it is called on a node.
func floor(b *testing.B, n *sim.Node) (args []string) {
	b.Helper()
	program := filepath.Join(b.TempDir(), "floor")
	env := append(os.Environ(), "CGO_CFLAGS=-Wno-deprecated-declarations", "CGO_LDFLAGS=-Wl,-z,lazy")
	proc.Must(b, 0, proc.Cmd{Args: []string{"go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "./floor"}, Env: env})
	h, err := host.New(n.Root(), "", "")
	if err != nil {
		b.Fatal(err)
	}
	library, err := nvml.Find(h, "")
	if err != nil {
		b.Fatal(err)
	}
	return []string{program, library}
}

// volatile is a directory in memory, as /run is on a node. Where there is no tmpfs it is an ordinary one.
func volatile(b *testing.B) string {
	b.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "gpu-bench-") //nolint:usetesting // t.TempDir is on a disk
	if err != nil {
		return b.TempDir()
	}
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
