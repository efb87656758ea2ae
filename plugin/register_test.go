package plugin

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

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

func TestAKubeletThatIsAboutToListenIsWaitedFor(t *testing.T) {
	path, fd := bound(t)
	time.AfterFunc(listenTime/5, func() { _ = unix.Listen(fd, 1) })
	conn, err := reach(t.Context(), path)
	must(t, err)
	must(t, conn.Close())
}

func TestAKubeletThatDoesNotListenIsNotWaitedForLong(t *testing.T) {
	path, _ := bound(t)
	begin := time.Now()
	if conn, err := reach(t.Context(), path); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v, %v", conn, err)
	}
	if took := time.Since(begin); took < listenTime {
		t.Errorf("given up after %s", took)
	}
	if _, err := reach(t.Context(), path+"x"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a socket: %v", err)
	}
}
