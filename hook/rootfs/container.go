package rootfs

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/proc"
)

// CheckContainer returns an error unless the root is a mount point in a mount namespace other than that of process 1.
// Otherwise the hook would write and mount on the host.
func (r *Root) CheckContainer() error {
	parent, err := openat(r.dir, "..", unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer closeQuietly(parent)
	id, err := mountID(parent)
	if err != nil {
		return err
	}
	if id == r.mount {
		return errors.New("it is not a mount point")
	}
	isHost, err := r.isInHostNamespace()
	if err != nil {
		return fmt.Errorf("compare its mount namespace with the host's: %w", err)
	}
	if isHost {
		return errors.New("it is in the host's mount namespace, that of process 1")
	}
	return nil
}

// CheckMountedSince returns an error unless a runtime mounted the root for this container. `others` are the mounts of
// the mount namespace that was copied. Runtimes mount a root over itself, so the root's mount point must have more
// mounts in this namespace than in `others`. If it has not, the root may be another container's.
func (r *Root) CheckMountedSince(others []proc.Mount) error {
	own, err := ownMounts()
	if err != nil {
		return err
	}
	i := slices.IndexFunc(own, r.isMount)
	if i < 0 || mountsAt(own, own[i].Point) <= mountsAt(others, own[i].Point) {
		return errors.New("the host has that mount too, so no runtime made it for this container")
	}
	return nil
}

func (r *Root) isMount(m proc.Mount) bool { return m.ID == r.mount }

func mountsAt(mounts []proc.Mount, point string) (n int) {
	for _, m := range mounts {
		if m.Point == point {
			n++
		}
	}
	return n
}

// procfs is the path of /proc, in the host's mount namespace and in copies of it.
const procfs = "/proc"

// ownMounts returns the mounts of the calling thread's mount namespace.
func ownMounts() ([]proc.Mount, error) {
	self, err := proc.Self(procfs)
	if err != nil {
		return nil, err
	}
	defer self.Close()
	return self.Mounts()
}

// isInHostNamespace reports whether the root's mount is in the mount namespace of process 1. It tries three ways:
//
//  1. Compare the two namespaces. The kernel forbids it in a user namespace and under some security modules.
//  2. Search the mounts of process 1 for the mount's ID, which is unique on the machine. Every process can read them,
//     unless /proc hides process 1 (hidepid).
//  3. Check the owner of the mount namespace: if it is a user namespace other than the initial one, the mount namespace
//     is not the host's.
func (r *Root) isInHostNamespace() (bool, error) {
	self, err := proc.Self(procfs)
	if err != nil {
		return false, err
	}
	defer self.Close()
	first, err := proc.Open(procfs, 1)
	if err != nil {
		return isOwnedByHost(self, err)
	}
	defer first.Close()
	own, err := self.Namespace("mnt")
	if err != nil {
		return false, err
	}
	if host, err := first.Namespace("mnt"); err == nil {
		return own == host, nil
	}
	mounts, err := first.Mounts()
	if err != nil {
		return isOwnedByHost(self, err)
	}
	return slices.ContainsFunc(mounts, r.isMount), nil
}

// isOwnedByHost reports whether the initial user namespace owns the mount namespace. If so, it returns `cause`: the
// error because of which the two mount namespaces could not be compared.
func isOwnedByHost(self *proc.Process, cause error) (bool, error) {
	owner, err := self.OwnerOfMounts()
	switch {
	case err != nil:
		return false, errors.Join(cause, err)
	case owner == proc.InitialUser:
		return false, cause
	}
	return false, nil
}

// mountID returns the ID of the mount that f is on.
func mountID(f *os.File) (uint64, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return 0, &os.PathError{Op: "statx", Path: f.Name(), Err: err}
	}
	if st.Mask&unix.STATX_MNT_ID != 0 {
		return st.Mnt_id, nil
	}
	return mountIDFromProc(f)
}

// mountIDFromProc does what mountID does, for kernels older than Linux 5.8.
func mountIDFromProc(f *os.File) (uint64, error) {
	self, err := proc.Self(procfs)
	if err != nil {
		return 0, err
	}
	defer self.Close()
	id, err := self.FDInfo(strconv.Itoa(int(f.Fd())), "mnt_id")
	if err != nil {
		return 0, err
	}
	if id == "" {
		return 0, fmt.Errorf("%s: the kernel does not report its mount", f.Name())
	}
	return strconv.ParseUint(id, 10, 64)
}
