package image

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// loaderSource is the source of the program /bin/loader. It loads each library named on its command line with dlopen,
// and prints a line with the library's file or the loader's error.
const loaderSource = `
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

// GlibcRoot makes dir a root with the program /bin/loader and the libraries that it needs, at the paths of
// this machine, without a loader cache.
func GlibcRoot(t testing.TB, dir string) {
	t.Helper()
	program := filepath.Join(dir, "bin", "loader")
	Compile(t, program, loaderSource)
	testenv.Must(t, addNeeded(dir, program))
	makeDirs(t, dir)
}

// MuslRoot makes dir a root with the program /bin/loader and musl as in Alpine, without a search path file.
func MuslRoot(t testing.TB, dir string) {
	t.Helper()
	program := filepath.Join(dir, "bin", "loader")
	testenv.Must(t, compile(t.Context(), testenv.Command(t, "musl-gcc"), program, loaderSource))
	loaders, err := filepath.Glob("/lib/ld-musl-*.so.1")
	if err != nil || len(loaders) != 1 {
		t.Fatalf("musl's loader: found %q, error %v, want one", loaders, err)
	}
	CopyFile(t, loaders[0], filepath.Join(dir, loaders[0]))
	makeDirs(t, dir)
}

func makeDirs(t testing.TB, dir string) {
	t.Helper()
	for _, sub := range []string{"etc", "proc", "dev", "tmp"} {
		testenv.Must(t, os.MkdirAll(filepath.Join(dir, sub), 0o755))
	}
}

// Compile compiles C source into the file out, and makes the directories above it.
func Compile(t testing.TB, out, source string, flags ...string) {
	t.Helper()
	testenv.Must(t, compile(t.Context(), testenv.Command(t, "cc"), out, source, flags...))
}

// Library compiles an empty shared library with that SONAME.
func Library(t testing.TB, out, soname string) {
	t.Helper()
	Compile(t, out, "int gpu_library_of_a_test;", "-shared", "-fPIC", "-nostdlib", "-Wl,-soname,"+soname)
}

// addExtra compiles Extra and its library.
func addExtra(ctx context.Context, dir string) error {
	const (
		library = "int extra(void) { return 42; }\n"
		program = "#include <stdio.h>\nint extra(void);\n" +
			"int main(void) { printf(\"extra %d\\n\", extra()); return 0; }\n"
	)
	cc := cmp.Or(os.Getenv("CC"), "cc")
	lib := filepath.Join(dir, extraDir, "libextra.so.1")
	if err := compile(ctx, cc, lib, library, "-shared", "-fPIC", "-Wl,-soname,libextra.so.1"); err != nil {
		return err
	}
	if err := compile(ctx, cc, filepath.Join(dir, Extra), program, "-x", "none", lib); err != nil {
		return err
	}
	return writeFiles(dir, map[string]string{"etc/ld.so.conf.d/extra.conf": "/" + extraDir + "\n"})
}

func compile(ctx context.Context, cc, out, source string, flags ...string) error {
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	args := append([]string{cc, "-x", "c", "-O1", "-o", out, "-"}, flags...)
	res, err := proc.Run(ctx, proc.Cmd{Args: args, Stdin: strings.NewReader(source)})
	if err == nil && res.Code != 0 {
		err = fmt.Errorf("%s: %v", strings.Join(args, " "), res)
	}
	return err
}
