package bench

import (
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/nvml"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/proc"
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
