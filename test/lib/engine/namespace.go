package engine

import (
	"os"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// Cgroup is the version of control groups that an engine is to see.
type Cgroup int

// The versions.
const (
	V1 Cgroup = 1
	V2 Cgroup = 2
)

// String names the version, as in "cgroup v2".
func (c Cgroup) String() string { return map[Cgroup]string{V1: "cgroup v1", V2: "cgroup v2"}[c] }

// unified is the cgroup v2 tree beside version 1's controllers, in hybrid mode.
const unified = "/sys/fs/cgroup/unified"

// namespace is run in a mount and a PID namespace of its own, as the first process. When it ends, the kernel ends all
// that podman and its monitor have left running, so that nothing writes into a directory that a test removes. Its
// arguments are the CDI directory that takes the place of the host's, or nothing, then what to do about control groups,
// then the command.
//
// podman 4 reads its CDI specs from /etc/cdi and /var/run/cdi and no flag changes that. With a private /run (where
// mount and the runtimes keep state) and /dev/shm (for podman's locks) any number of engines run beside each other and
// leave nothing on the host; -n keeps that first mount itself out of the host's /run/mount.
const namespace = `
set -e
cdi=$1 cgroup=$2
shift 2
mount -n -t tmpfs tmpfs /run
if [ -n "$cdi" ]; then
	mount -t tmpfs tmpfs /dev/shm
	mkdir /run/cdi
	mount --bind "$cdi" /run/cdi
	if [ -d /etc/cdi ]; then mount -t tmpfs tmpfs /etc/cdi; fi
fi
case $cgroup in
v1-of-hybrid) umount /sys/fs/cgroup/unified ;;
v2-of-hybrid) mount --rbind /sys/fs/cgroup/unified /sys/fs/cgroup ;;
esac
"$@"
`

// inNamespace returns the command that runs args with the CDI directory cdi in place of the host's (empty: the
// host's stay) and with version c of control groups.
func inNamespace(t testing.TB, cdi string, c Cgroup, args ...string) []string {
	t.Helper()
	cgroup := arrangement(t, c)
	if cdi == "" && cgroup == "" {
		return args
	}
	unshare := testenv.Command(t, "unshare")
	return append([]string{
		unshare, "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc",
		"sh", "-c", namespace, "sh", cdi, cgroup,
	}, args...)
}

// arrangement is what has to be done to this machine's control groups for version c, or empty for nothing.
func arrangement(t testing.TB, c Cgroup) string {
	t.Helper()
	has := hostCgroups(t)
	switch {
	case has[V1] && has[V2]:
		return map[Cgroup]string{V1: "v1-of-hybrid", V2: "v2-of-hybrid"}[c]
	case !has[c]:
		testenv.Skip(t, "needs "+c.String()+", which this machine has not")
	}
	return ""
}

// hostCgroups are the versions that this machine offers.
func hostCgroups(t testing.TB) map[Cgroup]bool {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
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
