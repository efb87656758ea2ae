package devcgroup

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/internal/proc"
)

func TestRestricting(t *testing.T) {
	v1 := func(path string, controllers ...string) proc.Cgroup {
		return proc.Cgroup{Controllers: controllers, Path: path}
	}
	v2 := func(path string) proc.Cgroup { return proc.Cgroup{Unified: true, Path: path} }
	for name, c := range map[string]struct {
		list  proc.Cgroups
		want  cgroupPaths
		error string
	}{
		"cgroup v2":   {proc.Cgroups{v2("/system.slice/x.scope")}, cgroupPaths{unified: "/system.slice/x.scope"}, ""},
		"cgroup v1":   {proc.Cgroups{v1("/a", "devices"), v1("/b", "memory")}, cgroupPaths{devices: "/a"}, ""},
		"a hybrid":    {proc.Cgroups{v1("/a", "cpu", "devices"), v2("/")}, cgroupPaths{devices: "/a", unified: "/"}, ""},
		"neither":     {proc.Cgroups{v1("/b", "memory"), v1("/b", "name=devices")}, cgroupPaths{}, ""},
		"outside":     {proc.Cgroups{v2("/../x")}, cgroupPaths{}, "namespace"},
		"far outside": {proc.Cgroups{v1("/../../..", "devices")}, cgroupPaths{}, "namespace"},
		"inside out":  {proc.Cgroups{v2("/a/../../b")}, cgroupPaths{}, "namespace"},
		"twice":       {proc.Cgroups{v2("/a"), v2("/b")}, cgroupPaths{}, "two cgroups"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := restricting(c.list)
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
			procfs := t.TempDir()
			if err := os.Mkdir(filepath.Join(procfs, "7"), 0o755); err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(procfs, "7/cgroup"), c.list)
			p, err := proc.Open(procfs, 7)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			cgroups, err := Find(Host{Proc: procfs, Cgroups: c.cgroups}, p)
			checkError(t, err, c.want)
			if err == nil {
				cgroups.Close()
			}
		})
	}
}
