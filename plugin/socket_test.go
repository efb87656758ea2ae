package plugin

import (
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/internal/exit"
)

func TestSocketPath(t *testing.T) {
	long := "a." + strings.Repeat("b", 60) + ".com/" + strings.Repeat("c", 63)
	cases := map[string]struct{ dir, name, want string }{
		"the name says the resource":   {"/var/lib/kubelet/device-plugins", "nvidia.com/mig-1g.10gb", "gpu-cdi-nvidia-com-mig-1g-10gb.sock"},
		"a long name is a sum":         {"/var/lib/kubelet/device-plugins", long, "gpu-cdi-"},
		"a directory that is too deep": {"/" + strings.Repeat("d", 100), "nvidia.com/gpu", ""},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			path, err := socketPath(c.dir, c.name)
			switch {
			case c.want == "":
				if exit.CodeOf(err) != exit.Usage || exit.HintOf(err) == "" || path != "" {
					t.Errorf("%q and %v", path, err)
				}
			case err != nil || filepath.Dir(path) != c.dir || !strings.HasPrefix(filepath.Base(path), c.want) || len(path) > maxSocketPath:
				t.Errorf("%q and %v, want %s", path, err, c.want)
			}
		})
	}
	a, err := socketPath("/x", long)
	must(t, err)
	if b, _ := socketPath("/x", long+"d"); a == b {
		t.Error("two long names have one socket")
	}
}
