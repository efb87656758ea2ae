package api

import (
	"encoding/json"
	"net/http"
	"time"

	"gpu-cdi-plugin/internal/unixsocket"
)

// watch sends each change as a line of JSON until the client disconnects. It sends the header as soon as the watch has
// begun: a client that makes a list after that misses no change.
func (s *Server) watch(w http.ResponseWriter, q *http.Request) {
	if unixsocket.Peer(q.Context()) == nil {
		writeJSON(w, errUnknownPeer.Code, errUnknownPeer)
		return
	}
	if !take(s.watchers) {
		failed := tooMany("other watches are open")
		w.Header().Set("Retry-After", "1")
		writeJSON(w, failed.Code, failed)
		return
	}
	defer func() { <-s.watchers }()
	conn := http.NewResponseController(w)
	_ = conn.SetReadDeadline(time.Time{}) // it was for reading the request, and would also end the context
	events := s.Manager.Watch(q.Context())
	send := func(e Event) error {
		_ = conn.SetWriteDeadline(time.Now().Add(unixsocket.RequestTime))
		encoder := json.NewEncoder(w)
		encoder.SetEscapeHTML(false)
		if err := encoder.Encode(e); err != nil {
			return err
		}
		return conn.Flush()
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	_ = conn.SetWriteDeadline(time.Now().Add(unixsocket.RequestTime))
	_ = conn.Flush()
	for {
		select {
		case <-q.Context().Done():
			return
		case e, open := <-events:
			if !open {
				_ = send(
					Event{
						Type:  ErrorEvent,
						Error: "changes are missing, since the client was too slow or the manager has ended: list and watch again",
					},
				)
				return
			}
			if send(s.eventOf(e)) != nil {
				return
			}
		}
	}
}
