package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// A directory for MPS that is not used, and a disk that is full for now, are no reason to serve nothing.
func TestServeGoesOnWithoutRoom(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	s := newServed(t, "pcie-quad", "")
	state := filepath.Join(s.dir, "state")
	testenv.SmallDisk(t, filepath.Join(s.dir, "run"), unix.MS_RDONLY)
	testenv.SmallDisk(t, state, 0)
	full := filepath.Join(state, "full")
	fill := func() { _ = os.WriteFile(full, make([]byte, 1<<20), 0o600) }
	testenv.Must(t, os.Mkdir(filepath.Join(state, "devices"), 0o755))
	fill()
	s.start()
	s.kubelet.WaitListed(gpuResource, 0, 4)
	s.logs("until it has space")
	testenv.Must(t, os.Remove(full))
	e := s.kubelet.WaitListed(gpuResource, 4, 0)
	first := s.node.Machine().GPUs[0].UUID
	s.allocate(e, first)

	// Later nothing has to be written; only a new configuration is refused.
	fill()
	testenv.Must(t, unix.Mount("", state, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	s.allocate(e, first, s.node.Machine().GPUs[1].UUID)
	s.configure("strategy: [envvar]")
	s.signal(syscall.SIGHUP)
	waitFor(t, "a refusal", func() bool { return strings.Contains(s.log.String(), "the old one stays in use") })
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.allocate(e, first)
	testenv.Must(t, unix.Mount("", state, "", unix.MS_REMOUNT, ""))
	testenv.Must(t, os.Remove(full))
}
