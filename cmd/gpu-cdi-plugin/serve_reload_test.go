package main

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// hold makes the configuration a pipe: a reader waits until answer writes to it.
func (s *served) hold() {
	s.t.Helper()
	testenv.Must(s.t, os.Remove(s.config))
	testenv.Must(s.t, syscall.Mkfifo(s.config, 0o600))
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
	testenv.Must(s.t, err)
	testenv.Must(s.t, pipe.Close())
}

// A SIGTERM that comes while the service is about to restart ends it.
func TestServeEndsInsteadOfRestarting(t *testing.T) {
	t.Parallel()
	s := newServed(t, "workstation", "")
	s.start()
	s.kubelet.WaitListed(gpuResource, 1, 0)
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
