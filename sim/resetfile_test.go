package sim

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// smi runs the node's nvidia-smi, as any program that uses the library.
func smi(t *testing.T, n *Node, args ...string) string {
	t.Helper()
	cmd := exec.Command(n.SMI(), args...)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(n.Library()))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("nvidia-smi %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// TestPCIReset checks writes to the reset file: how long they take, how they end, and what becomes of the GPU.
func TestPCIReset(t *testing.T) {
	n := makeNode(t, "dgx-h100", Options{PlainNodes: true})
	file := filepath.Join(n.Root(), "sys/bus/pci/devices", n.Machine().GPUs[2].Bus, "reset")
	const delay = 200 * time.Millisecond
	for name, c := range map[string]struct {
		serve *PCIReset
		took  time.Duration
		want  error
		reset bool
	}{
		"at once":       {nil, 0, nil, true},
		"takes a while": {&PCIReset{Delay: delay}, delay, nil, true},
		"is refused":    {&PCIReset{Delay: delay, Refuse: true}, delay, unix.EPIPE, false},
	} {
		t.Run(name, func(t *testing.T) {
			if err := n.SetSilently(2, map[string]string{"recovery-action": "reset"}); err != nil {
				t.Fatal(err)
			}
			served := make(chan error, 1)
			if c.serve != nil {
				go func() { served <- n.ServePCIReset(t.Context(), 2, *c.serve) }()
				waitForFIFO(t, file)
			}
			start := time.Now()
			err := os.WriteFile(file, []byte("1\n"), 0o200)
			if took := time.Since(start); !errors.Is(err, c.want) || took < c.took {
				t.Errorf("the write took %v with error %v, want %v and %v", took, err, c.took, c.want)
			}
			if c.serve != nil {
				if err := <-served; err != nil {
					t.Error(err)
				}
			}
			smi(t, n, "-L")
			if values := must(n.Values(2)); (len(values) == 0) != c.reset {
				t.Errorf("the GPU's values are %v; was it reset: want %v", values, c.reset)
			}
			if info, err := os.Lstat(file); err != nil || info.Mode() != 0o200 || info.Size() != 0 {
				t.Errorf("the reset file is %v, error %v", info, err)
			}
		})
	}
}

func waitForFIFO(t *testing.T, path string) {
	t.Helper()
	for range 500 {
		if info, err := os.Lstat(path); err == nil && info.Mode()&os.ModeNamedPipe != 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("the reset file did not become a FIFO")
}
