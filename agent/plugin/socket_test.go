package plugin

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/internal/wake"
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

func TestASocketThatIsMadeAnewHasAnotherID(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	seen := map[unixsocket.ID]bool{}
	for range 10 {
		s, err := listen(t.Context(), path, &connections{wake: wake.New()})
		testenv.Must(t, err)
		testenv.Must(t, os.Chmod(path, 0o666)) // which changes nothing
		if !s.inPlace() || seen[s.id] {
			t.Errorf("the socket %+v is in its place: %t, and was there before: %t", s.id, s.inPlace(), seen[s.id])
		}
		seen[s.id] = true
		testenv.Must(t, s.Close())
		time.Sleep(20 * time.Millisecond) // the clock of older kernels' file systems has steps of up to 10 ms
	}
}

func TestASocketOfAnotherProgramIsNotTakenForOurs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	s, err := listen(t.Context(), path, &connections{wake: wake.New()})
	testenv.Must(t, err)
	defer s.Close()
	if !s.inPlace() {
		t.Error("our socket is not in its place")
	}
	testenv.Must(t, os.Rename(path, path+".away"))
	if s.inPlace() {
		t.Error("a socket that was moved away is in its place")
	}
	other, err := new(net.ListenConfig).Listen(t.Context(), "unix", path)
	testenv.Must(t, err)
	defer other.Close()
	if s.inPlace() {
		t.Error("another program's socket is in the place of ours, and is taken for it")
	}
	testenv.Must(t, os.Rename(path+".away", path))
	if !s.inPlace() {
		t.Error("our socket is back and not in its place")
	}
}

// A kubelet that starts may remove a socket that has just been made. The endpoint finds that out later.
func TestASocketThatIsRemovedAtOnceIsNotInPlace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	var removing sync.WaitGroup
	done := make(chan struct{})
	removing.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				_ = os.Remove(path)
			}
		}
	})
	for range 300 {
		s, err := listen(t.Context(), path, &connections{wake: wake.New()})
		testenv.Must(t, err)
		eventually(t, "the socket is removed", func() bool { return !s.inPlace() })
		_ = s.Close()
	}
	close(done)
	removing.Wait()
}
