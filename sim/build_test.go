package sim

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestCompilerErrors(t *testing.T) {
	cache := t.TempDir()
	if _, err := compile(t.Context(), cache, "no-such-compiler"); err == nil ||
		!errors.Is(err, ErrNoCompiler) {
		t.Errorf("no compiler: error %v", err)
	}
	broken := filepath.Join(t.TempDir(), "cc")
	script := "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'it is broken' >&2\nexit 3\n"
	testenv.Must(t, os.WriteFile(broken, []byte(script), 0o755))
	if _, err := compile(t.Context(), cache, broken); err == nil || !strings.Contains(err.Error(), "it is broken") {
		t.Errorf("a broken compiler: error %v, want its message", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := compile(ctx, cache, broken); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: error %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(cache, "[^l]*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
