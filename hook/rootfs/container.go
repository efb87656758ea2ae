package rootfs

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
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

// CheckMountedSince returns an error unless the root's mount point has more mounts in this process's mount namespace
// than in the mountinfo of the process whose namespace was copied: runtimes mount a root over itself. If it does not,
// the other namespace has the same mount, which may be another container's root.
func (r *Root) CheckMountedSince(other []byte) error {
	own, err := ReadHostFile("/proc/thread-self/mountinfo", maxMountinfo)
	if err != nil {
		return err
	}
	point := mountPoint(findMount(own, r.mount))
	if point == "" || mountsAt(own, point) <= mountsAt(other, point) {
		return errors.New("the host has that mount too, so no runtime made it for this container")
	}
	return nil
}

func mountsAt(mountinfo []byte, point string) (n int) {
	for line := range strings.Lines(string(mountinfo)) {
		if mountPoint(line) == point {
			n++
		}
	}
	return n
}

// mountPoint returns the fifth field of a line of mountinfo, still escaped, or "".
func mountPoint(line string) string {
	if fields := strings.SplitN(line, " ", 6); len(fields) == 6 {
		return fields[4]
	}
	return ""
}

// isInHostNamespace reports whether the root's mount is in the mount namespace of process 1. It tries three ways:
//
//  1. Compare the two namespaces. The kernel forbids it in a user namespace and under some security modules.
//  2. Search the mounts of process 1 for the mount's ID, which is unique on the machine. Every process can read them,
//     unless /proc hides process 1 (hidepid).
//  3. Check the owner of the mount namespace: if it is a user namespace other than the initial one, the mount namespace
//     is not the host's.
func (r *Root) isInHostNamespace() (bool, error) {
	own, err := inode("/proc/thread-self/ns/mnt")
	if err != nil {
		return false, err
	}
	if host, err := inode("/proc/1/ns/mnt"); err == nil {
		return own == host, nil
	}
	mounts, err := ReadHostFile("/proc/1/mountinfo", maxMountinfo)
	if err == nil {
		return findMount(mounts, r.mount) != "", nil
	}
	if owner, ownerErr := mountNamespaceOwner(); ownerErr != nil {
		return false, errors.Join(err, ownerErr)
	} else if owner == initialUserNamespace {
		return false, err
	}
	return false, nil
}

// initialUserNamespace is the inode number of the initial user namespace, USER_NS_INIT_INO of linux/nsfs.h.
const initialUserNamespace = 0xEFFFFFFD

// mountNamespaceOwner returns the inode number of the user namespace that owns the mount namespace. The kernel refuses
// to tell it to a process in a descendant of that user namespace.
func mountNamespaceOwner() (uint64, error) {
	ns, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return 0, err
	}
	defer closeQuietly(ns)
	owner, err := unix.IoctlRetInt(int(ns.Fd()), unix.NS_GET_USERNS)
	if err != nil {
		return 0, fmt.Errorf("get the owner of the mount namespace: %w", err)
	}
	f := os.NewFile(uintptr(owner), "user namespace")
	defer closeQuietly(f)
	var st unix.Stat_t
	if err := unix.Fstat(owner, &st); err != nil {
		return 0, fmt.Errorf("stat the owner of the mount namespace: %w", err)
	}
	return st.Ino, nil
}

func inode(name string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(name, &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: name, Err: err}
	}
	return st.Ino, nil
}

const maxMountinfo = 64 << 20 // bytes; a namespace has at most 100,000 mounts by default

// findMount returns the line of the mount with an ID in a mountinfo file, or "". The ID is the first field
// (proc_pid_mountinfo(5)).
func findMount(mountinfo []byte, id uint64) string {
	prefix := strconv.FormatUint(id, 10) + " "
	for line := range strings.Lines(string(mountinfo)) {
		if strings.HasPrefix(line, prefix) {
			return line
		}
	}
	return ""
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

// mountIDFromProc does what mountID does, for kernels before Linux 5.8.
func mountIDFromProc(f *os.File) (uint64, error) {
	info, err := ReadHostFile("/proc/thread-self/fdinfo/"+strconv.Itoa(int(f.Fd())), 1<<20)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(info)) {
		if id, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			return strconv.ParseUint(strings.TrimSpace(id), 10, 64)
		}
	}
	return 0, fmt.Errorf("%s: the kernel does not report its mount", f.Name())
}
