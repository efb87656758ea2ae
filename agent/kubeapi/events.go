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

	"gpu-cdi-plugin/agent/apiserver"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
)

const (
	normal  = "Normal"
	warning = "Warning"
)

// event is the content of an Event.
type event struct{ kind, reason, message string }

const (
	// maxRecords is how many different Events are kept, to be sent or to count repetitions.
	maxRecords = 256
	// repeatWithin is how long repetitions of an Event are counted. By default the API server deletes an Event after
	// an hour.
	repeatWithin = time.Hour
	// burst is how many requests may be sent at once. After that, requests are timing.distance apart.
	burst = 25
	// namespace is the namespace of Events about objects that have no namespace.
	namespace = "default"
)

// record is an Event that was or will be sent to the API server.
type record struct {
	event
	name        string // of the object in the API server
	first, last time.Time
	count, sent int  // how often it happened, and how often when it was sent last
	created     bool // whether the API server has the object
}

// events sends Events about a Node. Repetitions of an Event only increase its count, which limits both the queue and
// the number of requests.
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

	due time.Time // when the next request would be sent if there were no bursts
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
	e.added++ // so that two Events of the same time have different names
	name := fmt.Sprintf("%s.%x", e.node, now.UnixNano()+e.added)
	e.records = append(e.records, &record{event: ev, name: name, first: now, last: now, count: 1})
}

// next returns the next record to send; records that were never sent come first. It also returns a copy of the record,
// which can be read without the lock.
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

// send sends Events that wait, as far as the rate limit allows. It returns the time until send must be called again.
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
		refused := apiserver.Answered(err, http.StatusBadRequest, http.StatusUnprocessableEntity)
		if refused { // only this Event is invalid, so the others are sent
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

// wait returns how long the next request must wait. If that is 0, the request counts as sent.
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

// sendOne creates an Event in the API server or, if it was created already, updates its count. If the Event has
// expired there, it is created again. An Event keeps its name, so if the answer to its creation was lost, it is not
// created twice.
func (e *events) sendOne(ctx context.Context, r *record) error {
	collection := "/api/v1/namespaces/" + namespace + "/events"
	if r.created {
		update := map[string]any{"count": r.count, "lastTimestamp": seconds(r.last)}
		err := e.do(ctx, http.MethodPatch, collection+"/"+url.PathEscape(r.name), apiserver.StrategicMerge, update)
		if !apiserver.Answered(err, http.StatusNotFound) {
			return e.wrap(err)
		}
		r.created = false
	}
	err := e.do(ctx, http.MethodPost, collection, apiserver.JSON, e.object(r))
	if r.created = err == nil || apiserver.Answered(err, http.StatusConflict); r.created {
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

// object returns the Event in the form of core/v1. The newer events.k8s.io/v1 has no count and no first and last time,
// which tools that list and export Events show. The kubelet uses core/v1 too. Like in the kubelet's Events, the UID is
// the Node's name: `kubectl describe node` finds them by that.
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
		"source":             map[string]string{"component": apiserver.Component, "host": e.node},
		"reportingComponent": apiserver.Component,
		"reportingInstance":  e.node,
		"count":              r.count,
		"firstTimestamp":     seconds(r.first),
		"lastTimestamp":      seconds(r.last),
	}
}
