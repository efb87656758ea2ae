package plugin

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/config"
	"gpu-cdi-plugin/internal/exit"
)

func TestSocketPath(t *testing.T) {
	long := "a." + strings.Repeat("b", 60) + ".com/" + strings.Repeat("c", 63)
	cases := map[string]struct{ dir, name, want string }{
		"the name says the resource": {"/var/lib/kubelet/device-plugins", "nvidia.com/mig-1g.10gb", "gpu-cdi-nvidia-com-mig-1g-10gb.sock"},
		"a long name is a sum":       {"/var/lib/kubelet/device-plugins", long, "gpu-cdi-"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			path := socketPath(c.dir, c.name)
			if filepath.Dir(path) != c.dir || !strings.HasPrefix(filepath.Base(path), c.want) || len(path) > maxSocketPath {
				t.Errorf("%q, want %s", path, c.want)
			}
		})
	}
	if socketPath("/x", long) == socketPath("/x", long+"d") {
		t.Error("two long names have one socket")
	}
}

func TestTheDirectoryOfSocketsIsNotTooDeep(t *testing.T) {
	const most = 77
	deepest := "/" + strings.Repeat("d", most-1)
	for name, in := range map[string]func(dir string) Options{
		"the kubelet's": func(dir string) Options { return Options{Dir: dir, Allocate: by(config.CDICRI)} },
		"the registry":  func(dir string) Options { return Options{RegistryDir: dir, Allocate: by(config.CDICRI)} },
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(in(deepest))
			must(t, err)
			if path := socketPath(deepest, strings.Repeat("n", 63)+"/x"); len(path) > maxSocketPath {
				t.Errorf("%s has %d bytes", path, len(path))
			}
			_, err = New(in(deepest + "d"))
			if exit.CodeOf(err) != exit.Usage || exit.HintOf(err) == "" || !strings.Contains(err.Error(), "107") {
				t.Errorf("%v", err)
			}
		})
	}
}

// A server closes its socket after an error that does not pass; the file would stay and lead nowhere.
func TestASocketWaitsOutWhatPasses(t *testing.T) {
	for name, c := range map[string]struct {
		err    error
		passes bool
	}{
		"no memory":            {os.NewSyscallError("accept4", unix.ENOMEM), true},
		"the socket is closed": {&net.OpError{Op: "accept", Err: net.ErrClosed}, false},
	} {
		t.Run(name, func(t *testing.T) {
			err := notClosing(c.err)
			temporary, ok := err.(interface{ Temporary() bool })
			if passes := ok && temporary.Temporary(); passes != c.passes || !errors.Is(err, c.err) {
				t.Errorf("%v passes: %t", err, passes)
			}
		})
	}
}

func TestAKubeletThatIsNotThereIsSaidWithWhatToDo(t *testing.T) {
	w := newWatch(t.TempDir(), filepath.Join(t.TempDir(), kubeletSocketName), quiet)
	generation, err := w.kubeletSocket()
	if generation != 0 || exit.CodeOf(err) != exit.Unreachable || !strings.Contains(exit.HintOf(err), "start the kubelet") {
		t.Errorf("%d and %v with hint %q", generation, err, exit.HintOf(err))
	}
}

// Another program's socket at the path of ours is not ours, and stays when ours goes.
func TestASocketOfAnotherProgramIsNotTakenForOurs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	s, err := listen(t.Context(), path)
	must(t, err)
	defer s.Close()
	if !s.inPlace() {
		t.Error("our socket is not in its place")
	}
	must(t, os.Rename(path, path+".away"))
	if s.inPlace() {
		t.Error("a socket that was moved away is in its place")
	}
	other, err := new(net.ListenConfig).Listen(t.Context(), "unix", path)
	must(t, err)
	defer other.Close()
	if s.inPlace() {
		t.Error("another program's socket is taken for ours")
	}
	must(t, s.remove())
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("another program's socket was removed: %v", err)
	}
	must(t, os.Rename(path+".away", path))
	must(t, s.remove())
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("our socket stays: %v", err)
	}
}

// A kubelet that starts removes every socket, one that has just been made too.
func TestASocketThatIsRemovedAtOnceIsMadeAgain(t *testing.T) {
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
	defer removing.Wait()
	defer close(done)
	for range 300 {
		s, err := listen(t.Context(), path)
		must(t, err)
		_ = s.Close()
	}
}
