package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A GPU's shm is a tmpfs, so that containers cannot fill the node's file system. It is mounted before the GPU's first
// daemon starts and unmounted when the GPU is released: running containers keep it mounted as /dev/shm, so a later
// daemon must use the same one to reach them.

const (
	// shmSource distinguishes our mounts from an administrator's.
	shmSource = "gpu-cdi-plugin"
	shmType   = "tmpfs"
	shmFlags  = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	// shmPerInode is the number of bytes for each inode. Files smaller than a page would leave room for data but not
	// for more files.
	shmPerInode = 4096
)

func shmOptions(bytes uint64) string {
	return fmt.Sprintf("size=%d,nr_inodes=%d,mode=1777", bytes, bytes/shmPerInode)
}

// mountShm mounts a GPU's shm with a size in bytes, or resizes it if it is mounted. What an administrator mounted there
// stays.
func mountShm(gpuDir string, bytes uint64) error {
	dir, m, err := openShm(gpuDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	switch {
	case m.isShm():
		return resizeShm(gpuDir, bytes)
	case m != nil:
		return nil
	}
	if err := unix.Mount(shmSource, inProc(dir), shmType, shmFlags, shmOptions(bytes)); err != nil {
		return fmt.Errorf("mount a tmpfs on %s/%s: %w", gpuDir, shmName, err)
	}
	if err := checkVisibleOnHost(gpuDir); err != nil {
		return errors.Join(fmt.Errorf("mount a tmpfs on %s/%s: %w", gpuDir, shmName, err), unmountShm(gpuDir))
	}
	return nil
}

// checkVisibleOnHost returns an error unless the host's process 1 sees a GPU's shm, and so the containers' runtime
// does. In a pod or a service of systemd a mount may remain private.
func checkVisibleOnHost(gpuDir string) error {
	dir, m, err := openShm(gpuDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if !m.isShm() {
		return errors.New("it is hidden by another mount")
	}
	host, err := readMounts("/proc/1/mountinfo")
	if err != nil {
		return err
	}
	for _, h := range host {
		if h.dev == m.dev && h.path == m.path {
			return nil
		}
	}
	return errors.New("it is not visible on the host: in a pod, mount runtime-dir with " +
		"mountPropagation: Bidirectional; in a service of systemd, remove PrivateTmp=, ProtectSystem= and the like")
}

// resizeShm changes the size of a GPU's shm, unless it contains more.
func resizeShm(gpuDir string, bytes uint64) error {
	dir, m, err := openShm(gpuDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if !m.isShm() {
		return nil
	}
	err = unix.Mount("", inProc(dir), "", unix.MS_REMOUNT|shmFlags, shmOptions(bytes))
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("change the size of %s: %w", m.path, err)
	}
	return nil
}

// unmountShm unmounts a GPU's shm, if it is mounted. Containers that have it mounted retain it until they end.
func unmountShm(gpuDir string) error {
	for {
		dir, m, err := openShm(gpuDir)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		_ = dir.Close()
		if !m.isShm() {
			return nil
		}
		// Only root can change what the path leads through.
		if err := unix.Unmount(m.path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", m.path, err)
		}
	}
}

// openShm opens a GPU's shm and returns what is mounted on it, or nil. It follows no link in the GPU's directory.
func openShm(gpuDir string) (*os.File, *mount, error) {
	gpu, err := openDir(unix.AT_FDCWD, gpuDir)
	if err != nil {
		return nil, nil, err
	}
	defer gpu.Close()
	dir, err := openDir(int(gpu.Fd()), shmName)
	if err != nil {
		return nil, nil, fmt.Errorf("in %s: %w", gpuDir, err)
	}
	m, err := mountOn(dir)
	if err != nil {
		_ = dir.Close()
		return nil, nil, err
	}
	return dir, m, nil
}

// prepared reports whether a GPU was prepared for a daemon: its shm is mounted, or it has the record of a daemon.
func prepared(gpuDir string) bool {
	if recorded(gpuDir) {
		return true
	}
	dir, m, err := openShm(gpuDir)
	if err != nil {
		return false
	}
	_ = dir.Close()
	return m.isShm()
}

// mount is a line of /proc/PID/mountinfo: proc_pid_mountinfo(5).
type mount struct {
	id             uint64
	dev, path      string // dev is the file system as MAJOR:MINOR
	fsType, source string
}

// isShm reports whether m is a mount of ours.
func (m *mount) isShm() bool { return m != nil && m.fsType == shmType && m.source == shmSource }

// mountOn returns the mount whose root is an open directory, or nil if nothing is mounted there.
func mountOn(dir *os.File) (*mount, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(dir.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return nil, &os.PathError{Op: "statx", Path: dir.Name(), Err: err}
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return nil, nil //nolint:nilnil // there is none
	}
	mounts, err := readMounts("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, err
	}
	for i := range mounts {
		if mounts[i].id == st.Mnt_id {
			return &mounts[i], nil
		}
	}
	return nil, fmt.Errorf("the mount of %s is unknown", dir.Name())
}

func readMounts(path string) ([]mount, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var mounts []mount
	for line := range strings.Lines(string(text)) {
		m, err := parseMount(line)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		mounts = append(mounts, m)
	}
	return mounts, nil
}

func parseMount(line string) (mount, error) {
	before, after, ok := strings.Cut(line, " - ")
	left, right := strings.Fields(before), strings.Fields(after)
	if !ok || len(left) < 6 || len(right) < 2 {
		return mount{}, fmt.Errorf("not the line of a mount: %s", excerpt(line))
	}
	id, err := strconv.ParseUint(left[0], 10, 64)
	if err != nil {
		return mount{}, fmt.Errorf("not the line of a mount: %s", excerpt(line))
	}
	return mount{
		id: id, dev: left[2], path: unescape.Replace(left[4]), fsType: right[0], source: unescape.Replace(right[1]),
	}, nil
}

// unescape restores the bytes that mountinfo writes in octal.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`)
