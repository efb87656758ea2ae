package unixsocket

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
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fair"
	"gpu-cdi-plugin/internal/fileio"
)

// RequestTime is how long a client may take to send its request, and to receive each write of the response.
const RequestTime = 5 * time.Second

// drainTime is how long running requests may take when Serve ends.
const drainTime = 2 * time.Second

// HTTPOptions are the options of an HTTPListener.
type HTTPOptions struct {
	// Path is the path of the socket. Its directory is created if it is missing. Only root and this process's user may
	// be able to write to that directory.
	Path string
	// LockPath is the file that is locked while the socket is served.
	LockPath string
	// Group is the GID of a group whose processes can connect, like the owner's, or OwnerOnly.
	Group int
	// Inherited is a socket that another process, such as systemd, made at Path; nil means none. Its owner and mode, and
	// the file at Path, are left as they are. The caller closes it.
	Inherited *os.File
	// MaxConnections is the largest number of connections at a time of root, of this process's user, and of all other
	// users together. Each of those can have a quarter of it, and the subordinate UIDs of a user are another user.
	// Connections above these limits are closed: if all others together have too many, one of the user who has most.
	MaxConnections int
}

// HTTPListener is a socket with its lock.
type HTTPListener struct {
	options HTTPOptions
	socket  net.Listener
	held    *fileio.Lock
	madeDir bool
}

// ListenHTTP creates the socket, and replaces a socket that an earlier process left, or takes the inherited one. If
// another process serves the socket, the error wraps fileio.ErrHeld.
func ListenHTTP(ctx context.Context, o HTTPOptions) (*HTTPListener, error) {
	l := &HTTPListener{options: o}
	dir := filepath.Dir(o.Path)
	_, err := os.Lstat(dir)
	l.madeDir = errors.Is(err, fs.ErrNotExist)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if l.held, err = fileio.AcquireLock(o.LockPath); err != nil {
		l.giveUp()
		return nil, err
	}
	socket, err := o.listen(ctx)
	if err != nil {
		l.giveUp()
		return nil, err
	}
	l.socket = &limited{
		Listener: socket, max: o.MaxConnections, account: fair.Account, own: map[uint32]int{}, counts: map[uint32]int{},
	}
	return l, nil
}

func (o HTTPOptions) listen(ctx context.Context) (net.Listener, error) {
	if o.Inherited == nil {
		l, err := Listen(ctx, o.Path, o.Group)
		if err != nil {
			return nil, err
		}
		l.SetUnlinkOnClose(false)
		return l, nil
	}
	l, err := net.FileListener(o.Inherited)
	if err != nil {
		return nil, fmt.Errorf("use the inherited socket: %w", err)
	}
	if at := l.Addr(); at.Network() != "unix" || at.String() != o.Path {
		_ = l.Close()
		return nil, fmt.Errorf("the inherited socket listens at %s %s, want unix %s", at.Network(), at, o.Path)
	}
	return l, nil
}

// Socket returns the socket with its limits, for a server of another protocol that is used instead of Serve. That
// server may close the socket; Close must still be called.
func (l *HTTPListener) Socket() net.Listener { return l.socket }

// Close removes the socket, unless it was inherited. Serve does so too: after Serve, Close has no effect.
func (l *HTTPListener) Close() error {
	if l == nil || l.socket == nil {
		return nil
	}
	err := l.socket.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	if l.options.Inherited == nil {
		err = errors.Join(err, os.Remove(l.options.Path)) // this process holds the lock, so it made the socket
	}
	l.socket = nil
	l.giveUp()
	return err
}

func (l *HTTPListener) giveUp() {
	if l.held != nil {
		_ = l.held.Release()
	}
	if l.madeDir {
		_ = os.Remove(filepath.Dir(l.options.Path)) // fails if another process has put a file there
	}
}

// Serve serves until ctx ends. Then it waits a moment for running requests, and closes the socket like Close. The
// contexts of requests are derived from ctx. If Serve ends earlier, it returns an error.
func (l *HTTPListener) Serve(ctx context.Context, handler http.Handler, log *slog.Logger) error {
	defer func() { _ = l.Close() }()
	ctx, end := context.WithCancel(ctx)
	defer end()
	server := newServer(ctx, handler, log)
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

// newServer returns the server of a socket, with limits for the time of requests. A client that sends nothing is
// disconnected after RequestTime.
func newServer(ctx context.Context, handler http.Handler, log *slog.Logger) *http.Server {
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
			return context.WithValue(ctx, peerKey{}, c.(*peerConn).peer)
		},
	}
	server.SetKeepAlivesEnabled(false)
	return server
}

// peerKey is the key of a connection's peer in its context.
type peerKey struct{}

// Peer returns the process that sent a request, from the context of the request, or nil if the kernel did not report
// it.
func Peer(ctx context.Context) *unix.Ucred {
	peer, _ := ctx.Value(peerKey{}).(*unix.Ucred)
	return peer
}

// peerOf returns the process at the other end of a connection, or nil if it is not known.
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

// IsOwn reports whether a peer's user is root or this process's user.
func IsOwn(peer *unix.Ucred) bool {
	return peer != nil && (peer.Uid == 0 || int(peer.Uid) == os.Geteuid())
}

// dial connects to a program that root or this process's user runs.
func dial(ctx context.Context, path string) (net.Conn, error) {
	c, err := connect(ctx, path)
	if err != nil {
		return nil, err
	}
	if peer := peerOf(c); !IsOwn(peer) {
		_ = c.Close()
		return nil, fmt.Errorf("another user's program listens there: %+v", peer)
	}
	return c, nil
}

// ErrEnded means that the program at the other end has ended or has too many connections.
var ErrEnded = errors.New("the program closed the connection before it answered")

// IsEnd reports whether the error of a connection means that the program at the other end has ended or has too many
// connections.
func IsEnd(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || // before the request was written
		errors.Is(err, net.ErrClosed) || // net/http noticed the end while it read or wrote, and closed its own end
		err != nil && strings.HasSuffix(err.Error(), closedIdle)
}

// closedIdle is the text of an error that net/http does not export: the server closed the connection before net/http
// began to write the request.
const closedIdle = "http: server closed idle connection"

// NewHTTPClient returns an HTTP client for the program that serves a socket. The program must begin each response
// within aliveTime. Where this process may not connect to the socket, or nobody listens there, the client uses the next
// of the others.
func NewHTTPClient(path string, aliveTime time.Duration, others ...string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives:     true,
		ResponseHeaderTimeout: aliveTime,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, err := dial(ctx, path)
			for _, other := range others {
				if !isUnavailable(err) {
					break
				}
				c, err = dial(ctx, other)
			}
			return c, err
		},
	}}
}

// isUnavailable reports whether an error of dial means that nobody listens, or not for this process.
func isUnavailable(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
}
