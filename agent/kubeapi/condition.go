package kubeapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/agent/apiserver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
)

// ConditionType is the type of the node condition.
const ConditionType = "GPUsHealthy"

// condition is a condition of a Node, in the form of the API.
type condition struct {
	Type           string    `json:"type"`
	Status         string    `json:"status"` // True, False or Unknown
	LastHeartbeat  time.Time `json:"lastHeartbeatTime"`
	LastTransition time.Time `json:"lastTransitionTime"`
	Reason         string    `json:"reason"`
	Message        string    `json:"message"`
}

// conditionOf returns the condition of a node's devices. Its time is that of the device's change which caused the
// condition, so a restart of the process does not alter it. A cordoned device is no fault. If an error of the state
// prevents all devices from being offered, the condition is unknown, unless a fault is known.
func conditionOf(devices []device, stateErr error, offered bool) condition {
	c := condition{Type: ConditionType, Status: "Unknown"}
	switch {
	case errors.Is(stateErr, gpu.ErrNoDriver), stateErr != nil && len(devices) == 0:
		c.Reason, c.Message = "DriverNotUsable", wording.Shorten(strings.ReplaceAll(stateErr.Error(), "\n", "; "), maxMessage)
		return c
	case len(devices) == 0:
		c.Reason, c.Message = "NoGPUs", "the node has no GPU"
		return c
	}
	f := faultsOf(devices)
	switch {
	case len(f.remedies) > 0:
		c.Status, c.Reason, c.LastTransition = "False", reasonOf(f.remedies), f.since
		c.Message = strings.Join(append(f.sentences, f.cordons...), "; ")
	case stateErr != nil && !offered:
		c.Reason, c.Message = "NotReconciled", strings.ReplaceAll(stateErr.Error(), "\n", "; ")
	case len(f.cordons) > 0:
		c.Status, c.Reason, c.LastTransition = "True", "GPUsCordoned", f.changed
		c.Message = strings.Join(append([]string{"all GPUs that are not cordoned are healthy"}, f.cordons...), "; ")
	default:
		c.Status, c.Reason, c.LastTransition = "True", "AllGPUsHealthy", f.changed
		c.Message = "all GPUs are healthy"
	}
	c.Message = wording.Shorten(c.Message, maxMessage)
	return c
}

// faults sums up what is wrong with devices.
type faults struct {
	remedies  map[health.Action]bool // what the faulty devices need
	sentences []string               // about the faulty devices and the cordoned ones
	cordons   []string
	since     time.Time // the earliest time of a fault
	changed   time.Time // the last time that the state of a device changed
}

func faultsOf(devices []device) faults {
	f := faults{remedies: map[health.Action]bool{}}
	for i := range devices {
		d := &devices[i]
		if d.Since.After(f.changed) {
			f.changed = d.Since
		}
		list := &f.sentences
		switch d.State {
		case health.Healthy:
			continue
		case health.Cordoned:
			list = &f.cordons
		default:
			remedy := d.Remedy
			if d.State == health.Recovering { // its remedy was applied already
				remedy = health.Probe
			}
			f.remedies[remedy] = true
			if f.since.IsZero() || d.Since.Before(f.since) {
				f.since = d.Since
			}
		}
		if !d.asGPU {
			*list = append(*list, d.sentence())
		}
	}
	return f
}

// reasonOf returns the condition's reason: that of the most severe remedy.
func reasonOf(remedies map[health.Action]bool) string {
	switch {
	case remedies[health.Service]:
		return "ServiceNeeded"
	case remedies[health.Reboot]:
		return "RebootNeeded"
	case remedies[health.Reset]:
		return "ResetNeeded"
	default: // probes decide when the devices are healthy again
		return "GPUsUnhealthy"
	}
}

// conditions sends the last condition of a node.
type conditions struct {
	do     request
	node   string
	timing timing
	wake   wake.Chan

	mu   sync.Mutex
	last condition

	sent condition
	at   time.Time // when the condition was sent last
}

// set replaces the condition that will be sent.
func (c *conditions) set(next condition, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch before := c.last; {
	case before.Status == next.Status:
		next.LastTransition = before.LastTransition
	case before.Status != "" || next.LastTransition.IsZero():
		next.LastTransition = now
	}
	if next != c.last {
		c.last = next
		c.wake.Wake()
	}
}

// send sends the condition if it has changed or must be repeated. It returns the time until send must be called again.
func (c *conditions) send(ctx context.Context) (time.Duration, error) {
	c.mu.Lock()
	next := c.last
	c.mu.Unlock()
	now := time.Now()
	pause := now.Sub(c.at)
	switch {
	case next.Status == "":
		return c.timing.heartbeat, nil
	case pause < c.timing.between:
		return c.timing.between - pause, nil
	case next == c.sent && pause < c.timing.heartbeat:
		return c.timing.heartbeat - pause, nil
	}
	return c.timing.heartbeat, c.patch(ctx, next, now)
}

// sendLast sends the condition if it has changed, even if it was sent only a moment ago.
func (c *conditions) sendLast(ctx context.Context) error {
	c.mu.Lock()
	next := c.last
	c.mu.Unlock()
	if next == c.sent {
		return nil
	}
	return c.patch(ctx, next, time.Now())
}

func (c *conditions) patch(ctx context.Context, next condition, now time.Time) error {
	sent := next
	sent.LastHeartbeat, sent.LastTransition = seconds(now), seconds(next.LastTransition)
	var patch struct {
		Status struct {
			// The API server merges this list by type, so conditions of other types stay.
			Conditions []condition `json:"conditions"`
		} `json:"status"`
	}
	patch.Status.Conditions = []condition{sent}
	path := "/api/v1/nodes/" + url.PathEscape(c.node) + "/status"
	if err := c.do(ctx, http.MethodPatch, path, apiserver.StrategicMerge, patch); err != nil {
		return fmt.Errorf("set the condition %s of node %s: %w", ConditionType, c.node, err)
	}
	c.sent, c.at = next, now
	return nil
}

// seconds rounds a time like the API server.
func seconds(t time.Time) time.Time { return t.UTC().Truncate(time.Second) }

// maxMessage bounds a message, in bytes.
const maxMessage = 1024
