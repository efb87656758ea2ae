package engine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Podman is podman with one runtime.
type Podman struct {
	Runtime string // "runc" or "crun"
	Cgroup  Cgroup
	Images  *Images
}

// String names the engine, its runtime and the control groups, as in "podman with crun on cgroup v2".
func (p *Podman) String() string { return fmt.Sprintf("podman with %s on %s", p.Runtime, p.Cgroup) }

// Run runs a container with `podman run`.
func (p *Podman) Run(t testing.TB, c Container) proc.Result {
	t.Helper()
	store := p.Images.imported(t, c.Image)
	dir := t.TempDir()
	args := append(podman(t, dir), "--storage-opt", "additionalimagestore="+filepath.Join(store, "graph"),
		"--runtime", testenv.Command(t, p.Runtime), "run", "--rm", "--network=none", "--log-driver=k8s-file",
		// A machine without CAP_SYS_RESOURCE cannot raise limits; podman's own defaults would.
		"--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024",
		"--cgroup-parent="+cgroupParent(),
		// Where cgroup v2 has no pids controller there is nothing to set a limit in.
		"--pids-limit=-1")
	for _, name := range c.Devices {
		args = append(args, "--device="+name)
	}
	if c.ReadOnly {
		args = append(args, "--read-only")
	}
	if c.Mknod {
		args = append(args, "--cap-add=MKNOD")
	}
	args = append(append(args, imageName(c.Image)), c.Args...)
	return execute(t, inNamespace(t, c.CDIDir, p.Cgroup, args...))
}

// podman is the beginning of every command line: a store of its own in dir, and nothing that needs systemd.
func podman(t testing.TB, dir string) []string {
	t.Helper()
	return []string{
		testenv.Command(t, "podman"), "--root", filepath.Join(dir, "graph"),
		// In the namespace's own /run: podman refuses long paths here.
		"--runroot=/run/containers", "--tmpdir=/run/libpod", "--network-config-dir=/run/cni",
		"--storage-driver=overlay", "--cgroup-manager=cgroupfs", "--events-backend=none",
	}
}

// cgroupParent is the cgroup that this process's podman containers are under.
func cgroupParent() string { return fmt.Sprintf("/gpu-test-%d", os.Getpid()) }

// Close removes what podman leaves in the cgroup trees, which are the machine's.
func (im *Images) Close() error { return RemoveCgroups(cgroupParent()) }

// MakeCgroups makes a cgroup in every tree of the machine.
func MakeCgroups(path string) error {
	trees, err := cgroupTrees()
	for _, tree := range trees {
		// A tree may have two names.
		if e := os.Mkdir(tree+path, 0o755); !errors.Is(e, os.ErrExist) {
			err = errors.Join(err, e)
		}
	}
	return err
}

// cgroupTrees are the directories that the trees of cgroups are mounted at.
func cgroupTrees() ([]string, error) {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.procs"); err == nil {
		return []string{"/sys/fs/cgroup"}, nil
	}
	procs, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	for i := range procs {
		procs[i] = filepath.Dir(procs[i])
	}
	return procs, err
}

// RemoveCgroups removes a cgroup from every tree of the machine, those in it first. No process may be in it.
func RemoveCgroups(path string) error {
	trees, err := cgroupTrees()
	errs := []error{err}
	for _, tree := range trees {
		if _, err := os.Stat(tree + path); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, removeCgroup(tree+path))
		}
	}
	return errors.Join(errs...)
}

// removeCgroup removes a cgroup and those in it, the innermost first: their files cannot be removed.
func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	errs := []error{err}
	for _, e := range entries {
		if e.IsDir() {
			errs = append(errs, removeCgroup(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(append(errs, os.Remove(dir))...)
}

func imageName(kind image.Kind) string { return "localhost/" + string(kind) + ":test" }

// Images are the root file systems of a whole run of tests, each built when it is first asked for.
type Images struct {
	dir string

	mu    sync.Mutex
	built map[image.Kind]bool
	store map[image.Kind]bool
}

// NewImages returns images that are kept in dir, which exists. They have to outlive the test that asks first.
func NewImages(dir string) *Images {
	return &Images{dir: dir, built: map[image.Kind]bool{}, store: map[image.Kind]bool{}}
}

// Copy returns a fresh copy of an image's root file system, which the test may spoil.
func (im *Images) Copy(t testing.TB, kind image.Kind) string {
	t.Helper()
	im.mu.Lock()
	src := im.build(t, kind)
	im.mu.Unlock()
	dst := filepath.Join(t.TempDir(), "rootfs")
	if err := image.Copy(src, dst); err != nil {
		t.Fatal(err)
	}
	return dst
}

// Restore makes a copy that was spoilt what it was.
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

// build is called with the lock held.
func (im *Images) build(t testing.TB, kind image.Kind) string {
	t.Helper()
	dir := filepath.Join(im.dir, string(kind))
	if im.built[kind] {
		return dir
	}
	for _, name := range []string{"cc", "busybox", "ldconfig"} {
		testenv.Command(t, name)
	}
	// What an earlier attempt left is not an image.
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := image.Build(t.Context(), kind, dir); err != nil {
		t.Fatal(err)
	}
	im.built[kind] = true
	return dir
}

// imported returns podman's store with an image in it.
func (im *Images) imported(t testing.TB, kind image.Kind) string {
	t.Helper()
	im.mu.Lock()
	defer im.mu.Unlock()
	store := filepath.Join(im.dir, "store")
	if im.store[kind] {
		return store
	}
	archive := filepath.Join(t.TempDir(), "image.tar")
	if err := image.WriteArchive(archive, imageName(kind), im.build(t, kind), []string{"PATH=/usr/sbin:/usr/bin"}, nil); err != nil {
		t.Fatal(err)
	}
	args := append(podman(t, store), "load", "--input", archive)
	if res := execute(t, inNamespace(t, t.TempDir(), V1, args...)); res.Code != 0 {
		t.Fatalf("import the image %s: %v", kind, res)
	}
	im.store[kind] = true
	return store
}
