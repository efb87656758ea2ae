package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// attackedPaths are those that the hook makes, mounts to or reads, and the directories above them.
var attackedPaths = []string{
	"/dev", "/dev/nvidia0", "/dev/dri", "/dev/dri/card0", "/dev/dri/by-path",
	"/opt", "/opt/driver", "/opt/driver/libcuda.so.580.1", "/opt/driver/dir",
	"/usr/lib/x", "/usr/lib/x/libcuda.so.1", "/usr/lib/x/new", "/usr/lib/x/new/libcuda.so",
	"/etc", "/etc/ld.so.cache", "/etc/ld-musl-x86_64.path", "/etc/ld.so.conf.d",
	"/etc/nvidia/nvidia-application-profiles-rc.d", "/usr/local/cuda/compat", "/usr/local/cuda/compat/libcuda.so.999.1",
}

// hostile is what an image or a volume can have at a path. The path does not exist, and the directory above it does.
var hostile = map[string]func(a *attack, name string){
	// CVE-2024-0132, CVE-2024-0133, CVE-2025-23359 and CVE-2025-23267: links where the hook reads, mounts or writes.
	"a link out, by path":         func(a *attack, name string) { a.link(a.outside, name) },
	"a link to a file, by path":   func(a *attack, name string) { a.link(a.outside+"/file", name) },
	"a link to a secret, by path": func(a *attack, name string) { a.link(a.outside+"/secret", name) },
	"a link out, by climbing":     func(a *attack, name string) { a.link(strings.Repeat("../", 40)+a.outside, name) },
	"a link to a file, upwards": func(a *attack, name string) {
		a.link(strings.Repeat("../", 40)+a.outside+"/file", name)
	},
	"a link to another root":     func(a *attack, name string) { a.link(a.outside+"/victim", name) },
	"a link to the root":         func(a *attack, name string) { a.link("/", name) },
	"a link to itself":           func(a *attack, name string) { a.link(filepath.Base(name), name) },
	"a dangling link":            func(a *attack, name string) { a.link("/nowhere/at/all", name) },
	"a link that is no UTF-8":    func(a *attack, name string) { a.link("/\xff\xfe/\x01", name) },
	"a link with 4,000 bytes":    func(a *attack, name string) { a.link(strings.Repeat("/x", 2000), name) },
	"a chain of 60 links":        func(a *attack, name string) { a.chain(name, 60) },
	"a link by /proc/self/root":  func(a *attack, name string) { a.link("/proc/self/root"+a.outside, name) },
	"a link by process 1's root": func(a *attack, name string) { a.link("/proc/1/root"+a.outside, name) },
	"a link by /proc/self/cwd":   func(a *attack, name string) { a.link("/proc/self/cwd", name) },
	"a link by a descriptor":     func(a *attack, name string) { a.link("/proc/self/fd/5", name) },
	"a link by thread-self":      func(a *attack, name string) { a.link("/proc/thread-self/root/etc", name) },
	// CVE-2019-16884
	"a link to what runtimes write": func(a *attack, name string) { a.link("/proc/1/attr/exec", name) },
	"a link to a setting":           func(a *attack, name string) { a.link("/proc/sys/kernel/core_pattern", name) },
	"a link to settings":            func(a *attack, name string) { a.link("/proc/sys/kernel", name) },

	"a volume":               func(a *attack, name string) { a.volume("volume", name) },
	"a volume of one file":   func(a *attack, name string) { a.volume("file", name) },
	"a secret":               func(a *attack, name string) { a.volume("secret", name) },
	"a link to a volume":     func(a *attack, name string) { a.linked("volume", "", name) },
	"a link into a volume":   func(a *attack, name string) { a.linked("volume", "/new", name) },
	"a link to a Secret":     func(a *attack, name string) { a.linked("volume", "/secret", name) },
	"a volume in memory":     func(a *attack, name string) { a.memory(); a.volume("memory", name) },
	"a link to one":          func(a *attack, name string) { a.memory(); a.linked("memory", "", name) },
	"a link into one":        func(a *attack, name string) { a.memory(); a.linked("memory", "/new", name) },
	"a volume with a device": func(a *attack, name string) { a.volume("driver", name) },
	"a shared volume":        func(a *attack, name string) { a.shared(); a.volume("volume", name) },
	"a link to a shared one": func(a *attack, name string) { a.shared(); a.linked("volume", "", name) },
	"a link to a file of a shared one": func(a *attack, name string) {
		a.shared()
		a.linked("volume", "/file", name)
	},

	"a FIFO":              func(a *attack, name string) { testenv.Must(a.t, unix.Mkfifo(a.path(name), 0o666)) },
	"a watchdog":          func(a *attack, name string) { a.device(name, 10, 130) },
	"the kernel's memory": func(a *attack, name string) { a.device(name, 1, 1) },
	"another GPU":         func(a *attack, name string) { a.device(name, 195, 1) },
	"a block device": func(a *attack, name string) {
		testenv.Must(a.t, unix.Mknod(a.path(name), unix.S_IFBLK|0o666, int(unix.Mkdev(7, 0))))
	},
	"a socket": func(a *attack, name string) { a.socket(name) },
	"a file of 4 GiB": func(a *attack, name string) {
		testenv.Must(a.t, os.WriteFile(a.path(name), nil, 0o644))
		testenv.Must(a.t, os.Truncate(a.path(name), 4<<30))
	},
	"a hard link to a file outside": func(a *attack, name string) {
		testenv.Must(a.t, os.Link(a.outside+"/file", a.path(name)))
	},
	"a hard link to a secret": func(a *attack, name string) {
		testenv.Must(a.t, os.Link(a.outside+"/secret", a.path(name)))
	},
	"a hard link to a device": func(a *attack, name string) {
		testenv.Must(a.t, os.Link(a.outside+"/driver/nvidia0", a.path(name)))
	},
	"a directory": func(a *attack, name string) { testenv.Must(a.t, os.MkdirAll(a.path(name)+"/sub", 0o755)) },
	"a directory of 3,000 names": func(a *attack, name string) {
		testenv.Must(a.t, os.Mkdir(a.path(name), 0o755))
		for i := range 3000 {
			testenv.Must(a.t, os.WriteFile(a.path(name)+"/libcuda.so."+strconv.Itoa(i)+"\xff\n", nil, 0o644))
		}
	},
	"a directory without rights": func(a *attack, name string) { testenv.Must(a.t, os.Mkdir(a.path(name), 0)) },
	"an executable": func(a *attack, name string) {
		testenv.Must(a.t, os.WriteFile(a.path(name), []byte("#!/bin/sh\ntouch "+a.outside+"/executed\n"), 0o755))
		testenv.Must(a.t, os.Chmod(a.path(name), 0o6755))
	},
	"a cache": func(a *attack, name string) {
		testenv.Must(a.t, os.WriteFile(a.path(name), validCache(), 0o644))
	},
}

func (a *attack) link(target, name string) { testenv.Must(a.t, os.Symlink(target, a.path(name))) }

func (a *attack) chain(name string, n int) {
	for i := range n {
		a.link("link"+strconv.Itoa(i+1), name)
		name = filepath.Dir(name) + "/link" + strconv.Itoa(i+1)
	}
	a.link(a.outside, name)
}

// volume mounts a file or directory of the host at a path of the container.
func (a *attack) volume(from, name string) {
	from = filepath.Join(a.outside, from)
	info, err := os.Stat(from)
	testenv.Must(a.t, err)
	if info.IsDir() {
		testenv.Must(a.t, os.MkdirAll(a.path(name), 0o755))
	} else {
		testenv.Must(a.t, os.WriteFile(a.path(name), nil, 0o644))
	}
	a.volumes[name] = from
}

// linked mounts a directory of the host at /volume, and makes a link to a path in it.
func (a *attack) linked(from, below, name string) {
	a.volume(from, "/volume")
	a.link("/volume"+below, name)
}

// memory makes a volume in memory, as the kubelet does for Secrets.
func (a *attack) memory() {
	testenv.Must(a.t, os.Mkdir(a.outside+"/memory", 0o755))
	a.mount("tmpfs", a.outside+"/memory", "tmpfs", "mode=755")
	testenv.Must(a.t, os.WriteFile(a.outside+"/memory/secret", []byte(secret), 0o600))
}

// shared makes the directory of volumes a shared mount, from which mounts propagate to the host.
func (a *attack) shared() {
	a.mount("tmpfs", a.outside+"/volume", "tmpfs", "mode=755")
	testenv.Must(a.t, os.WriteFile(a.outside+"/volume/file", []byte("of the volume"), 0o644))
	testenv.Must(a.t, unix.Mount("", a.outside+"/volume", "", unix.MS_SHARED, ""))
}

func (a *attack) device(name string, major, minor uint32) {
	testenv.Must(a.t, os.MkdirAll(filepath.Dir(a.path(name)), 0o755))
	testenv.Must(a.t, unix.Mknod(a.path(name), unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor))))
}

func (a *attack) socket(name string) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	testenv.Must(a.t, err)
	defer func() { _ = unix.Close(fd) }()
	dir, err := os.Open(filepath.Dir(a.path(name)))
	testenv.Must(a.t, err)
	defer func() { _ = dir.Close() }()
	testenv.Must(
		a.t,
		unix.Bind(fd, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(name))}),
	)
}

// Everything that an image or a volume can have at a path that the hook uses. The hook does its work in the container
// or refuses it; the host stays as it is.
func TestSlowAttackByPaths(t *testing.T) {
	for position, tc := range map[string]struct {
		run   position
		users bool
		// short are the paths that are attacked when -attack is below a minute. createContainer makes nothing in /dev but
		// what is long's.
		short, long []string
	}{
		"createRuntime": {
			inCreateRuntime, false,
			[]string{"/dev", "/dev/dri", "/opt/driver/libcuda.so.580.1", "/usr/lib/x", "/etc/ld.so.cache"},
			attackedPaths,
		},
		"createRuntime with a user namespace": {inCreateRuntime, true, []string{"/dev/nvidia0"}, attackedPaths},
		"createContainer": {
			inCreateContainer, false, []string{"/etc"}, append([]string{"/dev/dri/by-path"}, attackedPaths[9:]...),
		},
	} {
		paths := tc.short
		if *attackTime >= time.Minute {
			paths = tc.long
		}
		for _, path := range paths {
			for what, put := range hostile {
				t.Run(position+", "+what+" at "+strings.ReplaceAll(path[1:], "/", "-"), func(t *testing.T) {
					t.Parallel()
					a := newAttack(t)
					a.users = tc.users
					a.device("/dev/dri/card0", 1, 5)
					if position != "createContainer" {
						testenv.Must(t, os.RemoveAll(a.path("/dev/dri")))
					}
					testenv.Must(t, os.MkdirAll(filepath.Dir(a.path(path)), 0o755))
					testenv.Must(t, os.RemoveAll(a.path(path)))
					put(a, path)
					a.own()
					a.start()
					a.check(tc.run, position != "createContainer")
				})
			}
		}
	}
}

// check runs the hook. In createRuntime it does all or nothing.
func (a *attack) check(run position, isAll bool) {
	a.t.Helper()
	before, table := a.host(), a.mountTable()
	status, stderr := run(a)
	a.checkNoSecret()
	a.checkProc()
	before.Check(a.t)
	switch {
	case status != 0 && stderr == "":
		a.t.Errorf("status %d without a message", status)
	case isAll && status == 0:
		a.checkGiven()
	case isAll && a.mountTable() != table:
		a.t.Errorf("%s, but the container has other mounts:\n%s", stderr, a.mountTable())
	}
}
