package plugin

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// bound is a socket that has its file and refuses connections until it listens.
func bound(t *testing.T) (path string, fd int) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "kubelet.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	must(t, unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	return path, fd
}

// dialer connects to a socket, and calls refused after each try that was refused.
func dialer(path string, refused func()) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if errors.Is(err, syscall.ECONNREFUSED) {
			refused()
		}
		return conn, err
	}
}

func TestAKubeletThatIsAboutToListenIsWaitedFor(t *testing.T) {
	path, fd := bound(t)
	tries := 0
	conn, err := reach(t.Context(), dialer(path, func() {
		if tries++; tries == listenTries-1 {
			must(t, unix.Listen(fd, 1))
		}
	}))
	must(t, err)
	must(t, conn.Close())
}

func TestAKubeletThatDoesNotListenIsNotWaitedForLong(t *testing.T) {
	path, _ := bound(t)
	tries := 0
	if conn, err := reach(t.Context(), dialer(path, func() { tries++ })); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v, %v", conn, err)
	}
	if tries != listenTries {
		t.Errorf("%d tries, want %d", tries, listenTries)
	}
	if _, err := reach(t.Context(), dialer(path+"x", nil)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a socket: %v", err)
	}
}

func TestAnEndingPluginDoesNotWaitForTheKubelet(t *testing.T) {
	path, _ := bound(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("the plugin ends")
	tries := 0
	_, err := reach(ctx, dialer(path, func() { tries++; cancel(why) }))
	if !errors.Is(err, why) || tries != 1 {
		t.Errorf("%v after %d tries", err, tries)
	}
}
