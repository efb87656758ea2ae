package unixsocket

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// listenFull makes a socket whose queue is full, and returns a function that accepts the connection in it.
func listenFull(t *testing.T, path string) (accept func()) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testenv.Must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	testenv.Must(t, unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 0))
	c, err := net.Dial("unix", path)
	testenv.Must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	if _, err := net.Dial("unix", path); !errors.Is(err, unix.EAGAIN) {
		t.Fatalf("the queue is not full: %v", err)
	}
	return func() {
		accepted, _, err := unix.Accept(fd)
		testenv.Must(t, err, unix.Close(accepted))
	}
}

// A client waits while the queue of a socket is full, but neither for ever nor longer than its context.
func TestAFullQueue(t *testing.T) {
	for name, c := range map[string]struct {
		accepted, canceled bool
		want               error
	}{
		"until a connection is accepted": {accepted: true},
		"which goes on":                  {want: unix.EAGAIN},
		"until its context ends":         {canceled: true, want: context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				path := filepath.Join(dir, "s")
				accept := listenFull(t, path)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				failed := make(chan error, 1)
				go func() {
					conn, err := Dial(ctx, path)
					if err == nil {
						err = conn.Close()
					}
					failed <- err
				}()
				synctest.Wait()
				if c.accepted {
					accept()
				}
				if c.canceled {
					cancel()
				}
				if err := <-failed; !errors.Is(err, c.want) {
					t.Errorf("error %v, want %v", err, c.want)
				}
			})
		})
	}
}

// A client with several sockets uses the first that this process can use.
func TestTheFirstSocketThatCanBeUsed(t *testing.T) {
	serve := func(t *testing.T, path, answer string) {
		t.Helper()
		l, err := ListenHTTP(t.Context(), HTTPOptions{
			Path: path, LockPath: path + ".lock", Group: OwnerOnly, MaxConnections: 4,
		})
		testenv.Must(t, err)
		done := make(chan error, 1)
		ctx, end := context.WithCancel(t.Context())
		handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, answer) })
		go func() { done <- l.Serve(ctx, handler, slog.New(slog.DiscardHandler)) }()
		t.Cleanup(func() {
			end()
			testenv.Must(t, <-done)
		})
	}
	for name, c := range map[string]struct {
		first func(t *testing.T, path string)
		want  string
	}{
		"both":                  {func(t *testing.T, path string) { serve(t, path, "first") }, "first"},
		"the first is missing":  {func(*testing.T, string) {}, "second"},
		"nobody listens at one": {func(t *testing.T, path string) { abandon(t, path) }, "second"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			first, second := filepath.Join(dir, "first"), filepath.Join(dir, "second")
			c.first(t, first)
			serve(t, second, "second")
			answer, err := NewHTTPClient(first, time.Minute, second).Get("http://unix/")
			testenv.Must(t, err)
			defer answer.Body.Close()
			if got, err := io.ReadAll(answer.Body); string(got) != c.want || err != nil {
				t.Errorf("the answer is from %q, want %q, error %v", got, c.want, err)
			}
		})
	}
}

// abandon leaves a socket at which nobody listens any more.
func abandon(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	testenv.Must(t, err)
	l.SetUnlinkOnClose(false)
	testenv.Must(t, l.Close())
}
