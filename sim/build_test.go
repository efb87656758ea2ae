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
	if err := os.WriteFile(broken, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
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

func TestPatch(t *testing.T) {
	testenv.Command(t, "cc")
	dir, err := compile(t.Context(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	library := must(os.ReadFile(filepath.Join(dir, builtLibrary)))
	long, err := patch(library, []byte(descriptionHeader+"machine name=a-long-one\n"))
	if err != nil {
		t.Fatal(err)
	}
	short, err := patch(long, []byte(descriptionHeader))
	if err != nil || strings.Contains(string(short), "a-long-one") || len(short) != len(library) {
		t.Errorf("the old description was not overwritten, error %v", err)
	}
	for name, c := range map[string]struct {
		library []byte
		size    int
	}{
		"text":                            {[]byte("text"), 1},
		"a truncated library":             {library[:len(library)/2], 1},
		"a library without the section":   {must(Library{}.ELF()), 1},
		"a description that is too large": {library, 256 << 10},
	} {
		if got, err := patch(c.library, make([]byte, c.size)); err == nil || got != nil {
			t.Errorf("%s: %d bytes, error %v", name, len(got), err)
		}
	}
}
