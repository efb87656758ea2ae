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

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
)

// ConditionType is the type of the node condition.
const ConditionType = "GPUsHealthy"

// condition is a condition of a Node, as the API server has it.
type condition struct {
	Type           string    `json:"type"`
	Status         string    `json:"status"` // True, False or Unknown
	LastHeartbeat  time.Time `json:"lastHeartbeatTime"`
	LastTransition time.Time `json:"lastTransitionTime"`
	Reason         string    `json:"reason"`
	Message        string    `json:"message"`
}

// conditionOf returns the condition of a node's devices. Its time is that of the device's change that made it so, which
// a restart of the process does not alter. A cordoned device is no fault. An error of the state for which no device is
// offered makes the condition unknown, unless a fault is known.
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

// faults are what is wrong with devices.
type faults struct {
	remedies  map[health.Action]bool // what the devices that are at fault need
	sentences []string               // about these, and cordons about the cordoned ones
	cordons   []string
	since     time.Time // since when one is at fault
	changed   time.Time // when the state of a device changed last
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
			if d.State == health.Recovering { // it has had its remedy
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

// reasonOf is the reason for the most severe of the remedies.
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
	at   time.Time // of sent
}

// set takes the condition as it is now.
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

// send sends the condition if it has changed or if it is time to, and returns when to be called again at the latest.
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
	sent := next
	sent.LastHeartbeat, sent.LastTransition = seconds(now), seconds(next.LastTransition)
	var patch struct {
		Status struct {
			// The API server merges the list by type, so that other conditions stay.
			Conditions []condition `json:"conditions"`
		} `json:"status"`
	}
	patch.Status.Conditions = []condition{sent}
	path := "/api/v1/nodes/" + url.PathEscape(c.node) + "/status"
	if err := c.do(ctx, http.MethodPatch, path, asStrategicMerge, patch); err != nil {
		return 0, fmt.Errorf("set the condition %s of node %s: %w", ConditionType, c.node, err)
	}
	c.sent, c.at = next, now
	return c.timing.heartbeat, nil
}

// seconds is a time as the API server writes it.
func seconds(t time.Time) time.Time { return t.UTC().Truncate(time.Second) }

// maxMessage is the size in bytes of the longest message.
const maxMessage = 1024
