package hoststate

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// recorder keeps what a test would fail with.
type recorder struct {
	testing.TB
	errors []string
}

func (r *recorder) Helper() {}

func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

func TestCheck(t *testing.T) {
	testenv.Root(t)
	t.Setenv("CI", "true") // /dev counts too
	for name, tc := range map[string]struct {
		attack func(dir string) error
		want   string
	}{
		"nothing":    {func(string) error { return nil }, ""},
		"a new file": {func(dir string) error { return os.WriteFile(dir+"/new", nil, 0o600) }, "a new file"},
		"the same content": {
			func(dir string) error { return os.WriteFile(dir+"/file", []byte("x"), 0o600) }, "times and inode numbers",
		},
		"a mode":   {func(dir string) error { return os.Chmod(dir+"/file", 0o644) }, "/file of the host is"},
		"an owner": {func(dir string) error { return os.Chown(dir+"/file", 1, 1) }, " 1:1 "},
		"a loss":   {func(dir string) error { return os.Remove(dir + "/file") }, "has lost its file"},
		"another size of a file system": {
			func(dir string) error { return unix.Mount("", dir, "", unix.MS_REMOUNT, "size=1m") }, "",
		},
		"a mount": {func(dir string) error { return unix.Mount("x", dir, "tmpfs", 0, "") }, "a new mount"},
		"a device": {func(string) error {
			return unix.Mount("tmpfs", "/dev", "tmpfs", 0, "")
		}, "has lost its device /dev/zero"},
		"a device rule": {func(string) error {
			return os.WriteFile("/sys/fs/cgroup/devices/hoststate-test/devices.deny", []byte("a"), 0o200)
		}, "cgroup /sys/fs/cgroup/devices/hoststate-test of the host is"},
	} {
		t.Run(name, func(t *testing.T) {
			testenv.MountNamespace(t)
			dir := t.TempDir()
			testenv.Must(t, unix.Mount("test", dir, "tmpfs", 0, "size=2m"))
			testenv.Must(t, os.WriteFile(dir+"/file", []byte("x"), 0o600))
			dirs := []string{dir}
			const cgroup = "/sys/fs/cgroup/devices/hoststate-test"
			if strings.Contains(tc.want, cgroup) {
				if err := os.Mkdir(cgroup, 0o755); err != nil {
					testenv.Skip(t, "needs cgroup v1: "+err.Error())
				}
				t.Cleanup(func() { _ = os.Remove(cgroup) })
				dirs = append(dirs, cgroup)
			}
			before := Take(t, dirs...)
			testenv.Must(t, tc.attack(dir))
			r := &recorder{TB: t}
			before.Check(r)
			if text := strings.Join(r.errors, "\n"); (text == "") != (tc.want == "") ||
				!strings.Contains(text, tc.want) {
				t.Errorf("got %q, want %q", text, tc.want)
			}
			for unix.Unmount(dir, unix.MNT_DETACH) == nil { // also what the attack mounted
			}
		})
	}
}
