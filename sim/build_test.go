package sim

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// countingCompiler returns a compiler that writes a line to a log each time it compiles.
func countingCompiler(t *testing.T) (compiler, log string) {
	t.Helper()
	cc := testenv.Command(t, "cc")
	dir := t.TempDir()
	compiler, log = filepath.Join(dir, "cc"), filepath.Join(dir, "log")
	script := "#!/bin/sh\ncase $1 in --version) ;; *) echo compiled >> " + log + ";; esac\nexec " + cc + " \"$@\"\n"
	if err := os.WriteFile(compiler, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return compiler, log
}

func TestConcurrentProcessesCompileOnce(t *testing.T) {
	compiler, log := countingCompiler(t)
	cache := t.TempDir()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			dir, err := compile(t.Context(), cache, compiler)
			if err != nil {
				t.Error(err)
			}
			for _, p := range products {
				if _, err := os.Stat(filepath.Join(dir, p.name)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	data, err := os.ReadFile(log)
	if err != nil || strings.Count(string(data), "compiled") != len(products) {
		t.Errorf("compiled %d times, want each product once; error %v",
			strings.Count(string(data), "compiled"), err)
	}
	if left, err := filepath.Glob(filepath.Join(cache, ".build-*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, error %v", left, err)
	}
}

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

// TestPrivateTempDirRejectsDirectoriesOfOthers checks the directory for compiled files of a user without a home
// directory. Its files are run, and other users can make directories beside it.
func TestPrivateTempDirRejectsDirectoriesOfOthers(t *testing.T) {
	for name, c := range map[string]struct {
		before func(dir string) error
		ok     bool
	}{
		"no directory":          {func(string) error { return nil }, true},
		"one of an earlier run": {func(dir string) error { return os.Mkdir(dir, 0o700) }, true},
		"one that others can change": {
			func(dir string) error { _ = os.Mkdir(dir, 0o700); return os.Chmod(dir, 0o777) },
			false,
		},
		"a link to elsewhere": {func(dir string) error { return os.Symlink(t.TempDir(), dir) }, false},
		"a file":              {func(dir string) error { return os.WriteFile(dir, nil, 0o600) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			temp := t.TempDir()
			want := filepath.Join(temp, "gpu-cdi-plugin-"+strconv.Itoa(os.Getuid()))
			if err := c.before(want); err != nil {
				t.Fatal(err)
			}
			dir, err := privateTempDir(temp)
			if (err == nil) != c.ok || c.ok && dir != want {
				t.Errorf("got %q, %v", dir, err)
			}
		})
	}
}
