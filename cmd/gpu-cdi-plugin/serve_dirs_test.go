package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// smallDisk mounts a file system of a few pages, with the flags.
func smallDisk(t *testing.T, dir string, flags uintptr) {
	t.Helper()
	testenv.Root(t)
	testenv.Must(t, os.MkdirAll(dir, 0o755))
	testenv.Must(t, unix.Mount("none", dir, "tmpfs", flags, "size=64k"))
	t.Cleanup(func() { testenv.Must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
}

// A directory that cannot be written to ends serve before it advertises a device, not when a container starts.
func TestServeNeedsItsDirectories(t *testing.T) {
	file := func(t *testing.T, dir string) { testenv.Must(t, os.WriteFile(dir, nil, 0o600)) }
	readOnly := func(t *testing.T, dir string) { smallDisk(t, dir, unix.MS_RDONLY) }
	for name, c := range map[string]struct {
		dir, config string
		make        func(*testing.T, string)
		want        []string
	}{
		"the state directory is a file": {"state", "", file, []string{"state-dir: ", "not a directory", "--state-dir"}},
		"the state directory is read-only": {
			"state", "", readOnly, []string{"state-dir: ", "read-only file system", "--state-dir"},
		},
		"the directory for MPS is read-only": {
			"run", fmt.Sprintf(byMPS, 2), readOnly, []string{"runtime-dir: ", "read-only", "--runtime-dir"},
		},
		"both cannot be written to, with one end": {
			".", fmt.Sprintf(byMPS, 2), nil, []string{"state-dir: ", "runtime-dir: "},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServed(t, "workstation", c.config)
			if c.make != nil {
				c.make(t, filepath.Join(s.dir, c.dir))
			} else {
				file(t, filepath.Join(s.dir, "state"))
				file(t, filepath.Join(s.dir, "run"))
			}
			s.start()
			err := s.ended()
			if err == nil || err.Error() != "exit status 1" || s.kubelet.Registrations() != 0 {
				t.Errorf("it ends with %v after %d registrations", err, s.kubelet.Registrations())
			}
			for _, text := range c.want {
				if !strings.Contains(s.log.String(), text) {
					t.Errorf("it does not say %q", text)
				}
			}
			if _, err := os.Stat(s.spec); err == nil {
				t.Error("there is a spec")
			}
		})
	}
}

// A directory for MPS that is not used, and a disk that is full for now, are no reason to serve nothing.
func TestServeGoesOnWithoutRoom(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	state := filepath.Join(s.dir, "state")
	smallDisk(t, filepath.Join(s.dir, "run"), unix.MS_RDONLY)
	smallDisk(t, state, 0)
	full := filepath.Join(state, "full")
	fill := func() { _ = os.WriteFile(full, make([]byte, 1<<20), 0o600) }
	testenv.Must(t, os.Mkdir(filepath.Join(state, "devices"), 0o755))
	fill()
	s.start()
	s.listed(gpuResource, 0, 4)
	s.logs("until it has space")
	testenv.Must(t, os.Remove(full))
	e := s.listed(gpuResource, 4, 0)
	first := s.node.Machine().GPUs[0].UUID
	s.allocate(e, first)

	// Later nothing has to be written; only a new configuration is refused.
	fill()
	testenv.Must(t, unix.Mount("", state, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	s.allocate(e, first, s.node.Machine().GPUs[1].UUID)
	s.configure("strategy: [envvar]")
	s.signal(syscall.SIGHUP)
	waitFor(t, "a refusal", func() bool { return strings.Contains(s.log.String(), "the old one stays in use") })
	s.listed(gpuResource, 4, 0)
	s.allocate(e, first)
	testenv.Must(t, unix.Mount("", state, "", unix.MS_REMOUNT, ""))
	testenv.Must(t, os.Remove(full))
}
