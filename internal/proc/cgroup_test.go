package proc

import (
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

func TestParseCgroups(t *testing.T) {
	got, err := parseCgroups("7:cpu,devices:/a:b\n1:name=systemd:/c\n0::/../d (deleted)\n")
	want := Cgroups{
		{Controllers: []string{"cpu", "devices"}, Path: "/a:b"},
		{Controllers: []string{"name=systemd"}, Path: "/c"},
		{Controllers: []string{""}, Unified: true, Path: "/../d"},
	}
	if diff := gocmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v, (-want +got)\n%s", err, diff)
	}
	for _, bad := range []string{"devices /a\n", "0::\n", "0::a\n", "\n"} {
		if got, err := parseCgroups(bad); err == nil {
			t.Errorf("%q: %+v", bad, got)
		}
	}
}

func FuzzParseCgroups(f *testing.F) {
	id := strings.Repeat("0a", 32)
	for text, inContainer := range map[string]bool{
		"0::/\n":                  false,
		"0::/../" + id + "\n":     true,
		"5:devices:/docker/" + id: true,
		"0::/kubepods.slice/docker-" + id + ".scope/x (deleted)\n":          true,
		"0::/kubepods/pod1/" + id + "/docker/" + id:                         true,
		"0::/x-0-" + id + ".scope\n0::/-" + id:                              false,
		"0::/machine.slice/libpod-" + id + ".scope/x":                       true,
		"0::/machine.slice/libpod-conmon-" + id + ".scope":                  false,
		"0::/machine.slice/libpod-" + id + ".scope/libpod-conmon-x.scope":   true,
		"0::/system.slice/sshd.service\n":                                   false,
		"0::/" + id + "0\n0::/x" + id + "\n0::/" + strings.ToUpper("0a"+id): false,
	} {
		f.Add(text)
		if got, err := parseCgroups(text); err != nil || got.InContainer() != inContainer {
			f.Errorf("%q: in a container %t, error %v, want %t", text, got.InContainer(), err, inContainer)
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		groups, err := parseCgroups(text)
		if err != nil && groups != nil {
			t.Errorf("both %+v and %v", groups, err)
		}
		for _, one := range groups {
			if !strings.HasPrefix(one.Path, "/") {
				t.Errorf("path %q", one.Path)
			}
		}
		if groups.String() == "" {
			t.Error("no name")
		}
	})
}
