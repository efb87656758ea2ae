// Package image builds root file systems, OCI bundles and image archives for the tests' containers from files of the
// machine that runs the tests. It downloads nothing, so the tests run wherever a C compiler and busybox are installed.
package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"gpu-cdi-plugin/test/lib/proc"
)

// Kind is a kind of root file system. Each has a shell and the few programs that the tests run in containers.
type Kind string

// The kinds. Those with a C library have the layout of a current image, with /lib and /bin as links.
const (
	Glibc   Kind = "glibc"    // Debian's C library, dynamic programs, a loader cache
	NoCache Kind = "no-cache" // Glibc without /etc/ld.so.cache
	Lib64   Kind = "lib64"    // NoCache with the libraries where Fedora, SUSE and Arch have them, and their loader looks
	Many    Kind = "many"     // Glibc and manyLibraries more libraries, all in the cache
	// Distroless has Debian's C library in /lib, which is no link, and neither a shell nor the loader's configuration.
	Distroless Kind = "distroless"
	Static     Kind = "static" // busybox and nothing else
	Musl       Kind = "musl"   // busybox, musl's loader, which identifies such an image, and the program Loader
)

// manyLibraries is how many libraries Many has in addition to those of Glibc: as many as a large CUDA or desktop image.
const manyLibraries = 1000

// Extra is a program in Glibc and Many that needs the loader cache: its library is in a directory that the loader does
// not search. It prints ExtraOutput unless the cache has lost the image's own entries.
const (
	Extra       = "/usr/bin/uses-extra"
	ExtraOutput = "extra 42\n"
	extraDir    = "opt/extra/lib"
)

// Loader is a program in Musl that loads the libraries that its arguments name. For each it prints a line with the
// library's file or the loader's error.
const Loader = "/usr/bin/loader"

// Build makes a root file system in dir, an empty directory.
func Build(ctx context.Context, kind Kind, dir string) error {
	builders := map[Kind]func() error{
		Glibc:      func() error { return glibc(ctx, dir, 0, true) },
		NoCache:    func() error { return glibc(ctx, dir, 0, false) },
		Lib64:      func() error { return errors.Join(glibc(ctx, dir, 0, false), toLib64(dir)) },
		Many:       func() error { return glibc(ctx, dir, manyLibraries, true) },
		Distroless: func() error { return distroless(dir) },
		Static:     func() error { return static(dir) },
		Musl:       func() error { return musl(ctx, dir) },
	}
	build, ok := builders[kind]
	if !ok {
		return fmt.Errorf("unknown kind of root file system %q", kind)
	}
	if err := build(); err != nil {
		return fmt.Errorf("build a root file system of kind %s: %w", kind, err)
	}
	return nil
}

// makeSkeleton makes the directories and files that every kind has.
func makeSkeleton(dir string) error {
	dirs := []string{"dev", "etc", "proc", "sys", "run", "root", "tmp", "usr/bin", "usr/lib", "usr/sbin", "var/tmp"}
	for _, d := range dirs {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.Symlink("/run", filepath.Join(dir, "var/run")); err != nil {
		return err
	}
	return writeFiles(dir, map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
		"etc/group":  "root:x:0:\nvideo:x:44:\n",
	})
}

func static(dir string) error {
	if err := makeSkeleton(dir); err != nil {
		return err
	}
	if err := os.Symlink("usr/bin", filepath.Join(dir, "bin")); err != nil {
		return err
	}
	busybox, err := proc.Look("busybox")
	if err != nil {
		return err
	}
	if needed, err := neededBy(busybox); err != nil || len(needed) > 0 {
		return fmt.Errorf("%s: want a static program (Debian's package busybox-static), this one needs %q: %w",
			busybox, needed, errors.Join(err))
	}
	if err := copyFile(busybox, filepath.Join(dir, "usr/bin/busybox")); err != nil {
		return err
	}
	for _, name := range []string{"sh", "cat", "ls", "mknod", "sleep", "true"} {
		if err := os.Symlink("busybox", filepath.Join(dir, "usr/bin", name)); err != nil {
			return err
		}
	}
	return nil
}

// musl creates an image with musl's loader, as Alpine's images have it. Where this machine has no musl, another file is
// in the loader's place, and Loader is missing.
func musl(ctx context.Context, dir string) error {
	if err := static(dir); err != nil {
		return err
	}
	loader := "lib/ld-musl-" + machine() + ".so.1"
	compiler, err := proc.Look("musl-gcc")
	if err != nil || !exists("/"+loader) {
		return writeFiles(dir, map[string]string{loader: "in place of musl's loader\n"})
	}
	return errors.Join(copyFile("/"+loader, filepath.Join(dir, loader)),
		compile(ctx, compiler, filepath.Join(dir, Loader), loaderSource))
}

func writeFiles(dir string, files map[string]string) error {
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// machine returns the processor's name in multiarch directories.
func machine() string {
	switch runtime.GOARCH {
	case "amd64":
		return "x86_64"
	case "arm64":
		return "aarch64"
	default:
		return runtime.GOARCH
	}
}
