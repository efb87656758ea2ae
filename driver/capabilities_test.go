package driver

import (
	"strings"
	"testing"
)

func TestCapabilitiesSet(t *testing.T) {
	for list, want := range map[string]Capabilities{
		"compute":           Compute,
		"compute,utility":   Compute | Utility,
		" video , display ": Video | Display,
		"all":               All,
		"ngx,all":           All,
		"compute,utility,graphics,video,display,ngx": All,
	} {
		var got, again Capabilities
		if err := got.Set(list); err != nil || got != want {
			t.Errorf("Set(%q) = %v, %v; want %v", list, got, err, want)
			continue
		}
		if err := again.Set(got.String()); err != nil || again != want {
			t.Errorf("%q, printed as %q, is read as %v, %v", list, got, again, err)
		}
	}
	for _, list := range []string{"", "compute,", "Compute", "compat32"} {
		c := Graphics
		err := c.Set(list)
		const known = "known are compute, utility, graphics, video, display, ngx, all"
		if err == nil || !strings.Contains(err.Error(), known) {
			t.Errorf("Set(%q): %v, want the known names", list, err)
		}
		if c != Graphics {
			t.Errorf("Set(%q) failed and changed the value to %v", list, c)
		}
	}
}
