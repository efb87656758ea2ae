package plugin

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

func notTaken(string) bool { return false }

func TestSocketPath(t *testing.T) {
	long := "a." + strings.Repeat("b", 60) + ".com/" + strings.Repeat("c", 63)
	cases := map[string]struct{ dir, name, want string }{
		"the resource is in the name": {
			"/var/lib/kubelet/device-plugins", "nvidia.com/mig-1g.10gb", "gpu-cdi-nvidia-com-mig-1g-10gb.sock",
		},
		"a long name is a hash": {"/var/lib/kubelet/device-plugins", long, "gpu-cdi-"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			path := socketPath(c.dir, c.name, notTaken)
			dir, name := filepath.Split(path)
			if dir != c.dir+"/" || !strings.HasPrefix(name, c.want) || len(path) > unixsocket.MaxPath {
				t.Errorf("%q, want %s", path, c.want)
			}
		})
	}
	if socketPath("/x", long, notTaken) == socketPath("/x", long+"d", notTaken) {
		t.Error("two long names have the same socket")
	}
}

func TestResourcesWhoseNamesDifferInADotHaveDifferentSockets(t *testing.T) {
	const dot, hyphen = "nvidia.com/a.b", "nvidia.com/a-b"
	p, err := New(Options{Dir: "/x", Allocate: by(resource.CDICRI), Log: quiet})
	testenv.Must(t, err)
	testenv.Must(t, p.Update([]resource.Resource{{Name: hyphen}, {Name: dot}}, nil))
	if path := p.endpoints[dot].planned; path == p.endpoints[hyphen].planned {
		t.Errorf("both have %s", path)
	}
}

func TestALongDirectoryPathIsRefused(t *testing.T) {
	const most = 77
	deepest := "/" + strings.Repeat("d", most-1)
	for name, in := range map[string]func(dir string) Options{
		"the kubelet's": func(dir string) Options { return Options{Dir: dir, Allocate: by(resource.CDICRI)} },
		"the registry":  func(dir string) Options { return Options{RegistryDir: dir, Allocate: by(resource.CDICRI)} },
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(in(deepest))
			testenv.Must(t, err)
			if path := socketPath(deepest, strings.Repeat("n", 63)+"/x", notTaken); len(path) > unixsocket.MaxPath {
				t.Errorf("%s has %d bytes", path, len(path))
			}
			_, err = New(in(deepest + "d"))
			if !errors.Is(err, ErrLongPath) || !strings.Contains(err.Error(), "107") {
				t.Errorf("%v, want %v", err, ErrLongPath)
			}
		})
	}
}
