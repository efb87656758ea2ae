package control

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/unixsocket"
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
	// retryAfter is the longest time between two attempts to create the socket, and retryHeld that while another instance
	// has it, which may be about to end: prestart-hook waits for 2 s. The first attempts are firstRetry apart.
	retryAfter = 5 * time.Second
	retryHeld  = 100 * time.Millisecond
	firstRetry = 10 * time.Millisecond
	// requestTime is how long a client may take to send its request, and to read a line of the answer.
	requestTime = unixsocket.RequestTime
	// maxConnections is how many connections are served at once; others are closed. It must be enough for a reset of
	// each GPU that waits.
	maxConnections = 64
)

// Run serves until ctx ends and then removes the socket. If the socket cannot be created, for example because another
// instance has it, Run logs the error and tries again: containers can get GPUs without this socket.
func (s *Server) Run(ctx context.Context) error {
	logged, longest, pause := "", cmp.Or(s.retry, retryAfter), firstRetry
	for began := time.Now(); ctx.Err() == nil; {
		err := s.serve(ctx)
		if err != nil && err.Error() != logged && ctx.Err() == nil && time.Since(began) >= longest {
			logged = err.Error()
			s.Log.Warn("the control socket cannot be served to administrators; retrying: " + logged)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
		pause = nextPause(pause, longest, err)
	}
	return nil
}

// nextPause returns the pause after the attempt that follows a pause.
func nextPause(last, longest time.Duration, err error) time.Duration {
	if errors.Is(err, fileio.ErrHeld) {
		longest = min(longest, retryHeld)
	}
	return min(2*last, longest)
}

// serve creates the socket and serves until ctx ends. If it ends earlier, it returns an error.
func (s *Server) serve(ctx context.Context) error {
	l, err := unixsocket.ListenHTTP(ctx, unixsocket.HTTPOptions{
		Path: SocketPath(s.Dir), LockPath: filepath.Join(s.Dir, ".control.lock"),
		Group: unixsocket.OwnerOnly, MaxConnections: maxConnections,
	})
	if err != nil {
		return fmt.Errorf("make the control socket: %w", err)
	}
	if err := l.Serve(ctx, s.handler(), s.Log); err != nil {
		return fmt.Errorf("serve the control socket: %w", err)
	}
	return nil
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1", func(w http.ResponseWriter, q *http.Request) {
		peer := unixsocket.Peer(q.Context())
		if !unixsocket.IsOwn(peer) {
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
	what, caller, info := r.String(), "an administrator", slog.LevelInfo
	failed := slog.LevelWarn
	switch r.Act {
	case Claims: // it changes nothing, and its result is long
		info = slog.LevelDebug
	case Allocation: // each container may send one, and the hook reports a refusal
		caller, info = "the hook of a container", slog.LevelDebug
	case HoldOpen, HandOver: // the service and the other instance log them
		caller, info, failed = "another instance", slog.LevelDebug, slog.LevelDebug
	default:
	}
	log.Log(q.Context(), info,
		fmt.Sprintf("request of %s (user %d, process %d): %s", caller, peer.Uid, peer.Pid, what))
	conn := http.NewResponseController(w)
	_ = conn.SetReadDeadline(time.Time{}) // it was for reading the request, and would also end the context
	send := func(m message) {
		_ = conn.SetWriteDeadline(time.Now().Add(requestTime))
		if err := json.NewEncoder(w).Encode(m); err == nil { // the context ends when the client disconnects
			_ = conn.Flush()
		}
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	_ = conn.Flush() // so that the client knows that this program is alive
	result, err := s.Handler.Handle(q.Context(), r, func(text string) { send(message{Progress: text}) })
	switch {
	case err != nil && errors.Is(err, context.Cause(q.Context())):
		log.Log(q.Context(), info,
			"a request of "+caller+" was not carried out, since the client or this program has ended: "+what)
		if r.Act == Allocation { // the hook sends it to the instance that has taken over
			return
		}
		send(message{Error: "the service is shutting down"})
		return
	case err != nil:
		log.Log(q.Context(), failed, "a request of "+caller+" failed: "+what+": "+err.Error())
		send(message{Error: err.Error()})
		return
	}
	log.Log(q.Context(), info, "done for "+caller+": "+result)
	send(message{Result: result})
}
