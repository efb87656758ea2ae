package suite

import (
	"errors"
	"runtime"
	"testing"
)

func TestMissingModulesWithoutNetworkSkip(t *testing.T) {
	for key, value := range map[string]string{"GOMODCACHE": t.TempDir(), "GOPROXY": "off", "GOTOOLCHAIN": "local"} {
		t.Setenv(key, value)
	}
	s := newSuite(t.TempDir())
	if err := s.buildPeers(); !errors.Is(err, errOffline) {
		t.Errorf("the error is %v", err)
	}
	for ci, skipped := range map[string]bool{"": true, "true": false} {
		t.Setenv("CI", ci)
		r := &recorder{TB: t}
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.Peer(r, "runc")
		}()
		<-done
		if r.skipped != skipped || r.failed == skipped {
			t.Errorf("with CI=%q: skipped %v, failed %v", ci, r.skipped, r.failed)
		}
	}
}

// recorder is a test that records how it ends.
type recorder struct {
	testing.TB
	skipped, failed bool
}

func (r *recorder) Helper() {}

func (r *recorder) Skip(...any) {
	r.skipped = true
	runtime.Goexit()
}

func (r *recorder) Fatalf(string, ...any) {
	r.failed = true
	runtime.Goexit()
}

func TestPeersThatDoNotBuildFail(t *testing.T) {
	t.Setenv("CC", "/no/such/compiler")
	if err := newSuite(t.TempDir()).buildPeers(); err == nil || errors.Is(err, errOffline) {
		t.Errorf("the error is %v", err)
	}
}
