package api

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/promtext"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/pod"
)

// Server answers the requests of the API.
type Server struct {
	Manager Manager
	// ParsePod reads a manifest in YAML or JSON.
	ParsePod func(manifest []byte) (model.Pod, error)
	// NodeStatus returns the node's capacity and its allocatable resources.
	NodeStatus func() NodeStatus
	// Metrics returns the metrics in Prometheus' text format, version 0.0.4. If it is nil, the response has the status
	// 404.
	Metrics func() ([]byte, error)
	// Leases gives leases.
	Leases Leases
	// LeasesOnly leaves out all requests but those for leases, and has clients end only their own leases.
	LeasesOnly bool
	Log        *slog.Logger

	maxWait  time.Duration // for tests; 0 means the constant maxWait
	changes  chan struct{}
	watchers chan struct{}
}

// The limits of the API. Reads always find a free connection, since less than maxConnections can stay open: maxChanges,
// maxWatchers, and 384 requests that wait for a lease (see lease.Service), together 832. A user other than root and the
// manager's has a quarter, 256, of which 64 can wait for a lease. Where all are taken, the user who has most loses one
// to a user who has fewer.
const (
	maxConnections = 1024
	maxChanges     = 384 // concurrent requests that change something
	maxWatchers    = 64
	// maxBody is the size of the largest request, one with a manifest, in bytes.
	maxBody = pod.MaxSize
	// maxWait is how long a request may take: a pod with many containers needs many calls to plugins.
	maxWait = 5 * time.Minute
)

// Listen makes the socket at path, with the lock file path.lock. The owner may connect, and also the group with the
// given GID, unless that is unixsocket.OwnerOnly. If systemd made the socket, it is inherited, and otherwise nil. The
// error wraps ErrServed if another manager serves the socket.
func Listen(ctx context.Context, path string, group int, inherited *os.File) (*unixsocket.HTTPListener, error) {
	l, err := unixsocket.ListenHTTP(ctx, unixsocket.HTTPOptions{
		Path: path, LockPath: path + ".lock", Group: group, Inherited: inherited, MaxConnections: maxConnections,
	})
	if errors.Is(err, fileio.ErrHeld) {
		err = fmt.Errorf("%w: %w", ErrServed, err)
	}
	if err != nil {
		return nil, fmt.Errorf("make the socket of the API: %w", err)
	}
	return l, nil
}

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context, l *unixsocket.HTTPListener) error {
	if err := l.Serve(ctx, s.handler(), s.Log); err != nil {
		return fmt.Errorf("serve the API: %w", err)
	}
	return nil
}

// route is a request of the API.
type route struct {
	method, path string
	// status is the HTTP status of a successful response.
	status int
	// answer returns the body of the response: a value for JSON, prometheusText, or nil for an empty body.
	answer func(*Server, *http.Request) (any, error)
}

// routes are all requests except watch and acquire, whose responses are streams.
var routes = []route{
	{http.MethodGet, "/v1/healthz", http.StatusOK, (*Server).healthz},
	{http.MethodGet, "/v1/pods", http.StatusOK, (*Server).pods},
	{http.MethodPost, "/v1/pods", http.StatusCreated, (*Server).admit},
	{http.MethodGet, "/v1/pods/{uid}", http.StatusOK, (*Server).pod},
	{http.MethodDelete, "/v1/pods/{uid}", http.StatusNoContent, (*Server).release},
	{http.MethodPost, "/v1/pods/{uid}/containers/{container}/start", http.StatusOK, (*Server).start},
	{http.MethodPost, "/v1/pods/{uid}/containers/{container}/ended", http.StatusNoContent, (*Server).ended},
	{http.MethodGet, "/v1/devices", http.StatusOK, (*Server).devices},
	{http.MethodPost, "/v1/devices/free", http.StatusNoContent, (*Server).free},
	{http.MethodGet, "/v1/node", http.StatusOK, (*Server).node},
	{http.MethodGet, "/metrics", http.StatusOK, (*Server).metrics},
	{http.MethodGet, leasesPath, http.StatusOK, (*Server).leases},
	{http.MethodDelete, leasesPath + "/{id}", http.StatusNoContent, (*Server).endLease},
	{http.MethodPost, leasesPath + "/{id}/extend", http.StatusNoContent, (*Server).extendLease},
}

// handler handles the requests of the API. For any other request it responds with an Error; net/http would respond
// with plain text.
func (s *Server) handler() http.Handler {
	s.changes, s.watchers = make(chan struct{}, maxChanges), make(chan struct{}, maxWatchers)
	methods := map[string]map[string]http.HandlerFunc{leasesPath: {http.MethodPost: s.acquire}} // by path
	if !s.LeasesOnly {
		methods["/v1/watch"] = map[string]http.HandlerFunc{http.MethodGet: s.watch}
	}
	for _, r := range routes {
		if s.LeasesOnly && !strings.HasPrefix(r.path, leasesPath) {
			continue
		}
		if methods[r.path] == nil {
			methods[r.path] = map[string]http.HandlerFunc{}
		}
		methods[r.path][r.method] = func(w http.ResponseWriter, q *http.Request) { s.serve(w, q, r) }
	}
	mux := http.NewServeMux()
	for pattern, answers := range methods {
		allow := strings.Join(slices.Sorted(maps.Keys(answers)), ", ")
		mux.HandleFunc(pattern, func(w http.ResponseWriter, q *http.Request) {
			if answer := answers[q.Method]; answer != nil {
				answer(w, q)
				return
			}
			failed := noRequest(q, http.StatusMethodNotAllowed, "MethodNotAllowed")
			failed.Hint = "this path accepts " + allow
			w.Header().Set("Allow", allow)
			writeJSON(w, failed.Code, failed)
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		// The mux would redirect a path that is not clean, and answer an unknown path with plain text.
		escaped := q.URL.EscapedPath()
		if _, pattern := mux.Handler(q); pattern == "" || escaped != path.Clean(escaped) {
			writeJSON(w, http.StatusNotFound, noRequest(q, http.StatusNotFound, "NotFound"))
			return
		}
		mux.ServeHTTP(w, q)
	})
}

// maxPath is how many bytes of a request's path a message quotes.
const maxPath = 200

// noRequest returns the response to a request that is not in the API.
func noRequest(q *http.Request, code int, reason string) *Error {
	text := "unknown request " + q.Method + " " + wording.Shorten(q.URL.Path, maxPath)
	return &Error{Text: text, Code: code, Reason: reason}
}

// serve handles a request.
func (s *Server) serve(w http.ResponseWriter, q *http.Request, r route) {
	answer, err := s.do(w, q, r)
	s.logRequest(q, answer, err)
	conn := http.NewResponseController(w)
	_ = conn.SetWriteDeadline(time.Now().Add(unixsocket.RequestTime))
	text, isText := answer.(prometheusText)
	switch {
	case err != nil:
		failed := errorOf(err)
		if failed.Code == http.StatusServiceUnavailable || failed.Code == http.StatusTooManyRequests {
			w.Header().Set("Retry-After", "1")
		}
		writeJSON(w, failed.Code, failed)
	case answer == nil:
		w.WriteHeader(r.status)
	case isText:
		w.Header().Set("Content-Type", promtext.ContentType)
		_, _ = w.Write(text) // an error means that the client has gone
	default:
		writeJSON(w, r.status, answer)
	}
}

func (s *Server) do(w http.ResponseWriter, q *http.Request, r route) (any, error) {
	if unixsocket.Peer(q.Context()) == nil {
		return nil, errUnknownPeer
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, q.Body, maxBody))
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		return nil, tooLarge(q)
	}
	if err != nil {
		return nil, fmt.Errorf("read the request: %w", err)
	}
	if q.Method != http.MethodGet { // a client that sends its request slowly takes no place
		if !take(s.changes) {
			return nil, tooMany("other requests are under way")
		}
		defer func() { <-s.changes }()
	}
	q.Body = io.NopCloser(bytes.NewReader(body))
	// The read deadline was for reading the request. If it stayed, it would also end the request's context.
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	ctx, end := context.WithTimeout(q.Context(), cmp.Or(s.maxWait, maxWait))
	defer end()
	return r.answer(s, q.WithContext(ctx))
}

// logRequest logs a request that changes something, with the calling process.
func (s *Server) logRequest(q *http.Request, answer any, err error) {
	if q.Method == http.MethodGet {
		return
	}
	by := callerOf(q)
	log, level := s.Log.With("uid", by.UID, "gid", by.GID, "pid", by.PID), s.logLevel(err)
	what := fmt.Sprintf("%s %s for user %d, process %d", q.Method, wording.Shorten(q.URL.Path, maxPath), by.UID, by.PID)
	if pod, ok := answer.(Pod); ok {
		what += ": pod " + pod.Metadata.Namespace + "/" + pod.Metadata.Name + " is placed as " + pod.Metadata.UID
	}
	if err != nil {
		what += " failed: " + shortText(err.Error())
	}
	log.Log(q.Context(), level, what)
}

// logLevel returns the level of the line about a request. Where each user may ask, only what the manager could not do
// is above debug: a user could send so many requests that journald drops the lines about others. The service of leases
// logs their begin and end.
func (s *Server) logLevel(err error) slog.Level {
	failed := err != nil && errorOf(err).Code >= http.StatusInternalServerError && !errors.Is(err, manager.ErrRetry)
	switch {
	case s.LeasesOnly && !failed:
		return slog.LevelDebug
	case err != nil:
		return slog.LevelWarn
	}
	return slog.LevelInfo
}

// callerOf returns the process that sent a request.
func callerOf(q *http.Request) model.Caller {
	peer := unixsocket.Peer(q.Context())
	if peer == nil {
		return model.Caller{UID: -1, GID: -1}
	}
	return model.Caller{UID: int(peer.Uid), GID: int(peer.Gid), PID: int(peer.Pid)}
}

// take takes one of a limited number of places. It reports whether a place was free.
func take(places chan struct{}) bool {
	select {
	case places <- struct{}{}:
		return true
	default:
		return false
	}
}

func writeJSON(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	_ = e.Encode(body) // an error means that the client has gone
}
