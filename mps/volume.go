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

// volume is a tmpfs on a directory that the GPU's containers see, so that they cannot fill the node's file system. It is
// mounted before the GPU's first daemon starts and unmounted when the GPU is released: running containers keep what they
// have mounted, so a later daemon must use the same one to reach them.
type volume struct {
	name          string
	mode          uint32
	bytes, inodes uint64
}

const (
	// volumeSource distinguishes our mounts from an administrator's.
	volumeSource = "gpu-cdi-plugin"
	volumeType   = "tmpfs"
	volumeFlags  = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

	// The pipe directory has sockets and a few small files. Each inode takes about 1 KiB of the kernel's memory.
	pipeBytes  = 4 << 20
	pipeInodes = 4096
	// shmPerInode is the number of bytes of shared memory for each inode. Files smaller than a page would leave room for
	// data but not for more files.
	shmPerInode = 4096
)

// volumes returns those of a GPU with so many bytes of shared memory.
func volumes(shm uint64) []volume {
	return []volume{
		{name: pipeName, mode: 0o755, bytes: pipeBytes, inodes: pipeInodes},
		{name: shmName, mode: 0o1777, bytes: shm, inodes: shm / shmPerInode},
	}
}

func (v volume) options() string {
	return fmt.Sprintf("size=%d,nr_inodes=%d,mode=%o", v.bytes, v.inodes, v.mode)
}

// mount mounts the volume, or resizes it if it is mounted. What an administrator mounted there stays.
func (v volume) mount(gpu *os.File) error {
	dir, m, err := v.open(gpu)
	if err != nil {
		return err
	}
	defer dir.Close()
	switch {
	case m.isVolume():
		return v.resize(gpu)
	case m != nil:
		return nil
	}
	path, err := os.Readlink(inProc(dir))
	if err != nil {
		return err
	}
	if err := unix.Mount(volumeSource, inProc(dir), volumeType, volumeFlags, v.options()); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", path, err)
	}
	if err := visibleOnHost(gpu, v); err != nil {
		return errors.Join(fmt.Errorf("mount a tmpfs on %s: %w", path, err), v.unmount(gpu))
	}
	return nil
}

// visibleOnHost returns an error unless the host's process 1 sees the volume, and so the containers' runtime does. In a pod
// or a service of systemd a mount may remain private.
func visibleOnHost(gpu *os.File, v volume) error {
	dir, m, err := v.open(gpu)
	if err != nil {
		return err
	}
	defer dir.Close()
	if !m.isVolume() {
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
	return errors.New("it is not visible on the host: in a pod, mount runtime-dir with mountPropagation: Bidirectional; " +
		"in a service of systemd, remove PrivateTmp=, ProtectSystem= and the like")
}

// resize changes the size of a volume that is mounted. One that contains more keeps its size.
func (v volume) resize(gpu *os.File) error {
	dir, m, err := v.open(gpu)
	if err != nil {
		return err
	}
	defer dir.Close()
	if !m.isVolume() {
		return nil
	}
	err = unix.Mount("", inProc(dir), "", unix.MS_REMOUNT|volumeFlags, v.options())
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("change the size of %s: %w", m.path, err)
	}
	return nil
}

// unmount removes the volume. Containers that have it mounted retain it until they end.
func (v volume) unmount(gpu *os.File) error {
	for {
		dir, m, err := v.open(gpu)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		_ = dir.Close()
		if !m.isVolume() {
			return nil
		}
		// Only root can change what the path leads through.
		if err := unix.Unmount(m.path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", m.path, err)
		}
	}
}

// open opens the volume's directory and returns what is mounted on it, or nil.
func (v volume) open(gpu *os.File) (*os.File, *mount, error) {
	dir, err := openDir(int(gpu.Fd()), v.name)
	if err != nil {
		return nil, nil, err
	}
	m, err := mountOn(dir)
	if err != nil {
		_ = dir.Close()
		return nil, nil, err
	}
	return dir, m, nil
}

// resizeShared changes the size of a GPU's shared memory.
func resizeShared(gpuDir string, shm uint64) error {
	return eachVolume(gpuDir, shm, func(v volume, gpu *os.File) error {
		if v.name != shmName {
			return nil
		}
		return v.resize(gpu)
	})
}

// unmountVolumes unmounts a GPU's volumes, if there are any.
func unmountVolumes(gpuDir string) error {
	err := eachVolume(gpuDir, 0, volume.unmount)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func eachVolume(gpuDir string, shm uint64, do func(volume, *os.File) error) error {
	gpu, err := openDir(unix.AT_FDCWD, gpuDir)
	if err != nil {
		return err
	}
	defer gpu.Close()
	var errs []error
	for _, v := range volumes(shm) {
		errs = append(errs, do(v, gpu))
	}
	return errors.Join(errs...)
}

// prepared reports whether a GPU was prepared for a daemon: it has a volume, or the record of a daemon.
func prepared(gpuDir string) bool {
	if recorded(gpuDir) {
		return true
	}
	mounted := false
	_ = eachVolume(gpuDir, 0, func(v volume, gpu *os.File) error {
		dir, m, err := v.open(gpu)
		if err == nil {
			mounted = mounted || m.isVolume()
			_ = dir.Close()
		}
		return err
	})
	return mounted
}

// mount is a line of /proc/PID/mountinfo: proc_pid_mountinfo(5).
type mount struct {
	id                uint64
	dev, path         string // dev is the file system as MAJOR:MINOR
	fsType, mountedAs string // mountedAs is the source
}

// isVolume reports whether m is a mount of ours.
func (m *mount) isVolume() bool {
	return m != nil && m.fsType == volumeType && m.mountedAs == volumeSource
}

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
	return mount{id: id, dev: left[2], path: unescape.Replace(left[4]), fsType: right[0], mountedAs: unescape.Replace(right[1])}, nil
}

// unescape restores the bytes that mountinfo writes in octal.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`)
