package soak

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

var swapping = flag.Duration("swap", 20*time.Second, "duration of TestInjectWhileTheBundleIsSwapped")

// user is a UID other than root's.
const user = 1000

// TestInjectWhileTheBundleIsSwapped injects as root into the bundle of a user, who keeps exchanging a directory on its
// path with a link to a directory of root's. Injections may fail, but nothing of root's changes, and no files are left
// behind.
func TestInjectWhileTheBundleIsSwapped(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	program := shared.Program(t, "gpu-cdi-plugin")
	for name, c := range map[string]struct {
		swapped string // the exchanged directory, in the user's directory
		bundle  string // in the user's directory: swapped, or below it
		config  bool   // the link leads to a bundle of root's
	}{
		"the bundle, with an empty directory":       {"bundle", "bundle", false},
		"the bundle, with a bundle of root's":       {"bundle", "bundle", true},
		"its directory, with that of root's bundle": {"work", "work/bundle", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSwap(t, c.swapped, c.bundle, c.config)
			before := image.Fingerprint(t, s.roots)
			done := make(chan struct{})
			go func() {
				defer close(done)
				s.exchange(t.Context(), *swapping)
			}()
			injections, changed := 0, 0
			for running := true; running; injections++ {
				select {
				case <-done:
					running = false
				default:
				}
				s.reset(t)
				res, err := proc.Run(t.Context(), proc.Cmd{Args: []string{
					program, "--root", s.roots, "--cdi-dir", s.specs,
					"cdi", "inject", "--bundle", filepath.Join(s.users, c.bundle), "0",
				}})
				testenv.Must(t, err)
				if res.Code == 0 {
					changed++
				}
			}
			t.Logf("%d injections, %d into the user's bundle", injections, changed)
			if changed == 0 {
				t.Error("no injection succeeded, so the test shows nothing")
			}
			if image.Fingerprint(t, s.roots) != before {
				t.Errorf("root's directory changed; it has %v", image.Digest(t, s.roots))
			}
			if got := entries(t, fmt.Sprintf("/proc/self/fd/%d", s.handle.Fd())); len(got) != 1 {
				t.Errorf("the bundle has %v, want config.json alone", got)
			}
		})
	}
}

// swap is a user's directory with a bundle and a link, which are exchanged, and root's directory that the link leads
// to.
type swap struct {
	users, roots, specs string
	swapped             string
	handle              *os.File // of the bundle
}

const bundleConfig = `{"ociVersion": "1.0.2", "process": {"args": ["sh"], "cwd": "/"}, ` +
	`"root": {"path": "rootfs"}, "linux": {}}`

func newSwap(t *testing.T, swapped, bundle string, config bool) *swap {
	t.Helper()
	top := t.TempDir()
	s := &swap{users: top + "/users", roots: top + "/roots", specs: top + "/cdi", swapped: swapped}
	must := func(err error) {
		t.Helper()
		testenv.Must(t, err)
	}
	below, err := filepath.Rel(swapped, bundle)
	must(err)
	for _, dir := range []string{filepath.Join(s.users, bundle), filepath.Join(s.roots, below), s.specs} {
		must(os.MkdirAll(dir, 0o700))
	}
	if config {
		must(os.WriteFile(filepath.Join(s.roots, below, "config.json"), []byte(bundleConfig), 0o600))
	}
	must(os.WriteFile(s.specs+"/gpu.json", []byte(`{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
		{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/dev/null"}]}}]}`), 0o644))
	must(os.Symlink(s.roots, s.users+"/trap"))
	for dir := bundle; ; dir = filepath.Dir(dir) {
		must(os.Chown(filepath.Join(s.users, dir), user, user))
		if dir == "." {
			break
		}
	}
	s.handle, err = os.Open(filepath.Join(s.users, bundle))
	must(err)
	t.Cleanup(func() { _ = s.handle.Close() })
	return s
}

// reset removes the devices from the bundle.
func (s *swap) reset(t *testing.T) {
	t.Helper()
	path := fmt.Sprintf("/proc/self/fd/%d/config.json", s.handle.Fd())
	testenv.Must(t, os.WriteFile(path, []byte(bundleConfig), 0o600))
	testenv.Must(t, os.Chown(path, user, user))
}

// exchange exchanges the directory and the link repeatedly.
func (s *swap) exchange(ctx context.Context, duration time.Duration) {
	for end := time.Now().Add(duration); time.Now().Before(end); {
		_ = unix.Renameat2(unix.AT_FDCWD, filepath.Join(s.users, s.swapped), unix.AT_FDCWD, s.users+"/trap",
			unix.RENAME_EXCHANGE)
		select {
		case <-ctx.Done():
			return
		case <-time.After(20 * time.Microsecond):
		}
	}
}

func entries(t *testing.T, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	testenv.Must(t, err)
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}
