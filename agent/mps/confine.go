package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// This file confines a process to what an MPS program needs. The daemon runs as root and reads what containers send.
// docs/sharing.md describes the result and its sources.

// daemonCapabilities are what the control daemon needs: it runs a server as the user of its clients, and may have to
// kill it. A client of the daemon needs none.
var daemonCapabilities = []int{unix.CAP_KILL, unix.CAP_SETUID}

// needed are patterns of what programs need below the root directory and below the driver's: libraries, their
// configuration, and devices. Files in etc and dev are listed one by one: the rest are secrets that root can read and
// disks that root can write to.
var needed = []string{
	"usr", "bin", "sbin", "lib", "lib32", "lib64", "nix", "run/opengl-driver", "proc", "sys",
	"etc/alternatives", "etc/group", "etc/ld.so.cache", "etc/localtime", "etc/nsswitch.conf", "etc/nvidia",
	"etc/passwd", "dev/null", "dev/zero", "dev/full", "dev/random", "dev/urandom", "dev/nvidia*",
}

// separate moves the thread to new mount, network and IPC namespaces. MPS clients and servers need only the pipe
// directory and /dev/shm in common: those of different pods have different network and IPC namespaces too.
func separate() error {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC); err != nil {
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("root, or CAP_SYS_ADMIN, is needed: %w", err)
		}
		return fmt.Errorf("make namespaces: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	return nil
}

// enterRoot changes the root directory to a new one with what programs need and the GPU's directories, and nothing
// else: no volumes of pods, which would stay in use, and no sockets of other services, which obey root. Only the GPU's
// pipe, log and shm are writable, and links in them are not followed.
func (e *entry) enterRoot(gpu *os.File) error {
	const options = "size=1m,nr_inodes=1024,mode=755"
	if err := unix.Mount(shmSource, inProc(gpu), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount a root directory: %w", err)
	}
	top, err := openDir(unix.AT_FDCWD, e.Dir) // what is mounted there now
	if err != nil {
		return err
	}
	defer top.Close()
	r := rootBuilder{path: inProc(top)}
	roots := []string{"/"}
	if e.Program.Root != "" {
		roots = append(roots, e.Program.Root)
	}
	for _, root := range roots {
		if err := r.showNeeded(root); err != nil {
			return err
		}
	}
	if err := r.linkLibraries(e.Program.Libraries); err != nil {
		return err
	}
	paths := map[string]string{
		pipeName: filepath.Join(r.path, e.Dir, pipeName),
		logName:  filepath.Join(r.path, e.Dir, logName),
		shmName:  filepath.Join(r.path, "/dev/shm"),
	}
	for _, path := range paths {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
	}
	if err := makeReadOnly(top); err != nil {
		return err
	}
	for name, path := range paths {
		if err := mountGuarded(gpu, name, path); err != nil {
			return fmt.Errorf("mount %s: %w", name, err)
		}
	}
	return pivot(top)
}

// librariesDir is a directory in the new root with links to the driver's libraries, where the loader searches for them.
const librariesDir = "/libraries"

// rootBuilder makes a root directory. Only this process sees it, so plain paths are safe there.
type rootBuilder struct {
	path  string
	shown []string // files and directories of the node that appear in it, without links
}

// showNeeded shows what matches needed below a root directory.
func (r *rootBuilder) showNeeded(root string) error {
	for _, pattern := range needed {
		names, err := fs.Glob(os.DirFS(root), pattern)
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := r.show(filepath.Join(root, name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// show makes a file of the node, or a directory with the mounts below it, appear under the same path. A missing one is
// skipped.
func (r *rootBuilder) show(path string) error {
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if real != path && !r.has(path) {
		if err := os.MkdirAll(filepath.Join(r.path, filepath.Dir(path)), 0o755); err != nil {
			return err
		}
		if err := os.Symlink(real, filepath.Join(r.path, path)); err != nil {
			return err
		}
	}
	if r.has(real) {
		return nil
	}
	to := filepath.Join(r.path, real)
	if err := makeLike(to, real); err != nil {
		return err
	}
	r.shown = append(r.shown, real)
	if err := unix.Mount(real, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("show %s: %w", real, err)
	}
	return nil
}

// linkLibraries makes the directory with links to the driver's libraries.
func (r *rootBuilder) linkLibraries(libraries map[string]string) error {
	dir := filepath.Join(r.path, librariesDir)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for name, path := range libraries {
		if name != filepath.Base(name) {
			return fmt.Errorf("link the driver's library %s: %q is not a file name", path, name)
		}
		if err := os.Symlink(path, filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("link the driver's library %s: %w", name, err)
		}
	}
	return nil
}

// makeLike makes a directory if the other path is one, and otherwise a file.
func makeLike(path, other string) error {
	info, err := os.Lstat(other)
	if err != nil {
		return err
	}
	if info.IsDir() {
		return os.MkdirAll(path, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// has reports whether a path, or a directory above it, is shown.
func (r *rootBuilder) has(path string) bool {
	isIn := func(dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }
	return slices.ContainsFunc(r.shown, isIn)
}

// makeReadOnly makes a directory and all mounts below it read-only.
func makeReadOnly(dir *os.File) error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	err := unix.MountSetattr(int(dir.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr)
	if errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("MPS needs Linux 5.12: %w", err)
	}
	if err != nil {
		return fmt.Errorf("make the root directory read-only: %w", err)
	}
	return nil
}

const (
	guarded = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOSYMFOLLOW
	// noSymFollow is ST_NOSYMFOLLOW of linux/statfs.h.
	noSymFollow = 0x2000
)

// mountGuarded mounts a directory of the GPU's at a path, without following links or opening devices in it.
func mountGuarded(gpu *os.File, name, path string) error {
	dir, err := openDir(int(gpu.Fd()), name)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Mount(inProc(dir), path, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	mounted, err := openDir(unix.AT_FDCWD, path) // dir is below the mount
	if err != nil {
		return err
	}
	defer mounted.Close()
	if err := unix.Mount("", inProc(mounted), "", unix.MS_BIND|unix.MS_REMOUNT|guarded, ""); err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(mounted.Fd()), &st); err != nil {
		return err
	}
	if st.Flags&noSymFollow == 0 {
		return errors.New("the kernel does not know nosymfollow mounts; MPS needs Linux 5.12")
	}
	return nil
}

// pivot makes a directory the root directory, and unmounts the old one.
func pivot(root *os.File) error {
	if err := unix.Fchdir(int(root.Fd())); err != nil {
		return fmt.Errorf("enter the root directory: %w", err)
	}
	// The old root is stacked on the new one and unmounted from there, so it needs no directory of its own:
	// pivot_root(2).
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change the root directory: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the old root directory: %w", err)
	}
	return unix.Chdir("/")
}

// restrict drops all other capabilities for good: programs that the thread runs later cannot regain them.
func restrict(allowed []int) error {
	var set [2]unix.CapUserData
	for c := 0; unix.Prctl(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0) == nil; c++ {
		if slices.Contains(allowed, c) {
			set[c/32].Permitted |= 1 << (c % 32)
			set[c/32].Effective |= 1 << (c % 32)
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	// What is not inheritable is not ambient either.
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &set[0]); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	return nil
}
