package devcgroup

import (
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestParseCgroups(t *testing.T) {
	for name, c := range map[string]struct {
		list  string
		want  cgroupPaths
		error string
	}{
		"cgroup v2":   {"0::/system.slice/runc-1.scope\n", cgroupPaths{unified: "/system.slice/runc-1.scope"}, ""},
		"cgroup v1":   {"5:devices:/a\n4:memory:/b\n", cgroupPaths{devices: "/a"}, ""},
		"a hybrid":    {"7:cpu,devices:/a:b\n1:name=systemd:/c\n0::/\n", cgroupPaths{devices: "/a:b", unified: "/"}, ""},
		"neither":     {"4:memory:/b\n1:name=devices:/b\n", cgroupPaths{}, ""},
		"outside":     {"0::/../x\n", cgroupPaths{}, "namespace"},
		"far outside": {"5:devices:/../../..\n", cgroupPaths{}, "namespace"},
		"inside out":  {"0::/a/../../b\n", cgroupPaths{}, "namespace"},
		"no path":     {"0::\n", cgroupPaths{}, "namespace"},
		"twice":       {"0::/a\n0::/b\n", cgroupPaths{}, "twice"},
		"no list":     {"devices /a\n", cgroupPaths{}, "unexpected line"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseCgroups(c.list)
			checkError(t, err, c.error)
			if got != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}

func checkError(t *testing.T, err error, want string) {
	t.Helper()
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("error %v, want %q", err, want)
	}
}

const mountTable = `31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/devices rw,relatime shared:9 - cgroup cgroup rw,cpu,devices
41 31 0:38 /pod\0401 /a\134b rw master:1 propagate_from:2 - cgroup2  rw
`

func TestParseMounts(t *testing.T) {
	got, err := parseMounts(mountTable)
	if err != nil {
		t.Fatal(err)
	}
	want := []mount{
		{device: unix.Mkdev(0, 33), root: "/", point: "/sys/fs/cgroup/devices"},
		{device: unix.Mkdev(0, 38), root: "/pod 1", point: `/a\b`, unified: true},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(mount{})); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for _, line := range []string{"36 31 0:33 / /sys rw", "36 31 x / /sys rw - cgroup2 cgroup2 rw\n"} {
		if got, err := parseMounts(line); err == nil {
			t.Errorf("%q: got %v", line, got)
		}
	}
}

func TestRelative(t *testing.T) {
	for _, c := range []struct {
		root, name, want string
		ok               bool
	}{
		{"/", "/", ".", true},
		{"/", "/a/b", "a/b", true},
		{"/a", "/a/b", "b", true},
		{"/a", "/a", ".", true},
		{"/a", "/ab", "", false},
		{"/a/b", "/a", "", false},
	} {
		if got, ok := relative(c.root, c.name); ok != c.ok || ok && got != c.want {
			t.Errorf("relative(%q, %q) = %q, %v", c.root, c.name, got, ok)
		}
	}
}

// TestOpenElsewhere guards against a directory that is not of the hierarchy: the cgroup's path leads to it, but another
// file system is mounted there.
func TestOpenElsewhere(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "a"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	mounted := hierarchy(t, true)
	for name, c := range map[string]struct {
		mount mount
		path  string
		want  string
	}{
		"another file system": {
			mount{device: st.Dev, root: "/", point: dir, unified: true}, "/a", "not in the cgroup",
		},
		"another device":             {mount{device: 1, root: "/", point: mounted, unified: true}, "/", "not in the cgroup"},
		"a link":                     {mount{device: st.Dev, root: "/", point: dir, unified: true}, "/link", "escapes"},
		"another version":            {mount{root: "/", point: mounted}, "/", "not mounted"},
		"another part":               {mount{root: "/b", point: mounted, unified: true}, "/a", "not mounted"},
		"a cgroup that is gone":      {mount{root: "/", point: mounted, unified: true}, "/devcgroup-gone", "no such file"},
		"a mount point that is gone": {mount{root: "/", point: dir + "/gone", unified: true}, "/", "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			cg := &cgroup{path: c.path, unified: true}
			checkError(t, cg.open([]mount{c.mount}), c.want)
		})
	}
}

func FuzzParseCgroups(f *testing.F) {
	f.Add("7:cpu,devices:/a:b\n1:name=systemd:/c\n0::/\n")
	f.Add("0::/../x\n")
	f.Fuzz(func(t *testing.T, list string) {
		got, err := parseCgroups(list)
		if err != nil && got != (cgroupPaths{}) {
			t.Errorf("both %+v and %v", got, err)
		}
		for _, name := range []string{got.devices, got.unified} {
			if name != "" && (name[0] != '/' || name != path.Clean(name)) {
				t.Errorf("path %q", name)
			}
		}
	})
}

func FuzzParseMounts(f *testing.F) {
	f.Add(mountTable)
	f.Add("36 31 0:33 / /sys rw - cgroup2")
	f.Fuzz(func(t *testing.T, table string) {
		got, err := parseMounts(table)
		if err != nil && got != nil {
			t.Errorf("both %+v and %v", got, err)
		}
		if len(got) > strings.Count(table, "cgroup") {
			t.Errorf("%d mounts", len(got))
		}
	})
}
