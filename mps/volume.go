package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// volume is a file system in memory of a GPU's own. It is mounted on a directory that the GPU's containers write to, so
// that they can fill nothing else, and so that a daemon that begins anew has an empty one.
type volume struct {
	name          string
	mode          uint32
	bytes, inodes uint64
}

const (
	// volumeSource tells our mounts from those of others.
	volumeSource = "gpu-cdi-plugin"
	volumeKind   = "tmpfs"
	volumeFlags  = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

	// The pipe directory has sockets and a few small files. Each inode takes about 1 KiB of the kernel's memory.
	pipeBytes  = 4 << 20
	pipeInodes = 4096
	// shmPerInode is how many bytes of shared memory there are for each inode; with less than a page in each file there is
	// more room for data than for files.
	shmPerInode = 4096
)

// volumes are those of a GPU with so many bytes of shared memory.
func volumes(shm uint64) []volume {
	return []volume{
		{name: pipeName, mode: 0o755, bytes: pipeBytes, inodes: pipeInodes},
		{name: shmName, mode: 0o1777, bytes: shm, inodes: shm / shmPerInode},
	}
}

func (v volume) options() string {
	return fmt.Sprintf("size=%d,nr_inodes=%d,mode=%o", v.bytes, v.inodes, v.mode)
}

// ours reports whether the directory is a volume.
func (p place) ours() bool {
	return p.top && p.mount.kind == volumeKind && p.mount.source == volumeSource
}

func (v volume) locate(own *os.File) (place, error) {
	dir, err := openDir(int(own.Fd()), v.name)
	if err != nil {
		return place{}, err
	}
	defer dir.Close()
	return locate(dir)
}

// give makes the directory the volume: an empty one, but where a container has what is there it stays. Where it stays a
// directory of the file system that it is in, plain says why.
func (v volume) give(own *os.File) (plain string, err error) {
	p, err := v.locate(own)
	if err != nil {
		return "", err
	}
	if p.top && !p.ours() {
		return "", nil // an administrator gave it one
	}
	used, known := p.used()
	switch {
	case p.ours() && (used || !known):
		return "", v.resize(own)
	case p.ours():
		err = v.drop(own)
	case used:
		return "containers have had it since before", nil
	case known:
		err = clearDir(own, v.name)
	}
	if err != nil {
		return "", err
	}
	return v.mount(own)
}

// mount mounts the volume, if that is allowed and the host sees it.
func (v volume) mount(own *os.File) (plain string, err error) {
	dir, err := openDir(int(own.Fd()), v.name)
	if err != nil {
		return "", err
	}
	defer dir.Close()
	in, err := locate(dir)
	if err != nil {
		return "", err
	}
	err = unix.Mount(volumeSource, inProc(dir), volumeKind, volumeFlags, v.options())
	if errors.Is(err, unix.EPERM) {
		return "mounting needs CAP_SYS_ADMIN", nil
	}
	if err != nil {
		return "", fmt.Errorf("mount a file system on %s: %w", in.path, err)
	}
	now, err := v.locate(own)
	if err == nil && !now.ours() {
		err = fmt.Errorf("what was mounted on %s is not there", in.path)
	}
	if err != nil || now.onHost(in.mount) {
		return "", err
	}
	const why = "what is mounted here is not seen on the host: in a pod, mount runtime-dir with mountPropagation: Bidirectional; " +
		"in a service of systemd, do without PrivateTmp= and the like"
	return why, v.drop(own)
}

// resize gives a volume that is mounted another size. One that has more in it than that keeps its size.
func (v volume) resize(own *os.File) error {
	p, err := v.locate(own)
	if err != nil || !p.ours() {
		return err
	}
	dir, err := openDir(int(own.Fd()), v.name)
	if err != nil {
		return err
	}
	defer dir.Close()
	err = unix.Mount("", inProc(dir), "", unix.MS_REMOUNT|volumeFlags, v.options())
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("change the size of %s: %w", p.path, err)
	}
	return nil
}

// drop takes the volume away. Containers that have it keep it until they end.
func (v volume) drop(own *os.File) error {
	for {
		p, err := v.locate(own)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !p.ours() {
			return err
		}
		// Nobody but root can change what the path leads through.
		if err := unix.Unmount(p.path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", p.path, err)
		}
	}
}

// resizeShared gives a GPU's shared memory another size, if it is a volume.
func resizeShared(own string, shm uint64) error {
	return eachVolume(own, shm, func(v volume, dir *os.File) error {
		if v.name != shmName {
			return nil
		}
		return v.resize(dir)
	})
}

// dropVolumes takes a GPU's volumes away, if there are any.
func dropVolumes(own string) error {
	err := eachVolume(own, 0, volume.drop)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func eachVolume(own string, shm uint64, do func(volume, *os.File) error) error {
	dir, err := openDir(unix.AT_FDCWD, own)
	if err != nil {
		return err
	}
	defer dir.Close()
	var errs []error
	for _, v := range volumes(shm) {
		errs = append(errs, do(v, dir))
	}
	return errors.Join(errs...)
}

// prepared reports whether a GPU was prepared for a daemon: it has a volume, or the record of one that was started.
func prepared(own string) bool {
	if recorded(own) {
		return true
	}
	has := false
	_ = eachVolume(own, 0, func(v volume, dir *os.File) error {
		at, err := openDir(int(dir.Fd()), v.name)
		if err != nil {
			return err
		}
		defer at.Close()
		if st, err := mountOf(at); err != nil || !isTop(st) {
			return err
		}
		p, err := locate(at)
		has = has || p.ours()
		return err
	})
	return has
}
