package endpoint_test

import (
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// directory returns an empty directory for sockets.
func directory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "manager") //nolint:usetesting // t.TempDir may be too long for the path of a socket
	testenv.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// listen makes a socket; if it is stale, no program listens on it.
func listen(t *testing.T, path string, stale bool) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	testenv.Must(t, err)
	if stale {
		l.SetUnlinkOnClose(false)
		_ = l.Close()
		return
	}
	t.Cleanup(func() { _ = l.Close() })
}

func TestStartRemovesSocketsOnly(t *testing.T) {
	dir := directory(t)
	for _, name := range []string{endpoint.SocketName, "stale.sock"} {
		listen(t, filepath.Join(dir, name), true)
	}
	listen(t, filepath.Join(dir, "live.sock"), false)
	for _, name := range []string{"kubelet_internal_checkpoint", "DEPRECATION"} {
		testenv.Must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	testenv.Must(t, os.MkdirAll(filepath.Join(dir, "sub.sock"), 0o700))
	b := start(t, endpoint.Options{SocketDir: dir})
	want := []string{"DEPRECATION", endpoint.SocketName, "kubelet_internal_checkpoint", "sub.sock"}
	if d := cmp.Diff(want, names(t, dir)); d != "" {
		t.Error(d)
	}
	b.connect("a.sock", 1)
}

// names are the names in a directory that do not begin with a dot.
func names(t *testing.T, dir string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "[^.]*"))
	testenv.Must(t, err)
	for i := range found {
		found[i] = filepath.Base(found[i])
	}
	return found
}

func TestStartMakesItsDirectoryAndSocket(t *testing.T) {
	dir := filepath.Join(directory(t), "a", "b")
	b := start(t, endpoint.Options{SocketDir: dir})
	info, err := os.Stat(b.socket())
	if err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("the socket: %v, %v", info, err)
	}
	info, err = os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o750 {
		t.Errorf("the directory: %v, %v", info, err)
	}
	testenv.Must(t, b.Close())
	if entries, _ := os.ReadDir(dir); len(entries) != 1 || entries[0].Name() != endpoint.LockName {
		t.Errorf("left after Close: %v", entries)
	}
}

func TestOneManagerServesADirectory(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 2)
	_, err := endpoint.Start(endpoint.Options{SocketDir: b.dir, Log: slog.New(slog.DiscardHandler)})
	if !errors.Is(err, endpoint.ErrInUse) {
		t.Errorf("a second manager: %v", err)
	}
	b.register(p) // at the first one
}

func TestOneManagerWatchesADirectory(t *testing.T) {
	b := watch(t)
	sockets := directory(t)
	stale := filepath.Join(sockets, "stale.sock")
	listen(t, stale, true)
	testenv.Must(t, os.WriteFile(filepath.Join(sockets, endpoint.LockName), nil, 0o600))
	o := endpoint.Options{SocketDir: sockets, RegistryDir: b.registry}
	if _, err := endpoint.Start(o); !errors.Is(err, endpoint.ErrRegistryInUse) || errors.Is(err, endpoint.ErrInUse) {
		t.Errorf("a second manager: %v", err)
	}
	if _, err := os.Lstat(stale); err != nil {
		t.Errorf("the second manager has removed sockets: %v", err)
	}
	testenv.Must(t, b.Close())
	start(t, o)
	if _, err := os.Lstat(stale); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the stale socket: %v", err)
	}
}

func TestAKubeletThatRunsIsNotReplaced(t *testing.T) {
	dir := directory(t)
	listen(t, filepath.Join(dir, endpoint.SocketName), false)
	listen(t, filepath.Join(dir, "plugin.sock"), true)
	_, err := endpoint.Start(endpoint.Options{SocketDir: dir})
	if !errors.Is(err, endpoint.ErrInUse) {
		t.Fatalf("beside a kubelet: %v", err)
	}
	if d := cmp.Diff([]string{endpoint.SocketName, "plugin.sock"}, names(t, dir)); d != "" {
		t.Error(d)
	}
}

func TestDirectoriesThatCannotBeServed(t *testing.T) {
	writable := directory(t)
	testenv.Must(t, os.Chmod(writable, 0o777))
	occupied := directory(t)
	testenv.Must(t, os.WriteFile(filepath.Join(occupied, endpoint.SocketName), nil, 0o600))
	same, link := directory(t), filepath.Join(directory(t), "link")
	testenv.Must(t, os.Symlink(same, link))
	tests := map[string]struct {
		o    endpoint.Options
		want string
		is   error
	}{
		"a relative path": {o: endpoint.Options{SocketDir: "x"}, want: "bad socketPath, must be an absolute path: x"},
		"no path":         {want: "bad socketPath, must be an absolute path: "},
		"a file in place of the socket": {
			o:    endpoint.Options{SocketDir: occupied},
			want: "serve the directory " + occupied + ": " + occupied + "/kubelet.sock is not a socket: remove it",
		},
		"a directory that others can write to": {o: endpoint.Options{SocketDir: writable}, is: trust.ErrUnsafe},
		"a directory of the plugin watcher that others can write to": {
			o: endpoint.Options{SocketDir: directory(t), RegistryDir: writable}, is: trust.ErrUnsafe,
		},
		"a relative path of the plugin watcher": {
			o: endpoint.Options{SocketDir: directory(t), RegistryDir: "x"}, want: "watch for plugins: x is not an absolute path",
		},
		"the directory of the sockets for the plugin watcher": {
			o: endpoint.Options{SocketDir: same, RegistryDir: same}, is: endpoint.ErrSameDirectory,
		},
		"the same by a link": {
			o: endpoint.Options{SocketDir: same, RegistryDir: link}, is: endpoint.ErrSameDirectory,
		},
		"a directory of sockets below that of the plugin watcher": {
			o:  endpoint.Options{SocketDir: filepath.Join(same, "below"), RegistryDir: same},
			is: endpoint.ErrSameDirectory,
		},
		"a file in place of the directory": {
			o: endpoint.Options{SocketDir: filepath.Join(occupied, endpoint.SocketName)}, is: unix.ENOTDIR,
		},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			r, err := endpoint.Start(test.o)
			if err == nil {
				t.Fatal(errors.Join(errors.New("it was served"), r.Close()))
			}
			if test.want != "" && err.Error() != test.want || test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("Start: %v", err)
			}
			if filepath.IsAbs(test.o.SocketDir) {
				held, err := fileio.IsHeld(filepath.Join(test.o.SocketDir, endpoint.LockName))
				if held || err != nil && !errors.Is(err, unix.ENOTDIR) {
					t.Errorf("the lock is held: %t, %v", held, err)
				}
				_, err = os.Stat(filepath.Join(test.o.SocketDir, endpoint.LockName))
				if errors.Is(test.is, endpoint.ErrSameDirectory) && err == nil {
					t.Error("the lock was made, as if a manager had served the directory")
				}
			}
		})
	}
}

func TestADirectoryWithAnotherUseIsRefused(t *testing.T) {
	tests := map[string]struct {
		file    string // beside a socket
		refused bool
	}{
		"nothing":                        {"", true},
		"another file":                   {"docker.pid", true},
		"the lock of an earlier manager": {endpoint.LockName, false},
		"the checkpoint of a kubelet":    {"kubelet_internal_checkpoint", false},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			dir := directory(t)
			listen(t, filepath.Join(dir, "docker.sock"), true)
			if test.file != "" {
				testenv.Must(t, os.WriteFile(filepath.Join(dir, test.file), nil, 0o600))
			}
			r, err := endpoint.Start(endpoint.Options{SocketDir: dir})
			if err == nil {
				err = r.Close()
			}
			if errors.Is(err, endpoint.ErrForeignDirectory) != test.refused || err != nil && !test.refused {
				t.Errorf("Start: %v", err)
			}
			if left := slices.Contains(names(t, dir), "docker.sock"); left != test.refused {
				t.Errorf("the socket is left: %t", left)
			}
			if _, err := os.Stat(filepath.Join(dir, endpoint.LockName)); test.refused && err == nil {
				t.Error("the lock was made")
			}
		})
	}
}

// Sockets of plugins stay when a manager ends.
func TestADirectoryIsServedAgain(t *testing.T) {
	b := start(t, endpoint.Options{})
	b.connect("a.sock", 2)
	testenv.Must(t, b.Close())
	start(t, endpoint.Options{SocketDir: b.dir})
	if d := cmp.Diff([]string{endpoint.SocketName}, names(t, b.dir)); d != "" {
		t.Error(d)
	}
}

func TestPluginsRegisterAgainAfterARestart(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 2)
	testenv.Must(t, b.Close())
	reports := len(b.reports(gpu))
	b.waitCalls(p, func(c plugintest.Calls) bool { return c.Ended == 1 })
	if n := len(b.reports(gpu)); n != reports {
		t.Error("Close reported a change")
	}
	if err := b.Close(); err != nil {
		t.Errorf("Close twice: %v", err)
	}
	p.Stop()
	start(t, endpoint.Options{SocketDir: b.dir}).connect("a.sock", 2)
}

func TestCheck(t *testing.T) {
	b := start(t, endpoint.Options{})
	if err := b.Check(); err != nil {
		t.Error(err)
	}
	testenv.Must(t, b.Close())
	if err := b.Check(); err != nil {
		t.Errorf("after Close: %v", err)
	}
}
