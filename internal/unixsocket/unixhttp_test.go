package unixsocket_test

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestPeersOfRootAndTheOwnUserAreOwn(t *testing.T) {
	other := uint32(os.Geteuid()) + 1
	for name, c := range map[string]struct {
		peer *unix.Ucred
		want bool
	}{
		"root":               {&unix.Ucred{Uid: 0}, true},
		"the program's user": {&unix.Ucred{Uid: uint32(os.Geteuid())}, true},
		"another user":       {&unix.Ucred{Uid: other}, false},
		"a peer not known":   {nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := unixsocket.IsOwn(c.peer); got != c.want {
				t.Errorf("own: %t", got)
			}
		})
	}
}

func options(dir string, group int) unixsocket.HTTPOptions {
	return unixsocket.HTTPOptions{
		Path: filepath.Join(dir, "api.sock"), LockPath: filepath.Join(dir, "lock"), Group: group, MaxConnections: 4,
	}
}

// Only the owner and the group may connect.
func TestTheSocketBelongsToItsGroup(t *testing.T) {
	for name, c := range map[string]struct {
		group int
		mode  fs.FileMode
	}{
		"a group":        {os.Getegid(), fs.ModeSocket | 0o660},
		"the owner only": {unixsocket.OwnerOnly, fs.ModeSocket | 0o600},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "made")
			o := options(dir, c.group)
			l, err := unixsocket.ListenHTTP(t.Context(), o)
			testenv.Must(t, err)
			if info, err := os.Lstat(o.Path); err != nil || info.Mode() != c.mode {
				t.Errorf("mode %v, want %v, error %v", info.Mode(), c.mode, err)
			}
			if _, err := unixsocket.ListenHTTP(t.Context(), o); !errors.Is(err, fileio.ErrHeld) {
				t.Errorf("a second one: %v", err)
			}
			if err := l.Close(); err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(o.Path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the socket after its end: %v", err)
			}
		})
	}
}

// A handler gets the credentials of its client from the kernel.
func TestPeer(t *testing.T) {
	o := options(t.TempDir(), unixsocket.OwnerOnly)
	l, err := unixsocket.ListenHTTP(t.Context(), o)
	testenv.Must(t, err)
	peers := make(chan *unix.Ucred, 1)
	handler := http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) { peers <- unixsocket.Peer(q.Context()) })
	ctx, end := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Serve(ctx, handler, slog.New(slog.DiscardHandler)) }()
	answer, err := unixsocket.NewHTTPClient(o.Path, time.Minute).Get("http://unix/")
	testenv.Must(t, err)
	_ = answer.Body.Close()
	peer := <-peers
	if peer == nil || int(peer.Uid) != os.Geteuid() || int(peer.Gid) != os.Getegid() || int(peer.Pid) != os.Getpid() {
		t.Errorf("peer %+v", peer)
	}
	end()
	if err := <-done; err != nil {
		t.Errorf("Serve: %v", err)
	}
}

// inherit makes a socket like systemd, and returns its file.
func inherit(t *testing.T, network, path string) *os.File {
	t.Helper()
	var l interface {
		io.Closer
		File() (*os.File, error)
	}
	var err error
	if network == "unix" {
		var stream *net.UnixListener
		stream, err = net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
		stream.SetUnlinkOnClose(false)
		l = stream
	} else {
		l, err = net.ListenUnixgram(network, &net.UnixAddr{Name: path, Net: network})
	}
	testenv.Must(t, err)
	f, err := l.File()
	testenv.Must(t, err, l.Close())
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestAnInheritedSocketIsUsedAndStays(t *testing.T) {
	o := options(t.TempDir(), os.Getegid())
	o.Inherited = inherit(t, "unix", o.Path)
	testenv.Must(t, os.Chmod(o.Path, 0o640))
	before, err := os.Lstat(o.Path)
	testenv.Must(t, err)
	for range 2 {
		l, err := unixsocket.ListenHTTP(t.Context(), o)
		testenv.Must(t, err)
		if _, err := unixsocket.ListenHTTP(t.Context(), o); !errors.Is(err, fileio.ErrHeld) {
			t.Errorf("a second one: %v", err)
		}
		c, err := net.Dial("unix", o.Path)
		testenv.Must(t, err)
		accepted, err := l.Socket().Accept()
		testenv.Must(t, err, accepted.Close(), c.Close(), l.Close())
		if after, err := os.Lstat(o.Path); err != nil || !os.SameFile(before, after) || after.Mode() != before.Mode() {
			t.Errorf("the socket was removed or changed: %v", err)
		}
		if _, err := os.Lstat(o.LockPath); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the lock after its end: %v", err)
		}
	}
}

func TestOtherInheritedSocketsAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		open func(t *testing.T, dir string) *os.File
		want string
	}{
		"at another path": {
			func(t *testing.T, dir string) *os.File { return inherit(t, "unix", dir+"/other.sock") },
			"the inherited socket listens at unix DIR/other.sock, want unix DIR/api.sock",
		},
		"of datagrams": {
			func(t *testing.T, dir string) *os.File { return inherit(t, "unixgram", dir+"/api.sock") },
			"the inherited socket listens at unixgram DIR/api.sock, want unix DIR/api.sock",
		},
		"a file": {
			func(t *testing.T, dir string) *os.File {
				f, err := os.OpenFile(dir+"/file", os.O_CREATE|os.O_RDWR, 0o600)
				testenv.Must(t, err)
				t.Cleanup(func() { _ = f.Close() })
				return f
			},
			"use the inherited socket: file file+net DIR/file: getsockopt: socket operation on non-socket",
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			o := options(dir, unixsocket.OwnerOnly)
			o.Inherited = c.open(t, dir)
			_, err := unixsocket.ListenHTTP(t.Context(), o)
			if err == nil || strings.ReplaceAll(err.Error(), dir, "DIR") != c.want {
				t.Errorf("error %v, want %s", err, c.want)
			}
			if held, err := fileio.IsHeld(o.LockPath); held || err != nil {
				t.Errorf("the lock is still held: %v %v", held, err)
			}
		})
	}
}
