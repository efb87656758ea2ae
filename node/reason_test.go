package node

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

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

// What containers lack is a remark, and so is a node without a GPU.
func TestMissingDeviceNodesAreRemarks(t *testing.T) {
	for name, c := range map[string]struct {
		machine, remove string
		number          uint64 // of the removed node, which is made again
		change          func(*nodeSource)
		want            string
		healthy         int
	}{
		"a whole node": {machine: "pcie-pair", healthy: 2},
		"no nvidia-uvm": {
			machine: "pcie-pair", remove: "nvidia-uvm", healthy: 2,
			want: "containers do not get the device node /dev/nvidia-uvm, without which CUDA does not start: not found",
		},
		"a nvidia-uvm from before a reboot": {
			machine: "pcie-pair", remove: "nvidia-uvm", number: unix.Mkdev(250, 0), healthy: 2,
			want: "containers do not get the device node /dev/nvidia-uvm, without which CUDA does not start: its number is " +
				"250:0, and that of its device is 511:0",
		},
		"a node of another GPU": {
			machine: "pcie-pair", remove: "nvidia1", number: unix.Mkdev(195, 0), healthy: 1,
			want: "GPU 1 is left out: /dev/nvidia1 cannot be used: its number is 195:0, and that of its device is 195:1",
		},
		"no node of a GPU": {
			machine: "pcie-pair", remove: "nvidia1", healthy: 1, want: "GPU 1 is left out: no device node /dev/nvidia1",
		},
		"no node of a GPU that the driver does not report": {
			machine: "pcie-pair", remove: "nvidia1", healthy: 1,
			change: func(s *nodeSource) { s.only = 1 },
			want: "GPU at 0000:02:00.0 is left out: the driver does not report it: its kernel module has 2 GPUs, and " +
				"/dev has 1 of their device nodes",
		},
		"no GPU": {
			machine: "pcie-pair", change: func(s *nodeSource) { s.only = noGPUs },
			want: "the NVIDIA driver has no GPU, and no device is offered",
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, c.machine)
			if c.change != nil {
				c.change(b.source)
			}
			if c.remove != "" {
				testenv.Must(t, os.Remove(filepath.Join(b.node.Root(), "dev", c.remove)))
			}
			if c.number != 0 {
				path := filepath.Join(b.node.Root(), "dev", c.remove)
				testenv.Must(t, unix.Mknod(path, unix.S_IFCHR|0o666, int(c.number)))
			}
			b.start()
			s := b.rec.State()
			var want []string
			if c.want != "" {
				want = []string{c.want}
			}
			if diff := cmp.Diff(want, s.Remarks()); diff != "" {
				t.Errorf("remarks (-want +got):\n%s", diff)
			}
			if got := countOf(s).healthy; got != c.healthy {
				t.Errorf("%d healthy devices, want %d", got, c.healthy)
			}
			testenv.Must(t, s.Ready())
		})
	}
}
