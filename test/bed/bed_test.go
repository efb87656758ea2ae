package bed

import (
	"errors"
	"runtime"
	"testing"
)

// TestOffline asks for another project's programs where there is neither a module nor a proxy.
func TestOffline(t *testing.T) {
	for key, value := range map[string]string{"GOMODCACHE": t.TempDir(), "GOPROXY": "off", "GOTOOLCHAIN": "local"} {
		t.Setenv(key, value)
	}
	b := newBed(t.TempDir())
	if err := b.peer(); !errors.Is(err, errOffline) {
		t.Errorf("the error is %v", err)
	}
	for ci, skipped := range map[string]bool{"": true, "true": false} {
		t.Setenv("CI", ci)
		r := &ending{TB: t}
		done := make(chan struct{})
		go func() {
			defer close(done)
			b.Peer(r, "runc")
		}()
		<-done
		if r.skipped != skipped || r.failed == skipped {
			t.Errorf("with CI=%q: skipped %v, failed %v", ci, r.skipped, r.failed)
		}
	}
}

// ending is a test that notes how it ends.
type ending struct {
	testing.TB
	skipped, failed bool
}

func (e *ending) Helper() {}

func (e *ending) Skip(...any) {
	e.skipped = true
	runtime.Goexit()
}

func (e *ending) Fatalf(string, ...any) {
	e.failed = true
	runtime.Goexit()
}

// TestPeersThatDoNotBuild: a failure that is not for want of a module is one.
func TestPeersThatDoNotBuild(t *testing.T) {
	t.Setenv("CC", "/no/such/compiler")
	if err := newBed(t.TempDir()).peer(); err == nil || errors.Is(err, errOffline) {
		t.Errorf("the error is %v", err)
	}
}
