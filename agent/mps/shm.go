package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A GPU's shm is a tmpfs, so that containers cannot fill the node's file system. It is mounted before the GPU's first
// daemon starts and unmounted when the GPU is released: running containers keep it mounted as /dev/shm, so a later
// daemon must use the same one to reach them.

const (
	shmType = "tmpfs"
	// shmSource distinguishes our mounts from an administrator's.
	shmSource = "gpu-cdi-plugin"
	shmFlags  = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	// shmPerInode is the number of bytes for each inode. Files smaller than a page would leave room for data but not
	// for more files.
	shmPerInode = 4096
)

// mountShm mounts a GPU's shm with a size in bytes. If it is mounted it gets that size, unless it contains more. What
// an administrator mounted there stays as it is.
func mountShm(gpuDir string, bytes uint64) error {
	dir, mounted, err := openShm(gpuDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	options := fmt.Sprintf("size=%d,nr_inodes=%d,mode=1777", bytes, bytes/shmPerInode)
	switch mounted {
	case ours:
		err := unix.Mount("", inProc(dir), "", unix.MS_REMOUNT|shmFlags, options)
		if err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("change the size of %s/%s: %w", gpuDir, shmName, err)
		}
		return nil
	case foreign:
		return nil
	}
	if err = unix.Mount(shmSource, inProc(dir), shmType, shmFlags, options); err == nil {
		if err = checkVisibleOnHost(gpuDir); err != nil {
			err = errors.Join(err, unmountShm(gpuDir))
		}
	}
	if err != nil {
		return fmt.Errorf("mount a tmpfs on %s/%s: %w", gpuDir, shmName, err)
	}
	return nil
}

// checkVisibleOnHost returns an error unless the host's process 1 sees a GPU's shm, and so the containers' runtime
// does. In a pod or a service of systemd a mount may remain private.
func checkVisibleOnHost(gpuDir string) error {
	path, err := filepath.EvalSymlinks(filepath.Join(gpuDir, shmName))
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	fileSystem := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	mounts, err := os.ReadFile("/proc/1/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line) // proc_pid_mountinfo(5)
		if len(fields) > 4 && fields[2] == fileSystem && unescape.Replace(fields[4]) == path {
			return nil
		}
	}
	return errors.New("it is not visible on the host: in a pod, mount runtime-dir with " +
		"mountPropagation: Bidirectional; in a service of systemd, remove PrivateTmp=, ProtectSystem= and the like")
}

// unescape restores the bytes that mountinfo writes in octal.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`)

// unmountShm unmounts a GPU's shm, if it is mounted. Containers that have it mounted retain it until they end.
func unmountShm(gpuDir string) error {
	dir, mounted, err := openShm(gpuDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_ = dir.Close()
	if mounted != ours {
		return nil
	}
	path := filepath.Join(gpuDir, shmName) // only root can change what it leads through
	if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	return nil
}

// prepared reports whether a GPU was prepared for a daemon, and not released since: its shm is mounted, or it has the
// record of a daemon.
func prepared(gpuDir string) bool {
	if _, err := os.Lstat(filepath.Join(gpuDir, recordName)); err == nil {
		return true
	}
	dir, mounted, err := openShm(gpuDir)
	if err != nil {
		return false
	}
	_ = dir.Close()
	return mounted == ours
}

// openShm opens a GPU's shm and returns what is mounted on it. It follows no link in the GPU's directory.
func openShm(gpuDir string) (*os.File, mountState, error) {
	gpu, err := openDir(unix.AT_FDCWD, gpuDir)
	if err != nil {
		return nil, unmounted, err
	}
	defer gpu.Close()
	dir, err := openDir(int(gpu.Fd()), shmName)
	if err != nil {
		return nil, unmounted, fmt.Errorf("in %s: %w", gpuDir, err)
	}
	state, err := stateOfMount(dir)
	if err != nil {
		_ = dir.Close()
		return nil, unmounted, err
	}
	return dir, state, nil
}

// mountState says whether a file system is mounted on a directory.
type mountState int

const (
	unmounted mountState = iota
	ours                 // mounted by mountShm
	foreign              // an administrator's
)

// stateOfMount returns the state of an open directory.
func stateOfMount(dir *os.File) (mountState, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(dir.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return unmounted, &os.PathError{Op: "statx", Path: dir.Name(), Err: err}
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return unmounted, nil
	}
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return unmounted, err
	}
	for line := range strings.Lines(string(mounts)) {
		if id, _, _ := strings.Cut(line, " "); id != strconv.FormatUint(st.Mnt_id, 10) {
			continue
		}
		_, rest, _ := strings.Cut(line, " - ")
		if fields := strings.Fields(rest); len(fields) > 1 && fields[0] == shmType && fields[1] == shmSource {
			return ours, nil
		}
	}
	return foreign, nil
}
