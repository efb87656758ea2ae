package devcgroup

import (
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
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

func TestFindFailures(t *testing.T) {
	hierarchy(t, true)
	for name, c := range map[string]struct {
		list, cgroups, want string
	}{
		"cgroup v2 is not mounted":        {"0::/a\n", t.TempDir(), "not mounted"},
		"cgroup v1 is not mounted":        {"5:devices:/a\n", t.TempDir(), "not mounted"},
		"the root of what is not mounted": {"5:devices:/\n0::/\n", t.TempDir(), ""},
		"a cgroup that is gone":           {"0::/devcgroup-gone\n", host.Cgroups, "no such file"},
		"a scope that is gone":            {"0::/devcgroup-gone.scope/x\n", host.Cgroups, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			proc := t.TempDir()
			if err := os.Mkdir(filepath.Join(proc, "7"), 0o755); err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(proc, "7/cgroup"), c.list)
			cgroups, err := Find(Host{Proc: proc, Cgroups: c.cgroups}, 7)
			checkError(t, err, c.want)
			if err == nil {
				cgroups.Close()
			}
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
