package proc

import (
	"os"
	"strings"
	"testing"
)

func FuzzParseCgroups(f *testing.F) {
	id := strings.Repeat("0a", 32)
	for text, inContainer := range map[string]bool{
		"0::/\n":                  false,
		"0::/../" + id + "\n":     true,
		"5:devices:/docker/" + id: true,
		"0::/kubepods.slice/docker-" + id + ".scope/x (deleted)\n":          true,
		"0::/kubepods/pod1/" + id + "/docker/" + id:                         true,
		"0::/x-0-" + id + ".scope\n0::/-" + id:                              false,
		"0::/system.slice/sshd.service\n":                                   false,
		"0::/" + id + "0\n0::/x" + id + "\n0::/" + strings.ToUpper("0a"+id): false,
	} {
		f.Add(text)
		if got := parseCgroups(text).InContainer(); got != inContainer {
			f.Errorf("%q: in a container %t, want %t", text, got, inContainer)
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		groups := parseCgroups(text)
		for _, one := range groups {
			if !strings.HasPrefix(one.path, "/") {
				t.Errorf("path %q", one.path)
			}
		}
		if groups.String() == "" {
			t.Error("no name")
		}
	})
}

func FuzzParseStatus(f *testing.F) {
	own, err := os.ReadFile("/proc/self/status")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(own))
	s, err := parseStatus(string(own))
	if err != nil || len(s.UIDs) != 4 {
		f.Errorf("own status %+v, error %v", s, err)
	}
	f.Add("Name:\tX\nUid:\t0\nCapEff:\t0\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseStatus(text)
		if (err == nil) == (len(s.UIDs) == 0) {
			t.Errorf("status %+v, error %v", s, err)
		}
	})
}
