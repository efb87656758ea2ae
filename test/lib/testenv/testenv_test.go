package testenv

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// recorder is a test that records how it ends.
type recorder struct {
	testing.TB
	skipped, failed string
}

func (r *recorder) Helper() {}

func (r *recorder) Skip(args ...any) {
	r.skipped = fmt.Sprint(args...)
	runtime.Goexit()
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.failed = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// record runs a test and returns how it ended.
func record(t *testing.T, test func(testing.TB)) *recorder {
	r := &recorder{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		test(r)
	}()
	<-done
	return r
}

func TestMissingProgramSkipsAndFailsInCI(t *testing.T) {
	missing := func(t testing.TB) { Command(t, "no-such-program") }
	t.Setenv("CI", "")
	if r := record(t, missing); r.failed != "" || r.skipped != "needs no-such-program; install it with scripts/setup" {
		t.Errorf("skipped with %q, failed with %q", r.skipped, r.failed)
	}
	t.Setenv("CI", "true")
	if r := record(t, missing); r.skipped != "" || !strings.Contains(r.failed, "needs no-such-program") {
		t.Errorf("with CI=true: skipped with %q, failed with %q", r.skipped, r.failed)
	}
}

func TestFoundProgram(t *testing.T) {
	var path string
	r := record(t, func(t testing.TB) { path = Command(t, "sh") })
	if r.failed+r.skipped != "" || !strings.HasSuffix(path, "/sh") {
		t.Errorf("path %q, skipped with %q, failed with %q", path, r.skipped, r.failed)
	}
}
