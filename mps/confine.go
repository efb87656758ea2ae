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

// This file takes from a process what an MPS program does not need. Its daemon is root and reads what containers send;
// docs/mps.md says what it is left with, and how that was found out.

// daemonCapabilities are what the control daemon needs: it runs a server as the user of its clients, and may have to kill
// it. The program that asks it needs none.
var daemonCapabilities = []int{unix.CAP_KILL, unix.CAP_SETUID}

// needed are patterns of what programs need of the node, and of the driver's root: libraries, their configuration, and
// devices. Files in etc and dev are named one by one: root can read the secrets in the one and write to the disks in the
// other.
var needed = []string{
	"usr", "bin", "sbin", "lib", "lib32", "lib64", "nix", "run/opengl-driver", "proc", "sys",
	"etc/alternatives", "etc/group", "etc/ld.so.cache", "etc/localtime", "etc/nsswitch.conf", "etc/nvidia", "etc/passwd",
	"dev/null", "dev/zero", "dev/full", "dev/random", "dev/urandom", "dev/nvidia*",
}

// separate gives the thread mount, network and IPC namespaces of its own. The driver's clients and servers meet in the pipe
// directory and in /dev/shm alone: those of different pods have different network and IPC namespaces too.
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

// enterRoot changes the root directory to one that has what programs need of the node and the driver, and the GPU's own
// directories, and nothing else: no volumes, which would stay in use, and no sockets of other services, which would obey
// root. Only the GPU's pipe, log and shared memory can be written to, and no link in them is followed.
func (e *Entry) enterRoot(own *os.File) error {
	const options = "size=64k,nr_inodes=1024,mode=755"
	if err := unix.Mount(volumeSource, inProc(own), volumeKind, unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount a root directory: %w", err)
	}
	top, err := openDir(unix.AT_FDCWD, e.Own) // what is mounted there now
	if err != nil {
		return err
	}
	defer top.Close()
	r := newRoot{at: inProc(top)}
	roots := []string{"/"}
	if e.DriverRoot != "" {
		roots = append(roots, e.DriverRoot)
	}
	for _, root := range roots {
		if err := r.showNeeded(root); err != nil {
			return err
		}
	}
	if err := r.show(filepath.Join(filepath.Dir(e.Own), librariesName)); err != nil {
		return err
	}
	places := map[string]string{pipeName: "", logName: "", shmName: "/dev/shm"}
	for name, at := range places {
		if at == "" {
			at = filepath.Join(e.Own, name)
		}
		places[name] = filepath.Join(r.at, at)
		if err := os.MkdirAll(places[name], 0o755); err != nil {
			return err
		}
	}
	if err := readOnly(top); err != nil {
		return err
	}
	for name, at := range places {
		if err := guard(own, name, at); err != nil {
			return fmt.Errorf("mount %s: %w", name, err)
		}
	}
	return pivot(top)
}

// newRoot is a root directory that is being made.
type newRoot struct {
	at    string   // its path
	shown []string // files and directories of the node, without links
}

// showNeeded shows what programs need of a root directory.
func (r *newRoot) showNeeded(root string) error {
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

// show makes a file of the node, or a directory with what is mounted in it, appear under the same path. What does not exist
// is left out.
func (r *newRoot) show(path string) error {
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if real != path && !r.has(path) {
		if err := os.MkdirAll(filepath.Join(r.at, filepath.Dir(path)), 0o755); err != nil {
			return err
		}
		if err := os.Symlink(real, filepath.Join(r.at, path)); err != nil {
			return err
		}
	}
	if r.has(real) {
		return nil
	}
	to := filepath.Join(r.at, real)
	if err := makeLike(to, real); err != nil {
		return err
	}
	r.shown = append(r.shown, real)
	if err := unix.Mount(real, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("show %s: %w", real, err)
	}
	return nil
}

// makeLike makes a directory where the other one is a directory, and a file where it is anything else.
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

// has reports whether a path is shown, or in a directory that is.
func (r *newRoot) has(path string) bool {
	return slices.ContainsFunc(r.shown, func(dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") })
}

// readOnly makes all mounts of a directory read-only.
func readOnly(dir *os.File) error {
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

// guard mounts a directory of the GPU's at a path, so that links in it lead nowhere, and devices in it are none.
func guard(own *os.File, name, at string) error {
	dir, err := openDir(int(own.Fd()), name)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Mount(inProc(dir), at, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	mounted, err := openDir(unix.AT_FDCWD, at) // what was opened before is below the mount
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
		return errors.New("the kernel has no mounts that follow no links; MPS needs Linux 5.12")
	}
	return nil
}

// pivot makes a directory the root, and takes the old one away.
func pivot(root *os.File) error {
	if err := unix.Fchdir(int(root.Fd())); err != nil {
		return fmt.Errorf("enter the root directory: %w", err)
	}
	// The old root is put on top of the new one, from where it is unmounted: there needs to be no directory for it.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change the root directory: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the old root directory: %w", err)
	}
	return unix.Chdir("/")
}

// restrict gives up all capabilities but some, for good: what the thread runs from then on cannot get more either.
func restrict(keep []int) error {
	var set [2]unix.CapUserData
	for c := 0; unix.Prctl(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0) == nil; c++ {
		if slices.Contains(keep, c) {
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
