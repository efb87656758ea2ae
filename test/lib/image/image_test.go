package image

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/ldcache"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestBuild(t *testing.T) {
	for _, name := range []string{"cc", "busybox", "ldconfig"} {
		testenv.Command(t, name)
	}
	for kind, want := range map[Kind]struct {
		files, missing []string
		entries        int // in the cache, at least
	}{
		Glibc:   {[]string{"usr/bin/sh", "lib/x86_64-linux-gnu/libc.so.6", Extra}, nil, 3},
		NoCache: {[]string{"usr/bin/sh", "lib/x86_64-linux-gnu/libc.so.6", Extra}, []string{"etc/ld.so.cache"}, 0},
		Many:    {[]string{"lib/x86_64-linux-gnu/libmany-7.so.1"}, nil, manyLibraries},
		Static:  {[]string{"usr/bin/sh"}, []string{"etc/ld.so.cache", "lib", "usr/lib/x86_64-linux-gnu"}, 0},
		Musl:    {[]string{"usr/bin/sh", "lib/ld-musl-x86_64.so.1"}, []string{"etc/ld.so.cache"}, 0},
	} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if err := Build(t.Context(), kind, dir); err != nil {
				t.Fatal(err)
			}
			for _, f := range want.files {
				if !exists(filepath.Join(dir, strings.ReplaceAll(f, "x86_64", machine()))) {
					t.Errorf("%s is missing", f)
				}
			}
			for _, f := range want.missing {
				if exists(filepath.Join(dir, f)) {
					t.Errorf("%s is there", f)
				}
			}
			if got := cached(t, dir); got < want.entries {
				t.Errorf("%d entries in the cache, want at least %d", got, want.entries)
			}
			checkCopy(t, dir)
		})
	}
}

func cached(t *testing.T, dir string) int {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "etc/ld.so.cache"))
	if err != nil {
		return 0
	}
	cache, err := ldcache.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	return len(cache.Entries)
}

// checkCopy copies a tree and checks that its digest is that of the original until the copy changes.
func checkCopy(t *testing.T, dir string) {
	t.Helper()
	dup := filepath.Join(t.TempDir(), "copy")
	if err := Copy(dir, dup); err != nil {
		t.Fatal(err)
	}
	want, got := Digest(t, dir), Digest(t, dup)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("a copy (-original +copy):\n%s", diff)
	}
	fingerprint := Fingerprint(t, dup)
	if again := Fingerprint(t, dup); again != fingerprint {
		t.Errorf("the fingerprint of an unchanged tree was %s and is %s", fingerprint, again)
	}
	passwd := filepath.Join(dup, "etc/passwd")
	data, err := os.ReadFile(passwd)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(passwd, data, 0o644); err != nil {
		t.Fatal(err)
	}
	if !cmp.Equal(want, Digest(t, dup)) || Fingerprint(t, dup) == fingerprint {
		t.Error("writing the same content again changes the digest, or not the fingerprint")
	}
	if err := os.WriteFile(passwd, bytes.ToUpper(data), 0o644); err != nil {
		t.Fatal(err)
	}
	if cmp.Equal(want, Digest(t, dup)) {
		t.Error("the digest of a changed copy is that of the original")
	}
}
