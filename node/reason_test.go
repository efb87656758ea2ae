package node

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// The reason of a device that the spec leaves out is the generator's.
func TestADeviceOutsideTheSpecHasTheGeneratorsReason(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	s, err := b.node.Snapshot()
	testenv.Must(t, err)
	missing := fmt.Sprintf("nvidia%d", s.Devices[1].Minor)
	testenv.Must(t, os.Remove(filepath.Join(b.node.Root(), "dev", missing)))
	b.start()
	b.run()
	for i := range s.Devices {
		want := ""
		if i == 1 {
			want = "no device node /dev/" + missing
		}
		if got := reasons(b.rec.State())[s.Devices[i].UUID]; got != want {
			t.Errorf("GPU %d is unhealthy because of %q, want %q", i, got, want)
		}
	}
}
