// Package hoststate compares a host before and after an attack on one of its containers.
package hoststate

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// State is the state of a host at one time.
type State struct {
	dirs []string
	// files, mounts and devices have a line for each object. cgroups has the device rules and BPF programs.
	files, mounts, devices, cgroups map[string]string
}

// Take records the state of the calling thread's host: the files of some directories with content, permissions, owners,
// times and inode numbers; the mount table; /dev; and the device rules of the cgroups among the directories and above
// them. The thread must be in a mount namespace without other tests.
func Take(t testing.TB, dirs ...string) *State {
	t.Helper()
	s := &State{
		dirs:    dirs,
		files:   map[string]string{},
		mounts:  mounts(t),
		devices: devices(),
		cgroups: map[string]string{},
	}
	for _, dir := range append([]string{"/sys/fs/cgroup", "/sys/fs/cgroup/devices", "/sys/fs/cgroup/unified"}, dirs...) {
		if rules := rulesOf(dir); rules != "" {
			s.cgroups[dir] = rules
		}
	}
	for _, dir := range dirs {
		if s.cgroups[dir] != "" {
			continue
		}
		for name, is := range image.Digest(t, dir) {
			s.files[filepath.Join(dir, name)] = is
		}
		s.files[dir+": times and inode numbers"] = image.Fingerprint(t, dir)
	}
	return s
}

// Check fails the test if the host has changed. Changes of /dev are only logged outside CI, since other programs of the
// machine share it.
func (s *State) Check(t testing.TB) {
	t.Helper()
	now := Take(t, s.dirs...)
	for what, maps := range map[string][2]map[string]string{
		"file": {s.files, now.files}, "mount": {s.mounts, now.mounts}, "device": {s.devices, now.devices},
		"cgroup": {s.cgroups, now.cgroups},
	} {
		report := t.Errorf
		if what == "device" && os.Getenv("CI") != "true" {
			report = t.Logf
		}
		for name, is := range maps[1] {
			if was, ok := maps[0][name]; !ok && (what != "mount" || !isOfOther(t.Name(), is)) {
				report("the host has a new %s %s: %s", what, name, is)
			} else if ok && was != is {
				report("%s %s of the host is %q, before %q", what, name, is, was)
			}
		}
		for name, was := range maps[0] {
			if _, ok := maps[1][name]; !ok && (what != "mount" || !isOfOther(t.Name(), was)) {
				report("the host has lost its %s %s: %s", what, name, was)
			}
		}
	}
}

// isOfOther reports whether a mount that has come or gone is one of another test than the one with a name. It is below
// the temporary directory of that test, or its mount point is gone: removing that in one namespace unmounts it in all.
func isOfOther(test, mount string) bool {
	fields := strings.Fields(mount)
	if len(fields) < 4 {
		return false
	}
	point := strings.TrimSuffix(fields[3], `//deleted`)
	name, _, _ := strings.Cut(test, "/")
	if dir, below := strings.CutPrefix(point, filepath.Join(os.TempDir(), "Test")); below {
		return !strings.HasPrefix("Test"+dir, name)
	}
	_, err := os.Lstat(point)
	return errors.Is(err, fs.ErrNotExist)
}

// sizes matches options of a tmpfs that tests of other packages change meanwhile: they apply to all mounts of a file
// system.
var sizes = regexp.MustCompile(`,(size|nr_inodes)=\w+`)

func mounts(t testing.TB) map[string]string {
	t.Helper()
	table, err := os.ReadFile("/proc/thread-self/mountinfo")
	testenv.Must(t, err)
	lines := map[string]string{}
	for line := range strings.Lines(string(table)) {
		id, rest, _ := strings.Cut(line, " ")
		lines[id] = sizes.ReplaceAllString(rest, "")
	}
	return lines
}

// devices returns the files of /dev, except those that programs create all the time.
func devices() map[string]string {
	found := map[string]string{}
	_ = filepath.WalkDir("/dev", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // it was removed meanwhile
		}
		switch name {
		case "/dev/pts", "/dev/shm", "/dev/mqueue":
			return fs.SkipDir
		case os.DevNull: // crun changes its owner to the container's user, and back
			return nil
		}
		if info, err := d.Info(); err == nil {
			st := info.Sys().(*syscall.Stat_t)
			found[name] = fmt.Sprintf("%v %d:%d %#x", info.Mode(), st.Uid, st.Gid, st.Rdev)
		}
		return nil
	})
	return found
}

// rulesOf returns the device rules of a cgroup v1, or the IDs of the device programs of a cgroup v2. It returns "" for
// a directory that is not a cgroup.
func rulesOf(dir string) string {
	if list, err := os.ReadFile(filepath.Join(dir, "devices.list")); err == nil {
		return "rules " + string(list)
	}
	if _, err := os.Lstat(filepath.Join(dir, "cgroup.controllers")); err != nil {
		return ""
	}
	ids, err := programs(dir)
	return fmt.Sprint("programs ", ids, err)
}

func programs(cgroup string) ([]uint32, error) {
	dir, err := os.Open(cgroup)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	ids := make([]uint32, 64)
	attr := struct {
		target, kind, queryFlags, attachFlags uint32
		ids                                   *uint32
		count, _                              uint32
		_, _, _, revision                     uint64
	}{target: uint32(dir.Fd()), kind: unix.BPF_CGROUP_DEVICE, ids: &ids[0], count: uint32(len(ids))}
	if _, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_QUERY, uintptr(unsafe.Pointer(&attr)),
		unsafe.Sizeof(attr)); errno != 0 {
		return nil, errno
	}
	return ids[:attr.count], nil
}
