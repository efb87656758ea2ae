package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"gpu-cdi-plugin/nvml"
	"gpu-cdi-plugin/sim"
)

// Who ends because of something else than the driver does not wait for one that hangs.
func TestTheEndDoesNotWaitForADriverThatHangs(t *testing.T) {
	t.Parallel()
	s := newServed(t, "workstation", "")
	mustDo(t, s.node.Hang("nvmlInit_v2", sim.AnyGPU))
	mustDo(t, os.WriteFile(filepath.Join(s.dir, "state"), nil, 0o600)) // instead of a directory
	begin := time.Now()
	s.start()
	err := s.ended()
	if took := time.Since(begin); err == nil || err.Error() != "exit status 1" || took > nvml.DefaultTimeout/3 {
		t.Errorf("it ends with %v after %v", err, took)
	}
}
