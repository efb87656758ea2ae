// Package unixhttp serves HTTP to processes of this host at a unix socket: one instance has the socket, the kernel says
// who connected, and what clients may cost is bounded. It knows no request.
package unixhttp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/internal/unixsocket"
)

// RequestTime is how long a client may take to send its request, and to take what is written to it at once.
const RequestTime = 5 * time.Second

// drainTime is how long requests under way may take when Serve ends.
const drainTime = 2 * time.Second

// OwnerOnly is the group of a socket that only its owner can connect to.
const OwnerOnly = unixsocket.OwnerOnly

// Options are where a Listener is and what it allows.
type Options struct {
	// Path is the socket's. Only root and this process's user may be able to write to its directory, which is made if
	// it does not exist.
	Path string
	// LockPath is the file that is locked while the socket is served.
	LockPath string
	// Group is the GID of the processes that can connect besides those of the owner, or OwnerOnly.
	Group int
	// MaxConnections is how many connections are served at once. Others are closed.
	MaxConnections int64
}

// Listener is a socket that this process has.
type Listener struct {
	options Options
	socket  net.Listener
	held    *lock.Lock
	madeDir bool
}

// Listen makes the socket, and replaces one that is left of an earlier process. The error wraps lock.ErrHeld if another
// process serves it.
func Listen(ctx context.Context, o Options) (*Listener, error) {
	l := &Listener{options: o}
	dir := filepath.Dir(o.Path)
	_, err := os.Lstat(dir)
	l.madeDir = errors.Is(err, fs.ErrNotExist)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if l.held, err = lock.Acquire(o.LockPath); err != nil {
		l.giveUp()
		return nil, err
	}
	socket, err := unixsocket.Listen(ctx, o.Path, o.Group)
	if err != nil {
		l.giveUp()
		return nil, err
	}
	socket.SetUnlinkOnClose(false)
	l.socket = socket
	return l, nil
}

// Socket returns the socket itself, for a server of another protocol than HTTP in place of Serve. The server may close
// it; Close must be called then too.
func (l *Listener) Socket() net.Listener { return l.socket }

// Close removes the socket. It has no effect after Serve, which does that at its end.
func (l *Listener) Close() error {
	if l == nil || l.socket == nil {
		return nil
	}
	err := l.socket.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	err = errors.Join(err, os.Remove(l.options.Path)) // the lock is held: the socket is ours
	l.socket = nil
	l.giveUp()
	return err
}

func (l *Listener) giveUp() {
	if l.held != nil {
		_ = l.held.Release()
	}
	if l.madeDir {
		_ = os.Remove(filepath.Dir(l.options.Path)) // which fails if others have used it meanwhile
	}
}

// Serve serves until ctx ends, then waits a moment for requests under way, and removes the socket. The contexts of
// requests are made from ctx. It returns an error if it ended before ctx.
func (l *Listener) Serve(ctx context.Context, handler http.Handler, log *slog.Logger) error {
	defer func() { _ = l.Close() }()
	ctx, end := context.WithCancel(ctx)
	defer end()
	server := newServer(ctx, handler, l.options.MaxConnections, log)
	done := make(chan error, 1)
	go func() { done <- server.Serve(l.socket) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	if server.Shutdown(drain) != nil {
		_ = server.Close()
	}
	if err := <-done; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// newServer returns the server of one socket, with bounds for its connections.
func newServer(ctx context.Context, handler http.Handler, maxConnections int64, log *slog.Logger) *http.Server {
	var open atomic.Int64
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: RequestTime,
		ReadTimeout:       RequestTime,
		WriteTimeout:      RequestTime,
		IdleTimeout:       RequestTime,
		MaxHeaderBytes:    8 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, peerKey{}, peerOf(c))
		},
		ConnState: func(c net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				if open.Add(1) > maxConnections {
					_ = c.Close()
				}
			case http.StateClosed:
				open.Add(-1)
			default:
			}
		},
	}
	server.SetKeepAlivesEnabled(false)
	return server
}

// peerKey is the key of a connection's peer in its context.
type peerKey struct{}

// Peer is the process that has sent a request, by the request's context; nil if the kernel did not say.
func Peer(ctx context.Context) *unix.Ucred {
	peer, _ := ctx.Value(peerKey{}).(*unix.Ucred)
	return peer
}

// peerOf is the process that connected or, for a client, that listens; nil if it is not known.
func peerOf(c net.Conn) *unix.Ucred {
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return nil
	}
	var peer *unix.Ucred
	if raw.Control(func(fd uintptr) {
		peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}) != nil || err != nil {
		return nil
	}
	return peer
}

// IsOwn reports whether a peer is of root or of this process's user.
func IsOwn(peer *unix.Ucred) bool {
	return peer != nil && (peer.Uid == 0 || int(peer.Uid) == os.Geteuid())
}

// dial connects to a program of root or of this process's user.
func dial(ctx context.Context, path string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	if peer := peerOf(c); !IsOwn(peer) {
		_ = c.Close()
		return nil, fmt.Errorf("another user's program listens there: %+v", peer)
	}
	return c, nil
}

// ErrEnded is that the program ended, or has too many connections.
var ErrEnded = errors.New("the program closed the connection before it answered")

// IsEnd reports whether an error of a connection is that the program ended, or has too many connections.
func IsEnd(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) // it closed before the request was written
}

// NewClient returns a client of the program that serves a socket. The program may take aliveTime to begin with an
// answer.
func NewClient(path string, aliveTime time.Duration) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives:     true,
		ResponseHeaderTimeout: aliveTime,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, path)
		},
	}}
}
