package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/sim"
)

// What a container gets besides GPUs follows the node: it is named while it is there, and then it is in a spec.
func TestServeGivesExtras(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "extras: [gds, gdrcopy, nvswitch]\nimex: {channels: [1]}\n")
	_, err := sim.Create(t.Context(), s.node.Root(), s.node.Machine(), sim.Options{Force: true, Extras: []string{"gds", "imex"}})
	mustDo(t, err)
	s.start()
	e := s.listed(gpuResource, 8, 0)
	uuid := s.node.Machine().GPUs[3].UUID
	names := s.allocate(e, uuid)
	want := []string{cdi.DefaultKind + "=" + uuid, "nvidia.com/gds=all", "nvidia.com/nvswitch=all", "nvidia.com/imex-channel=1"}
	if !slices.Equal(names, want) {
		t.Errorf("allocated %v, want %v", names, want)
	}
	s.offered(names...)

	mustDo(t, os.Remove(filepath.Join(s.node.Root(), "dev/nvidia-caps-imex-channels/channel1")))
	s.signal(syscall.SIGHUP)
	waitFor(t, "an allocation without the channel", func() bool { return slices.Equal(s.allocate(e, uuid), want[:3]) })
	waitFor(t, "the end of the channel's spec", func() bool {
		_, err := os.Stat(filepath.Join(filepath.Dir(s.spec), "nvidia.com-imex-channel.json"))
		return os.IsNotExist(err)
	})

	// One that is required takes the devices away with it, and who starts the plugin hears of it at once.
	s.configure("imex: {channels: [1], required: true}\n")
	if err := s.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	s.start()
	if err := <-s.done; err == nil {
		t.Error("it serves without the channel that is required")
	}
}

// What serve wrote goes when it is configured no longer and the kubelet knows of no pod that has it.
func TestServeRemovesWhatNobodyWantsAnyMore(t *testing.T) {
	t.Parallel()
	s := newServed(t, "workstation", "extras: [gds]\n")
	_, err := sim.Create(t.Context(), s.node.Root(), s.node.Machine(), sim.Options{Force: true, Extras: []string{"gds"}})
	mustDo(t, err)
	spec := filepath.Join(filepath.Dir(s.spec), "nvidia.com-gds.json")
	s.start()
	s.listed(gpuResource, 1, 0)
	mustDo(t, os.WriteFile(filepath.Join(s.kubelet.Dir, "kubelet_internal_checkpoint"), []byte(`{"Data":{}}`), 0o600))
	total := s.kubelet.Total()
	s.configure("")
	s.signal(syscall.SIGHUP)
	s.kubelet.WaitTotal(total + 1)
	s.listed(gpuResource, 1, 0)
	if _, err := os.Stat(spec); err != nil {
		t.Error(err)
	}
	time.Sleep(10 * time.Second) // the kubelet may not have written down what it gave
	s.signal(syscall.SIGHUP)
	waitFor(t, "the end of the spec", func() bool { _, err := os.Stat(spec); return errors.Is(err, fs.ErrNotExist) })
	s.offered(cdi.DefaultKind + "=0")
}
