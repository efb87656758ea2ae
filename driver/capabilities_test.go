package driver

import (
	"strings"
	"testing"
)

func TestParseCapabilities(t *testing.T) {
	for list, want := range map[string]Capabilities{
		"compute":           Compute,
		"compute,utility":   Compute | Utility,
		" video , display ": Video | Display,
		"all":               All,
		"ngx,all":           All,
		"compute,utility,graphics,video,display,ngx": All,
	} {
		got, err := ParseCapabilities(list)
		if err != nil || got != want {
			t.Errorf("ParseCapabilities(%q) = %v, %v; want %v", list, got, err, want)
			continue
		}
		if again, err := ParseCapabilities(got.String()); err != nil || again != want {
			t.Errorf("%q, printed %q, is read as %v, %v", list, got, again, err)
		}
	}
	for _, list := range []string{"", "compute,", "Compute", "compat32"} {
		c := Graphics
		err := c.Set(list)
		if err == nil || !strings.Contains(err.Error(), "known are compute, utility, graphics, video, display, ngx, all") {
			t.Errorf("Set(%q): %v, want the names that there are", list, err)
		}
		if c != Graphics {
			t.Errorf("Set(%q) failed and changed the value to %v", list, c)
		}
	}
}
