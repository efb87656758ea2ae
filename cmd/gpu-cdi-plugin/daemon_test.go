package main

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// Every container that gets a device would fail to start without the hook.
func TestWatchReportsAHookThatIsGone(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "listen: 127.0.0.1:0\ngpu-timeout: 1s\n")
	hook := filepath.Join(s.dir, "prestart-hook")
	testenv.Must(t, os.WriteFile(hook, []byte("#!/bin/sh\n"), 0o755))
	s.startVerb(nil, "cdi", "watch", "--hook-path", hook)
	s.waitForDevices(s.uuids()...)
	waitFor(t, "readiness", func() bool { _, status := s.ask("/readyz"); return status == http.StatusOK })
	testenv.Must(t, os.Remove(hook))
	waitFor(t, "the end of readiness", func() bool {
		body, status := s.ask("/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, hook)
	})
	testenv.Must(t, os.WriteFile(hook, []byte("#!/bin/sh\n"), 0o755))
	waitFor(t, "readiness again", func() bool { _, status := s.ask("/readyz"); return status == http.StatusOK })
}
