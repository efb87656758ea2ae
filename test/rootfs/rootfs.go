// Package rootfs builds small root file systems for containers out of the files of the machine that runs the tests.
// Nothing is downloaded, so that the tests run wherever a C compiler and busybox are.
//
// Every image has a shell and the few programs that the tests run in containers.
package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"gpu-cdi-plugin/test/lib/proc"
)

// Kind is a kind of image.
type Kind string

// The kinds. All but Static and Musl are laid out as a current Debian image is, with /lib and /bin as links.
const (
	Glibc   Kind = "glibc"    // a C library, dynamic programs, a loader cache
	NoCache Kind = "no-cache" // the same without /etc/ld.so.cache
	Many    Kind = "many"     // Glibc and ManyLibraries more libraries, all in the cache
	Static  Kind = "static"   // busybox and nothing else
	Musl    Kind = "musl"     // busybox and the loader and path file by which an image with musl is known
)

// ManyLibraries is how many libraries the image Many has beyond those of Glibc: as many as a large CUDA or desktop
// image has.
const ManyLibraries = 1000

// Extra is a program that loads a library by way of the loader cache alone: its directory is not one of the loader's
// own. It prints ExtraOutput. So it tells whether a cache still serves what the image itself had in it.
const (
	Extra       = "/usr/bin/uses-extra"
	ExtraOutput = "extra 42\n"
	extraDir    = "opt/extra/lib"
)

// Build makes an image of a kind in dir, an empty directory.
func Build(ctx context.Context, kind Kind, dir string) error {
	var err error
	switch kind {
	case Glibc:
		err = glibc(ctx, dir, true)
	case NoCache:
		err = glibc(ctx, dir, false)
	case Many:
		err = many(ctx, dir)
	case Static:
		err = static(dir)
	case Musl:
		err = musl(dir)
	default:
		err = errors.New("no such kind")
	}
	if err != nil {
		return fmt.Errorf("build a root file system of kind %s: %w", kind, err)
	}
	return nil
}

// skeleton is what every image has.
func skeleton(dir string) error {
	for _, d := range []string{"dev", "etc", "proc", "sys", "run", "root", "tmp", "usr/bin", "usr/lib", "usr/sbin", "var/tmp"} {
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
	if err := skeleton(dir); err != nil {
		return err
	}
	if err := os.Symlink("usr/bin", filepath.Join(dir, "bin")); err != nil {
		return err
	}
	return busybox(dir)
}

// busybox installs the static busybox under the names that the tests use.
func busybox(dir string) error {
	path, err := proc.Look("busybox")
	if err != nil {
		return err
	}
	if needed, err := neededBy(path); err != nil || len(needed) > 0 {
		return fmt.Errorf("%s: want a static program (Debian's package busybox-static), this one needs %q: %w",
			path, needed, errors.Join(err))
	}
	if err := copyFile(path, filepath.Join(dir, "usr/bin/busybox")); err != nil {
		return err
	}
	for _, name := range []string{"sh", "cat", "ls", "mknod", "sleep", "true"} {
		if err := os.Symlink("busybox", filepath.Join(dir, "usr/bin", name)); err != nil {
			return err
		}
	}
	return nil
}

// musl is an image that looks like Alpine's to whoever looks at its loader. The tests run nothing in it that musl
// would have to load: the driver's libraries are for glibc.
func musl(dir string) error {
	if err := static(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, "lib"), 0o755); err != nil {
		return err
	}
	loader := "lib/ld-musl-" + machine() + ".so.1"
	if real := "/" + loader; exists(real) {
		return copyFile(real, filepath.Join(dir, loader))
	}
	return writeFiles(dir, map[string]string{loader: "stands for musl's loader\n"})
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
