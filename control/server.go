package control

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
)

// Server answers requests at the socket of a directory.
type Server struct {
	// Dir is the directory of the socket. Only root and this process's user may be able to write to it.
	Dir     string
	Handler Handler
	Log     *slog.Logger

	retry time.Duration // for tests
}

const (
	// retryAfter is the time between two tries to make the socket.
	retryAfter = 5 * time.Second
	// requestTime is how long a client may take to send its request, and to take a line of the answer.
	requestTime = 5 * time.Second
	// drainTime is how long requests under way may take when Run ends.
	drainTime = 2 * time.Second
	// maxConnections is how many connections are served at once; others are closed. A reset of each GPU may be waiting.
	maxConnections = 64
)

// Run serves until ctx ends and then removes the socket. What keeps the socket from being made, as another instance
// that has it, is logged, and Run tries again: GPUs can be given to containers without it.
func (s *Server) Run(ctx context.Context) error {
	logged := ""
	for ctx.Err() == nil {
		err := s.serve(ctx)
		if text := err.Error(); text != logged && ctx.Err() == nil {
			logged = text
			s.Log.Warn("administrators cannot reach this program, and it tries again: " + text)
		}
		select {
		case <-time.After(cmp.Or(s.retry, retryAfter)):
		case <-ctx.Done():
		}
	}
	return nil
}

// serve makes the socket and serves. It always returns an error.
func (s *Server) serve(ctx context.Context) error {
	_, err := os.Lstat(s.Dir)
	made := errors.Is(err, fs.ErrNotExist)
	if err := os.MkdirAll(s.Dir, 0o755); err != nil {
		return fmt.Errorf("make the control socket: %w", err)
	}
	if made {
		defer os.Remove(s.Dir) // which fails if others have used it meanwhile
	}
	held, err := lock.Acquire(filepath.Join(s.Dir, ".control.lock"))
	if err != nil {
		return fmt.Errorf("make the control socket: %w", err)
	}
	defer func() { _ = held.Release() }()
	l, err := listen(ctx, SocketPath(s.Dir))
	if err != nil {
		return err
	}
	defer os.Remove(SocketPath(s.Dir)) // while the lock is held: the socket is ours
	ctx, end := context.WithCancel(ctx)
	defer end()
	server := s.newHTTPServer(ctx)
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	select {
	case err := <-done:
		return fmt.Errorf("serve the control socket: %w", err)
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	if server.Shutdown(drain) != nil {
		_ = server.Close()
	}
	return <-done
}

// newHTTPServer returns the server of one socket, with bounds for its connections. The contexts of requests are made
// from ctx.
func (s *Server) newHTTPServer(ctx context.Context) *http.Server {
	var open atomic.Int64
	server := &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: requestTime,
		ReadTimeout:       requestTime,
		WriteTimeout:      requestTime,
		IdleTimeout:       requestTime,
		MaxHeaderBytes:    8 << 10,
		ErrorLog:          slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
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

// listen listens on a socket that only its owner can connect to. It replaces a socket that is there: the caller holds
// the lock.
func listen(ctx context.Context, path string) (net.Listener, error) {
	info, err := os.Lstat(path)
	switch {
	case err == nil && info.Mode().Type() != fs.ModeSocket:
		err = fmt.Errorf("%s is not a socket: remove it", path)
	case err == nil:
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("make the control socket: %w", err)
	}
	// The file gets its mode before it has a name: a chmod afterwards would come too late.
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var chmod error
		if err := c.Control(func(fd uintptr) { chmod = unix.Fchmod(int(fd), 0o600) }); err != nil {
			return err
		}
		return chmod
	}}
	l, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("make the control socket: %w", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	return l, nil
}

// peerKey is the key of a connection's peer in its context.
type peerKey struct{}

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

// allowed reports whether a peer may ask and may answer: root and this process's user.
func allowed(peer *unix.Ucred) bool {
	return peer != nil && (peer.Uid == 0 || int(peer.Uid) == os.Geteuid())
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1", func(w http.ResponseWriter, q *http.Request) {
		peer, _ := q.Context().Value(peerKey{}).(*unix.Ucred)
		if !allowed(peer) {
			var from []any
			if peer != nil {
				from = []any{"uid", peer.Uid, "pid", peer.Pid}
			}
			s.Log.Warn("a request was refused: "+ErrNotAllowed.Error(), from...)
			http.Error(w, ErrNotAllowed.Error(), http.StatusForbidden)
			return
		}
		r, err := parseRequest(http.MaxBytesReader(w, q.Body, maxRequest))
		if err != nil {
			s.Log.Warn("a request of an administrator cannot be read: "+err.Error(), "uid", peer.Uid, "pid", peer.Pid)
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		s.answer(w, q, r, peer)
	})
	return mux
}

func (s *Server) answer(w http.ResponseWriter, q *http.Request, r Request, peer *unix.Ucred) {
	log := s.Log.With("act", r.Act, "device", r.Device, "uid", peer.Uid, "gid", peer.Gid, "pid", peer.Pid)
	what, who, info := r.String(), "an administrator", slog.LevelInfo
	if r.Act == Allocation { // each container may ask, and the hook reports what is refused
		who, info = "the hook of a container", slog.LevelDebug
	}
	log.Log(q.Context(), info,
		fmt.Sprintf("%s, user %d with process %d, asks for: %s", who, peer.Uid, peer.Pid, what))
	conn := http.NewResponseController(w)
	_ = conn.SetReadDeadline(time.Time{}) // it was for the request; with it the context would end
	send := func(m message) {
		_ = conn.SetWriteDeadline(time.Now().Add(requestTime))
		if err := json.NewEncoder(w).Encode(m); err == nil { // the context ends when the client goes
			_ = conn.Flush()
		}
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	_ = conn.Flush() // the client knows from it that this program is alive
	result, err := s.Handler.Handle(q.Context(), r, func(text string) { send(message{Progress: text}) })
	switch {
	case err != nil && errors.Is(err, context.Cause(q.Context())):
		log.Log(q.Context(), info, "what "+who+" asked for was not done, since the client or this program has ended: "+what)
		send(message{Error: "the program that was asked is ending"})
		return
	case err != nil:
		log.Warn("what " + who + " asked for failed: " + what + ": " + err.Error())
		send(message{Error: err.Error()})
		return
	}
	log.Log(q.Context(), info, "done for "+who+": "+result)
	send(message{Result: result})
}
