package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"gpu-cdi-plugin/gpu"
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

// A reload does not write to the offer that a reconciliation reads meanwhile. The race detector finds it if it does.
func TestReloadLeavesTheOfferInUse(t *testing.T) {
	t.Parallel()
	a, log := newApp(), &testenv.Log{}
	a.Stderr, a.hangups = log, make(chan os.Signal)
	config := filepath.Join(t.TempDir(), "config.yaml")
	mustDo(t, os.WriteFile(config, []byte("mig-strategy: mixed\n"), 0o600))
	root := a.rootCommand()
	mustDo(t, root.ParseFlags([]string{"--config", config, "--root", t.TempDir(), "--hook-path", "/bin/true"}))
	cmd, _, err := root.Find([]string{"serve"})
	mustDo(t, err)
	mustDo(t, a.Start(cmd))
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
