package trust

import "testing"

func TestWithoutRoot(t *testing.T) {
	for name, c := range map[string]struct {
		uidMap string
		want   bool
	}{
		"the host":                     {"         0          0 4294967295\n", false},
		"a rootless engine":            {"         0       1000          1\n         1     100000      65536\n", true},
		"with the host's root":         {"         0       1000          1\n         1          0          1\n", false},
		"not mapped yet":               {"", false},
		"something else than mappings": {"none\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := withoutRoot(c.uidMap); got != c.want {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}
