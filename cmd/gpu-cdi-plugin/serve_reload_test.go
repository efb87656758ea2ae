package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// hold makes the configuration a pipe: a reader waits until answer writes to it.
func (s *served) hold() {
	s.t.Helper()
	mustDo(s.t, os.Remove(s.config))
	mustDo(s.t, syscall.Mkfifo(s.config, 0o600))
}

// asked waits until the configuration is being read. The reader has all of it when the pipe is closed.
func (s *served) asked() *os.File {
	s.t.Helper()
	var pipe *os.File
	waitFor(s.t, "a reader of the configuration", func() bool {
		var err error
		pipe, err = os.OpenFile(s.config, os.O_WRONLY|syscall.O_NONBLOCK, 0) // which fails without a reader
		return err == nil
	})
	return pipe
}

// answer gives the reader of the configuration all of it.
func (s *served) answer(pipe *os.File, config string) {
	s.t.Helper()
	_, err := pipe.WriteString(config)
	mustDo(s.t, err)
	mustDo(s.t, pipe.Close())
}

// A SIGTERM that comes while the service is about to restart ends it.
func TestServeEndsInsteadOfRestarting(t *testing.T) {
	t.Parallel()
	s := newServed(t, "workstation", "")
	s.start()
	s.listed(gpuResource, 1, 0)
	s.hold()
	s.signal(syscall.SIGHUP)
	pipe := s.asked()
	s.signal(syscall.SIGTERM)
	s.kubelet.WaitGone(gpuResource) // it has heard the signal
	s.answer(pipe, "strategy: [envvar]\n")
	if err := s.ended(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	if strings.Contains(s.log.String(), "starting again") {
		t.Error("it restarted")
	}
}

// A daemon that ends while serve restarts is reaped by the new program.
func TestServeTakesNoteOfDaemonsThatEndedMeanwhile(t *testing.T) {
	t.Parallel()
	s, uuid := newMPS(t, 2)
	s.start()
	s.listed(sharedResource, 2, 0)
	first := s.daemon(uuid)
	config := fmt.Sprintf(byMPS, 2) + "strategy: [envvar]\n"
	s.hold()
	s.signal(syscall.SIGHUP)
	before := s.asked()
	s.hold() // for the next one
	s.answer(before, config)
	next := s.asked()
	mustDo(t, syscall.Kill(first, syscall.SIGKILL))
	waitFor(t, "the end of the daemon", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", first))
		return err == nil && strings.Contains(string(stat), ") Z ")
	})
	total := s.kubelet.Registrations()
	s.answer(next, config)
	s.kubelet.WaitRegistrations(total + 2)
	s.listed(sharedResource, 2, 0)
	if err := syscall.Kill(first, 0); err == nil {
		t.Error("the daemon that ended is a zombie")
	}
}

// A configuration that would end the service, since another instance keeps the daemons, is refused as a wrong one is.
func TestServeRefusesToShareByMPSBesideAnother(t *testing.T) {
	t.Parallel()
	s, _ := newMPS(t, 2)
	s.configure("")
	mustDo(t, os.MkdirAll(s.mpsDir(), 0o755))
	other, err := lock.Acquire(filepath.Join(s.mpsDir(), "lock"))
	mustDo(t, err)
	s.start()
	s.listed(gpuResource, 4, 0)
	for i, more := range []string{"", "strategy: [envvar]\n"} { // a new offer, and what makes the service restart
		s.configure(fmt.Sprintf(byMPS, 2) + more)
		s.signal(syscall.SIGHUP)
		waitFor(t, "the complaint about the configuration", func() bool {
			return strings.Count(s.log.String(), "the old one stays in use: share GPUs by MPS: lock ") == i+1
		})
		s.listed(gpuResource, 4, 0)
	}
	mustDo(t, other.Release())
	s.signal(syscall.SIGHUP)
	s.listed(sharedResource, 2, 0)
}

// A reload does not write to the offer that a reconciliation reads meanwhile. The race detector finds it if it does.
func TestReloadLeavesTheOfferInUse(t *testing.T) {
	t.Parallel()
	a, log := newApp(), &testenv.Log{}
	a.stderr, a.hangups = log, make(chan os.Signal)
	config := filepath.Join(t.TempDir(), "config.yaml")
	mustDo(t, os.WriteFile(config, []byte("mig-strategy: mixed\n"), 0o600))
	root := a.rootCommand()
	mustDo(t, root.ParseFlags([]string{"--config", config, "--root", t.TempDir(), "--hook-path", "/bin/true"}))
	cmd, _, err := root.Find([]string{"serve"})
	mustDo(t, err)
	mustDo(t, a.start(cmd))
	s, err := a.newService()
	mustDo(t, err)

	ctx, cancel := context.WithCancel(t.Context())
	reloaded := make(chan error, 1)
	inUse := s.offer.Load()
	go func() { reloaded <- s.reload(ctx) }()
	a.hangups <- syscall.SIGHUP
	_, _, err = resource.Build(&gpu.Snapshot{}, *inUse) // nothing orders it and what the reload writes
	mustDo(t, err)
	waitFor(t, "a reload", func() bool { return strings.Contains(log.String(), "the configuration was read again") })
	cancel()
	mustDo(t, <-reloaded)
}
