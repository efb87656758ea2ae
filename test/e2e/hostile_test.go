package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
)

// TestHostileCache gives a GPU to images with something else in place of the loader cache. Each container must start
// and find the driver, which is in a directory that the loader searches without a cache.
func TestHostileCache(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "workstation")
	want := requests(t, n)["all"]
	cache := halfCache(t)
	for name, spoil := range map[string]func(path, outside string) error{
		"a FIFO, which blocks on open": func(path, _ string) error { return unix.Mkfifo(path, 0o644) },
		"a device": func(path, _ string) error {
			return unix.Mknod(path, unix.S_IFCHR|0o644, int(unix.Mkdev(1, 5)))
		},
		"a directory":            func(path, _ string) error { return os.Mkdir(path, 0o755) },
		"a link out of the root": func(path, outside string) error { return os.Symlink(outside, path) },
		"a link up and out of the root": func(path, outside string) error {
			return os.Symlink(strings.Repeat("../", 40)+outside, path)
		},
		"a link to itself":   func(path, _ string) error { return os.Symlink("ld.so.cache", path) },
		"a sparse 4 GB file": func(path, _ string) error { return sparse(path, 4<<30) },
		"text":               func(path, _ string) error { return os.WriteFile(path, []byte("hello\n"), 0o644) },
		"half a cache":       func(path, _ string) error { return os.WriteFile(path, cache, 0o644) },
	} {
		for _, e := range shared.Runtimes()[:2] {
			t.Run(fmt.Sprintf("%s/%s", name, e), func(t *testing.T) {
				t.Parallel()
				root := shared.Images.Copy(t, image.NoCache)
				outside := filepath.Join(t.TempDir(), "outside")
				if err := os.WriteFile(outside, []byte("precious"), 0o644); err != nil {
					t.Fatal(err)
				}
				if err := spoil(filepath.Join(root, "etc/ld.so.cache"), outside); err != nil {
					t.Fatal(err)
				}
				c := engine.Container{Args: smi(t, n), CDIDir: n.CDIDir, Devices: names(want.names...)}
				checkList(t, e.Start(t, e.Bundle(t, root, c)), want.want)
				if data, err := os.ReadFile(outside); err != nil || string(data) != "precious" {
					t.Errorf("the file outside the root changed to %q (%v)", data, err)
				}
			})
		}
	}
}

func sparse(path string, size int64) error {
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		return err
	}
	return os.Truncate(path, size)
}

// halfCache returns the first half of a loader cache.
func halfCache(t *testing.T) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(shared.Images.Copy(t, image.Glibc), "etc/ld.so.cache"))
	if err != nil {
		t.Fatal(err)
	}
	return data[:len(data)/2]
}
