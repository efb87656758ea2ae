package engine

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// Cgroup is the version of control groups that an engine sees.
type Cgroup int

// The versions.
const (
	V1 Cgroup = 1
	V2 Cgroup = 2
)

// String returns the name of the version, like "cgroup v2".
func (c Cgroup) String() string { return map[Cgroup]string{V1: "cgroup v1", V2: "cgroup v2"}[c] }

// unified is the cgroup v2 tree beside version 1's controllers, in hybrid mode.
const unified = "/sys/fs/cgroup/unified"

// namespace is the script of the first process in a mount and a PID namespace of its own. When it ends, the kernel ends
// podman's remaining processes, so that none writes into a directory that a test removes. Its arguments are the CDI
// directory in place of the host's, or nothing, then a directory whose files are added to /etc, or nothing, then the
// arrangement of control groups, then the command.
//
// podman 4 reads CDI specs from /etc/cdi and /var/run/cdi, which no flag changes. With a private /run (the state of
// mount and of the runtimes) and /dev/shm (podman's locks) engines can run in parallel and leave nothing on the host.
// mount -n does not write to the host's /run/mount. crun 1.8 makes the root of a user namespace the owner of the
// container's standard input, which is /dev/null under podman: the host's must stay as it is.
const namespace = `
set -e
cdi=$1 etc=$2 cgroup=$3
shift 3
mount -n -t tmpfs tmpfs /run
mknod -m 666 /run/null c 1 3
mount --bind /run/null /dev/null
if [ -n "$cdi" ]; then
	mount -t tmpfs tmpfs /dev/shm
	mkdir /run/cdi
	mount --bind "$cdi" /run/cdi
	if [ -d /etc/cdi ]; then mount -t tmpfs tmpfs /etc/cdi; fi
fi
if [ -n "$etc" ]; then mount -t overlay -o "lowerdir=$etc:/etc" overlay /etc; fi
case $cgroup in
v1-of-hybrid) umount /sys/fs/cgroup/unified ;;
v2-of-hybrid) mount --rbind /sys/fs/cgroup/unified /sys/fs/cgroup ;;
esac
"$@"
`

// inNamespace returns the command that runs args with the CDI directory cdi in place of the host's, with the files of
// the directory etc in /etc, and with version c of control groups. cdi and etc may be empty.
func inNamespace(t testing.TB, cdi, etc string, c Cgroup, args ...string) []string {
	t.Helper()
	cgroup := arrangement(t, c)
	if cdi == "" && etc == "" && cgroup == "" {
		return args
	}
	unshare := testenv.Command(t, "unshare")
	return append([]string{
		unshare, "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc",
		"sh", "-c", namespace, "sh", cdi, etc, cgroup,
	}, args...)
}

// Namespace returns the command that runs args like inNamespace, with the directory of CDI specs `cdi`.
func Namespace(t testing.TB, cdi, etc string, c Cgroup, args ...string) []string {
	t.Helper()
	return inNamespace(t, cdi, etc, c, args...)
}

// PodmanFor makes a directory with a program podman for others to run: `program` with a store below that directory, a
// runtime, and settings, which are lines of the table "containers" in its configuration. It returns the environment for
// those others.
func PodmanFor(t testing.TB, program, runtime string, settings ...string) (env []string) {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "containers.conf")
	var line strings.Builder
	args := append([]string{program}, podmanOptions(dir)...)
	for _, arg := range append(args, "--runtime", testenv.Command(t, runtime)) {
		line.WriteString("'" + arg + "' ")
	}
	testenv.WriteProgram(t, filepath.Join(dir, "podman"), []byte("#!/bin/sh\nexec "+line.String()+"\"$@\"\n"))
	// podman 5 starts only with a netavark, and the containers have no network.
	testenv.WriteProgram(t, filepath.Join(dir, "netavark"), []byte("#!/bin/sh\nexit 1\n"))
	// A machine without CAP_SYS_RESOURCE cannot raise limits; podman's own defaults would.
	testenv.Must(t, os.WriteFile(config, []byte("[containers]\n"+
		"default_ulimits = [\"nofile=1024:1024\", \"nproc=1024:1024\"]\npids_limit = 0\n"+strings.Join(settings, "\n")+
		"\n[engine]\nhelper_binaries_dir = [\""+dir+"\"]\n"), 0o644))
	return append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "CONTAINERS_CONF="+config)
}

// arrangement returns the change of this machine's control groups that gives version c, or "".
func arrangement(t testing.TB, c Cgroup) string {
	t.Helper()
	has := hostCgroups(t)
	switch {
	case has[V1] && has[V2]:
		return map[Cgroup]string{V1: "v1-of-hybrid", V2: "v2-of-hybrid"}[c]
	case !has[c]:
		testenv.Skip(t, "needs "+c.String()+", which this machine lacks")
	}
	return ""
}

// hostCgroups returns the versions that this machine has.
func hostCgroups(t testing.TB) map[Cgroup]bool {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	testenv.Must(t, err)
	has := map[Cgroup]bool{}
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		switch {
		case f[2] == "cgroup2" && (f[1] == unified || f[1] == "/sys/fs/cgroup"):
			has[V2] = true
		case f[2] == "cgroup" && strings.Contains(f[3], "devices"):
			has[V1] = true
		}
	}
	return has
}

// MakeCgroups creates a cgroup in every cgroup hierarchy of the machine.
func MakeCgroups(path string) error {
	trees, err := cgroupTrees()
	for _, tree := range trees {
		// A hierarchy may be mounted under two names.
		if e := os.Mkdir(tree+path, 0o755); !errors.Is(e, os.ErrExist) {
			err = errors.Join(err, e)
		}
	}
	return err
}

// cgroupTrees returns the mount points of the cgroup hierarchies.
func cgroupTrees() ([]string, error) {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.procs"); err == nil {
		return []string{"/sys/fs/cgroup"}, nil
	}
	procs, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	for i := range procs {
		procs[i] = filepath.Dir(procs[i])
	}
	return procs, err
}

// RemoveCgroups removes a cgroup and its descendants from every cgroup hierarchy of the machine. It waits for the end
// of their processes: the kernel may take a moment to release killed ones.
func RemoveCgroups(path string) error {
	const limit = 20 * time.Second
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		if err := removeCgroups(path); !errors.Is(err, unix.EBUSY) || time.Since(begin) > limit {
			return err
		}
	}
}

func removeCgroups(path string) error {
	trees, err := cgroupTrees()
	errs := []error{err}
	for _, tree := range trees {
		if _, err := os.Stat(tree + path); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, removeCgroup(tree+path))
		}
	}
	return errors.Join(errs...)
}

// removeCgroup removes a cgroup and its descendants, the innermost first. The files of a cgroup cannot be removed.
func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	errs := []error{err}
	for _, e := range entries {
		if e.IsDir() {
			errs = append(errs, removeCgroup(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(append(errs, os.Remove(dir))...)
}
