package engine

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Images are the root file systems of a run of tests. Each is built when it is first needed.
type Images struct {
	dir string

	mu    sync.Mutex
	built map[image.Kind]bool
	store map[image.Kind]bool
}

// NewImages returns images in dir, which must exist until the last test ends.
func NewImages(dir string) *Images {
	return &Images{dir: dir, built: map[image.Kind]bool{}, store: map[image.Kind]bool{}}
}

// Copy returns a copy of an image's root file system, which the test may change.
func (im *Images) Copy(t testing.TB, kind image.Kind) string {
	t.Helper()
	im.mu.Lock()
	src := im.build(t, kind)
	im.mu.Unlock()
	dst := filepath.Join(t.TempDir(), "rootfs")
	testenv.Must(t, image.Copy(src, dst))
	return dst
}

// Restore replaces a copy by a fresh one.
func (im *Images) Restore(t testing.TB, kind image.Kind, dup string) error {
	t.Helper()
	im.mu.Lock()
	src := im.build(t, kind)
	im.mu.Unlock()
	if err := os.RemoveAll(dup); err != nil {
		return err
	}
	return image.Copy(src, dup)
}

// build builds an image, unless it exists. The lock must be held.
func (im *Images) build(t testing.TB, kind image.Kind) string {
	t.Helper()
	dir := filepath.Join(im.dir, string(kind))
	if im.built[kind] {
		return dir
	}
	for _, name := range []string{"cc", "busybox", "ldconfig"} {
		testenv.Command(t, name)
	}
	// An earlier attempt may have failed.
	testenv.Must(t, os.RemoveAll(dir))
	testenv.Must(t, image.Build(t.Context(), kind, dir))
	im.built[kind] = true
	return dir
}

// imported imports an image into podman's store, unless it is there, and returns the store.
func (im *Images) imported(t testing.TB, kind image.Kind) string {
	t.Helper()
	im.mu.Lock()
	defer im.mu.Unlock()
	store := filepath.Join(im.dir, "store")
	if im.store[kind] {
		return store
	}
	archive := filepath.Join(t.TempDir(), "image.tar")
	env := []string{"PATH=/usr/sbin:/usr/bin"}
	testenv.Must(t, image.WriteArchive(archive, imageName(kind), im.build(t, kind), image.Config{Env: env}))
	args := append(podman(t, store), "load", "--input", archive)
	if res := execute(t, inNamespace(t, t.TempDir(), "", V1, args...)); res.Code != 0 {
		t.Fatalf("import the image %s: %v", kind, res)
	}
	im.store[kind] = true
	return store
}
