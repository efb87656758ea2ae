package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/manager/model"
)

// Leases has the methods of the service of leases that the API needs. See lease.Service.
type Leases interface {
	Acquire(ctx context.Context, ask lease.Ask, waits func(lease.Waiting), grant func(lease.Granted) error) error
	End(id string, by model.Caller) error
	Extend(ctx context.Context, id string, by model.Caller, left time.Duration) error
	List() (leases []lease.Lease, waiting []lease.Waiting, busy []lease.Busy)
}

// LeaseRequest asks for a lease of the calling process.
type LeaseRequest struct {
	lease.Request

	// Command is what people see of the process.
	Command string `json:"command"`
	// Seconds are how long the process may run; 0 means no limit. After that it gets SIGTERM, and SIGKILL later.
	Seconds float64 `json:"seconds,omitempty"`
	// PID is the process that has the lease; 0 means the calling process.
	PID int `json:"pid,omitempty"`
	// Timed means that no process has the lease: it ends after Seconds.
	Timed bool `json:"timed,omitempty"`
	// Confine has the calling process open the leased devices only, if that is possible. The lease then ends with the
	// process, whatever containers it has started.
	Confine bool `json:"confine,omitempty"`
}

// ExtendRequest has a lease end after a time from now.
type ExtendRequest struct {
	Seconds float64 `json:"seconds"`
}

// LeaseEvent is a line of the response to a LeaseRequest. One field is set. After Granted or Error none follows.
type LeaseEvent struct {
	Waiting *lease.Waiting `json:"waiting,omitempty"`
	Granted *lease.Granted `json:"granted,omitempty"`
	Error   *Error         `json:"error,omitempty"`
}

// LeaseList is the response to a list of leases.
type LeaseList struct {
	// Items are in the order of their begin, and Waiting in that of their arrival.
	Items   []lease.Lease   `json:"items"`
	Waiting []lease.Waiting `json:"waiting"`
	// Busy are the devices that something uses without a lease, and those that could not be leased of late, sorted.
	Busy []lease.Busy `json:"busy"`
}

// maxSeconds is more than a lease needs.
const maxSeconds = 10 * 365 * 24 * 3600

// acquire sends a line of JSON at each change of the queue, and then the lease or an error. The request ends with the
// connection.
func (s *Server) acquire(w http.ResponseWriter, q *http.Request) {
	conn := http.NewResponseController(w)
	send := func(e LeaseEvent) error {
		_ = conn.SetWriteDeadline(time.Now().Add(unixsocket.RequestTime))
		encoder := json.NewEncoder(w)
		encoder.SetEscapeHTML(false)
		return errors.Join(encoder.Encode(e), conn.Flush())
	}
	r, err := s.leaseRequest(w, q)
	if err != nil {
		failed := errorOf(err)
		writeJSON(w, failed.Code, failed)
		return
	}
	_ = conn.SetReadDeadline(time.Time{}) // it was for reading the request, and would also end the context
	w.Header().Set("Content-Type", "application/x-ndjson")
	_ = conn.SetWriteDeadline(time.Now().Add(unixsocket.RequestTime))
	_ = conn.Flush()
	ask := lease.Ask{
		Request: r.Request, Command: r.Command, For: duration(r.Seconds), By: callerOf(q), PID: r.PID, Timed: r.Timed,
		Confine: r.Confine,
	}
	err = s.Leases.Acquire(
		q.Context(), ask,
		func(now lease.Waiting) { _ = send(LeaseEvent{Waiting: &now}) }, // an error ends the request's context too
		func(g lease.Granted) error { return send(LeaseEvent{Granted: &g}) },
	)
	if err == nil {
		return
	}
	if q.Context().Err() != nil { // the client has gone, or the manager ends
		err = fmt.Errorf("the device manager ends: %w", manager.ErrRetry)
	} else {
		s.Log.Log(q.Context(), s.logLevel(err),
			fmt.Sprintf("a lease for user %d, process %d: %s", ask.By.UID, ask.By.PID, shortText(err.Error())))
	}
	_ = send(LeaseEvent{Error: errorOf(err)})
}

func (s *Server) leaseRequest(w http.ResponseWriter, q *http.Request) (r LeaseRequest, err error) {
	if unixsocket.Peer(q.Context()) == nil {
		return r, errUnknownPeer
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, q.Body, maxBody))
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		return r, tooLarge(q)
	}
	if err != nil {
		return r, fmt.Errorf("read the request: %w", err)
	}
	if err := decode(body, &r); err != nil {
		return r, err
	}
	if r.AllowBusy && s.leaser(q).UID != 0 {
		return r, &Error{
			Text: "only root and the users of the whole API may lease devices that are busy", Code: http.StatusForbidden,
			Reason: "Forbidden",
		}
	}
	return r, checkSeconds(r.Seconds)
}

func checkSeconds(s float64) error {
	if !(s >= 0 && s <= maxSeconds) {
		return badRequest("seconds is %v, want 0 to %d", s, maxSeconds)
	}
	return nil
}

func duration(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

func (s *Server) leases(*http.Request) (any, error) {
	list := LeaseList{Items: []lease.Lease{}, Waiting: []lease.Waiting{}, Busy: []lease.Busy{}}
	leases, waiting, busy := s.Leases.List()
	list.Items, list.Waiting = append(list.Items, leases...), append(list.Waiting, waiting...)
	list.Busy = append(list.Busy, busy...)
	return list, nil
}

func (s *Server) endLease(q *http.Request) (any, error) {
	return nil, s.Leases.End(q.PathValue("id"), s.leaser(q))
}

func (s *Server) extendLease(q *http.Request) (any, error) {
	data, _ := io.ReadAll(q.Body) // the body is in memory
	var r ExtendRequest
	if err := decode(data, &r); err != nil {
		return nil, err
	}
	if err := checkSeconds(r.Seconds); err != nil {
		return nil, err
	}
	return nil, s.Leases.Extend(q.Context(), q.PathValue("id"), s.leaser(q), duration(r.Seconds))
}

// leaser returns for whom a request changes a lease: for root if its sender may use the whole API.
func (s *Server) leaser(q *http.Request) model.Caller {
	by := callerOf(q)
	if !s.LeasesOnly {
		by.UID = 0
	}
	return by
}

// Lease asks for a lease, of this process by default, and waits for it until ctx ends. It calls `waits` at each change
// of the queue.
func (c *Client) Lease(ctx context.Context, r LeaseRequest, waits func(lease.Waiting)) (g lease.Granted, err error) {
	body, err := json.Marshal(r)
	if err != nil {
		return g, fmt.Errorf("make the request: %w", err)
	}
	answer, err := c.send(ctx, http.MethodPost, leasesPath, body)
	if err != nil {
		return g, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return g, readError(answer)
	}
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(nil, maxEvent)
	for lines.Scan() {
		var e LeaseEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return g, fmt.Errorf("read an answer of the device manager: %w", err)
		}
		switch {
		case e.Granted != nil:
			return *e.Granted, nil
		case e.Error != nil:
			return g, e.Error
		case e.Waiting != nil:
			waits(*e.Waiting)
		}
	}
	if ctx.Err() != nil {
		return g, context.Cause(ctx)
	}
	return g, fmt.Errorf("wait for a lease: %w", errors.Join(lines.Err(), unixsocket.ErrEnded))
}

// Leases returns the leases and the waiting requests.
func (c *Client) Leases(ctx context.Context) (list LeaseList, err error) {
	err = c.do(ctx, http.MethodGet, leasesPath, nil, &list)
	return list, err
}

// EndLease ends the process of a lease. It does not wait for that.
func (c *Client) EndLease(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodDelete, leasesPath+"/"+url.PathEscape(id), nil, nil)
}

// ExtendLease has a lease end after a time from now.
func (c *Client) ExtendLease(ctx context.Context, id string, left time.Duration) error {
	body, err := json.Marshal(ExtendRequest{left.Seconds()})
	if err != nil {
		return fmt.Errorf("make the request: %w", err)
	}
	return c.do(ctx, http.MethodPost, leasesPath+"/"+url.PathEscape(id)+"/extend", body, nil)
}

const leasesPath = "/v1/leases"

// leaseErrors are the responses to errors of leases.
func leaseError(err error) *Error {
	for _, row := range []struct {
		is     error
		code   int
		reason string
	}{
		{lease.ErrInvalid, http.StatusBadRequest, "BadRequest"},
		{lease.ErrImpossible, http.StatusUnprocessableEntity, "Impossible"},
		{lease.ErrTooMany, http.StatusTooManyRequests, "TooManyRequests"},
		{lease.ErrNotFound, http.StatusNotFound, "NotFound"},
		{lease.ErrNotYours, http.StatusForbidden, "Forbidden"},
	} {
		if errors.Is(err, row.is) {
			return &Error{Text: shortText(wording.OneLine(err)), Code: row.code, Reason: row.reason}
		}
	}
	return nil
}
