package kubeapi

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
)

// component is the source of Events.
const component = "gpu-cdi-plugin"

const (
	normal  = "Normal"
	warning = "Warning"
)

// event is the content of an Event.
type event struct{ kind, reason, message string }

const (
	// maxRecords is how many different Events are kept for sending or counting repetitions.
	maxRecords = 256
	// repeatWithin is how long repetitions of an Event are counted: the API server deletes it after an hour by
	// default.
	repeatWithin = time.Hour
	// burst is how many requests may be sent at once. Later ones are timing.distance apart.
	burst = 25
	// namespace is the namespace of Events about objects without one.
	namespace = "default"
)

// record is an Event that was or will be sent to the API server.
type record struct {
	event
	name        string // of the object
	first, last time.Time
	count, sent int  // how often it happened, and the count that was sent last
	created     bool // whether the API server has the object
}

// events sends Events about a Node. Repetitions are counted in one Event, which bounds both the queue and the
// requests.
type events struct {
	do     request
	node   string
	timing timing
	log    *slog.Logger
	wake   wake.Chan

	mu      sync.Mutex
	records []*record
	added   int64 // the number of records so far
	dropped int

	due time.Time // when the next request would be due without bursts
}

// add records an occurrence of an Event.
func (e *events) add(ev event, now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.wake.Wake()
	ev.message = wording.Shorten(ev.message, maxMessage)
	e.records = slices.DeleteFunc(e.records, func(r *record) bool {
		return r.count == r.sent && now.Sub(r.last) > repeatWithin
	})
	for _, r := range e.records {
		if r.event == ev && now.Sub(r.first) < repeatWithin {
			r.last = now
			r.count++
			return
		}
	}
	if len(e.records) == maxRecords {
		at := slices.IndexFunc(e.records, func(r *record) bool { return r.count == r.sent })
		if at < 0 {
			e.dropped++
			return
		}
		e.records = slices.Delete(e.records, at, at+1)
	}
	e.added++ // gives two Events of the same time different names
	name := fmt.Sprintf("%s.%x", e.node, now.UnixNano()+e.added)
	e.records = append(e.records, &record{event: ev, name: name, first: now, last: now, count: 1})
}

// next returns the next record to send, unsent ones first, and a copy that can be read without the lock.
func (e *events) next() (copied record, original *record) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dropped > 0 {
		e.log.Warn(fmt.Sprintf("%d Events are lost: too many wait for the API server", e.dropped))
		e.dropped = 0
	}
	for _, r := range e.records {
		if r.count > r.sent && (original == nil || r.sent == 0 && original.sent > 0) {
			original = r
		}
	}
	if original == nil {
		return record{}, nil
	}
	return *original, original
}

// send sends waiting Events as the rate limit allows, and returns the time until the next call is due.
func (e *events) send(ctx context.Context) (time.Duration, error) {
	for {
		r, original := e.next()
		if original == nil {
			return time.Hour, nil
		}
		if wait := e.wait(time.Now()); wait > 0 {
			return wait, nil
		}
		err := e.sendOne(ctx, &r)
		refused := answered(err, http.StatusBadRequest, http.StatusUnprocessableEntity)
		if refused { // only this Event is invalid; send the others
			e.log.Warn("an Event is not reported to the API server: "+wording.Shorten(err.Error(), maxMessage),
				"event", r.message)
		}
		e.mu.Lock()
		original.created = r.created
		if err == nil || refused {
			original.sent = r.count
		}
		e.mu.Unlock()
		if err != nil && !refused {
			return 0, err
		}
	}
}

// wait returns how long the next request must wait. If it need not wait, wait counts the request.
func (e *events) wait(now time.Time) time.Duration {
	if e.due.Before(now) {
		e.due = now
	}
	if early := e.due.Sub(now) - (burst-1)*e.timing.distance; early > 0 {
		return early
	}
	e.due = e.due.Add(e.timing.distance)
	return 0
}

// sendOne creates an Event, or updates the count of one that was created. One that has expired is created again. It
// keeps its name, so a creation whose answer was lost is not duplicated.
func (e *events) sendOne(ctx context.Context, r *record) error {
	collection := "/api/v1/namespaces/" + namespace + "/events"
	if r.created {
		update := map[string]any{"count": r.count, "lastTimestamp": seconds(r.last)}
		err := e.do(ctx, http.MethodPatch, collection+"/"+url.PathEscape(r.name), asStrategicMerge, update)
		if !answered(err, http.StatusNotFound) {
			return e.wrap(err)
		}
		r.created = false
	}
	err := e.do(ctx, http.MethodPost, collection, asJSON, e.object(r))
	if r.created = err == nil || answered(err, http.StatusConflict); r.created {
		return nil
	}
	return e.wrap(err)
}

func (e *events) wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("report an Event about node %s: %w", e.node, err)
}

// object returns the Event in core/v1. Events of events.k8s.io/v1 lack the count and the first and last time, which
// tools that list and export Events show. The kubelet uses core/v1 too. As in its Events, the UID is the Node's name,
// by which `kubectl describe node` finds them.
func (e *events) object(r *record) map[string]any {
	return map[string]any{
		"apiVersion": "v1",
		"kind":       "Event",
		"metadata":   map[string]string{"name": r.name, "namespace": namespace},
		"involvedObject": map[string]string{
			"apiVersion": "v1", "kind": "Node", "name": e.node, "uid": e.node,
		},
		"type":               r.kind,
		"reason":             r.reason,
		"message":            r.message,
		"source":             map[string]string{"component": component, "host": e.node},
		"reportingComponent": component,
		"reportingInstance":  e.node,
		"count":              r.count,
		"firstTimestamp":     seconds(r.first),
		"lastTimestamp":      seconds(r.last),
	}
}
