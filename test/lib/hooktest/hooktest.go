// Package hooktest builds what tests of the loader cache and of the hook need: small C programs and libraries, and a
// container root with the machine's own glibc. It is for tests only.
package hooktest

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// Loader is a program that loads each library named on its command line with dlopen, and prints a line with the file
// that it came from or with the loader's error.
const Loader = `
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
int main(int argc, char **argv) {
	int failed = 0;
	for (int i = 1; i < argc; i++) {
		struct link_map *map;
		void *lib = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
		if (!lib || dlinfo(lib, RTLD_DI_LINKMAP, &map)) {
			printf("%s\n", dlerror());
			failed = 1;
			continue;
		}
		printf("%s\n", map->l_name);
	}
	return failed;
}
`

// Compile compiles C source into the file out, with the directories above it.
func Compile(t testing.TB, out, source string, flags ...string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(testenv.Command(t, "cc"), append([]string{"-x", "c", "-O1", "-o", out, "-"}, flags...)...)
	cmd.Stdin = strings.NewReader(source)
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, msg)
	}
}

// Library compiles an empty shared library with that SONAME.
func Library(t testing.TB, out, soname string) {
	t.Helper()
	Compile(t, out, "int gpu_library_of_a_test;", "-shared", "-fPIC", "-nostdlib", "-Wl,-soname,"+soname)
}

// GlibcRoot makes dir a root with the program /bin/loader and the libraries that it needs, at the paths of this
// machine, without a loader cache.
func GlibcRoot(t testing.TB, dir string) {
	t.Helper()
	program := filepath.Join(dir, "bin", "loader")
	Compile(t, program, Loader)
	needed, err := exec.Command(testenv.Command(t, "ldd"), program).Output()
	if err != nil {
		t.Fatalf("ldd %s: %v", program, err)
	}
	for _, file := range regexp.MustCompile(`/\S+`).FindAllString(string(needed), -1) {
		CopyFile(t, file, filepath.Join(dir, file))
	}
	for _, sub := range []string{"etc", "proc", "dev", "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// MuslRoot makes dir a root with the program /bin/loader and musl, as Alpine has them, without a search path file.
func MuslRoot(t testing.TB, dir string) {
	t.Helper()
	program := filepath.Join(dir, "bin", "loader")
	if err := os.MkdirAll(filepath.Dir(program), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(testenv.Command(t, "musl-gcc"), "-x", "c", "-o", program, "-")
	cmd.Stdin = strings.NewReader(Loader)
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, msg)
	}
	loaders, err := filepath.Glob("/lib/ld-musl-*.so.1")
	if err != nil || len(loaders) != 1 {
		t.Fatalf("musl's loader: found %q, error %v, want one", loaders, err)
	}
	CopyFile(t, loaders[0], filepath.Join(dir, loaders[0]))
	for _, sub := range []string{"etc", "proc", "dev", "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// CopyFile copies a file, with the directories above its new place.
func CopyFile(t testing.TB, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(to), 0o755)
	}
	if err == nil {
		err = os.WriteFile(to, data, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Hash is a digest of everything in a tree: names, types, modes, owners, links, contents and modification times.
func Hash(t testing.TB, dir string) string {
	t.Helper()
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		i, err := d.Info()
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%s %v %d %v %+v\n", strings.TrimPrefix(path, dir), i.Mode(), i.Size(), i.ModTime(), owner(i))
		switch {
		case i.Mode().IsRegular() && i.Size() < 1<<26:
			data, err := os.ReadFile(path)
			h.Write(data)
			return err
		case i.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			fmt.Fprintln(h, target)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}
