package proc

import (
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

func TestIDMap(t *testing.T) {
	m, err := parseIDMap("         0     100000      1000\n      1000 5 1\n")
	if err != nil {
		t.Fatal(err)
	}
	got := map[uint32]int{}
	for _, id := range []uint32{0, 999, 1000, 1001, 4294967295} {
		if host, err := m.Host(id); err == nil {
			got[id] = host
		}
	}
	if diff := gocmp.Diff(map[uint32]int{0: 100000, 999: 100999, 1000: 5}, got); diff != "" {
		t.Error(diff)
	}
	for _, text := range []string{"0 1", "x", "\n", "0 -1 1"} {
		if m, err := parseIDMap(text); err == nil {
			t.Errorf("%q: %v", text, m)
		}
	}
}

func TestHasRoot(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want bool
	}{
		"the host":             {"         0          0 4294967295\n", true},
		"a rootless engine":    {"         0       1000          1\n         1     100000      65536\n", false},
		"with the host's root": {"         0       1000          1\n         1          0          1\n", true},
		"not mapped yet":       {"", false},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := parseIDMap(c.text)
			if err != nil {
				t.Fatal(err)
			}
			if got := m.HasRoot(); got != c.want {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

func FuzzParseIDMap(f *testing.F) {
	f.Add("0 100000 65536\n65536 0 1\n", uint32(7))
	f.Fuzz(func(t *testing.T, text string, id uint32) {
		m, err := parseIDMap(text)
		if err != nil && m != nil {
			t.Errorf("both %v and %v", m, err)
		}
		if got, err := m.Host(id); err == nil && len(m) == 0 {
			t.Errorf("%d is mapped to %d by nothing", id, got)
		}
	})
}
