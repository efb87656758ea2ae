package kubeapi

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

var start = time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)

// at is a status since so many minutes after the start.
func at(minutes int, state health.State, reason string, remedy health.Action) health.Status {
	since := start.Add(time.Duration(minutes) * time.Minute)
	return health.Status{State: state, Reason: reason, Remedy: remedy, Since: since}
}

var good = at(0, health.Healthy, "", health.None)

// stateOf returns the state of a node whose GPUs, from index 0, are as given.
func stateOf(gpus ...health.Status) node.State {
	s := node.State{Snapshot: &gpu.Snapshot{}, Health: map[string]health.Status{}}
	for i, h := range gpus {
		h.UUID = fmt.Sprintf("GPU-%d", i)
		s.Snapshot.Devices = append(s.Snapshot.Devices, gpu.Device{Index: i, UUID: h.UUID})
		s.Health[h.UUID] = h
		d := resource.Device{UUID: h.UUID, Healthy: h.State == health.Healthy}
		s.Resources = append(s.Resources, resource.Resource{Devices: []resource.Device{d}})
	}
	return s
}

// withMIG adds MIG devices to the first GPU.
func withMIG(s node.State, list ...health.Status) node.State {
	for i, h := range list {
		h.UUID = fmt.Sprintf("MIG-%d", i)
		one := &s.Snapshot.Devices[0]
		one.MIG = append(one.MIG, gpu.MIGDevice{Index: i, UUID: h.UUID})
		s.Health[h.UUID] = h
	}
	return s
}

func TestTheConditionNamesTheDevicesAndWhatTheyNeed(t *testing.T) {
	t.Parallel()
	reset := at(20, health.Unhealthy, "XID 95 (uncontained ECC error)", health.Reset)
	reboot := at(10, health.Unhealthy, "XID 79 (GPU has fallen off the bus)", health.Reboot)
	cordoned := at(30, health.Cordoned, "cordoned: a fan is loud", health.None)
	unreadable := stateOf(good)
	unreadable.Snapshot.Devices = append(unreadable.Snapshot.Devices, gpu.Device{Index: 1, Error: "GPU is lost"})
	noDriver := node.State{Snapshot: &gpu.Snapshot{}, Err: fmt.Errorf("open:\n%w", gpu.ErrNoDriver)}
	hangs := stateOf(good)
	hangs.Err = gpu.ErrNotAnswering
	otherError := stateOf(good)
	otherError.Err = errors.New("write the spec: no space left on device")
	noneOffered, faultBefore := stateOf(good), stateOf(reset)
	for _, s := range []*node.State{&noneOffered, &faultBefore} {
		s.Err = errors.New("the driver is being replaced:\nits library was removed")
		s.Resources[0].Devices[0].Healthy = false
	}
	for name, c := range map[string]struct {
		state                   node.State
		status, reason, message string
		minutes                 int // after the start, of the last transition
	}{
		"all are healthy": {
			stateOf(good, at(7, health.Healthy, "", health.None)), "True", "AllGPUsHealthy", "all GPUs are healthy", 7,
		},
		"one needs a reset": {
			stateOf(good, reset), "False", "ResetNeeded",
			"GPU 1 is unhealthy: XID 95 (uncontained ECC error); it needs a reset", 20,
		},
		"the most severe remedy is the reason": {
			stateOf(reset, reboot), "False", "RebootNeeded",
			"GPU 0 is unhealthy: XID 95 (uncontained ECC error); it needs a reset; " +
				"GPU 1 is unhealthy: XID 79 (GPU has fallen off the bus); it needs a reboot of the node", 10,
		},
		"probes decide": {
			stateOf(at(1, health.Suspect, "XID 74 (NVLink error)", health.Probe)), "False", "GPUsUnhealthy",
			"GPU 0 is suspect: XID 74 (NVLink error)", 1,
		},
		"what recovers has had its remedy": {
			stateOf(at(1, health.Recovering, "XID 95 (uncontained ECC error)", health.Reset)), "False", "GPUsUnhealthy",
			"GPU 0 is recovering: its probes pass; the fault was: XID 95 (uncontained ECC error)", 1,
		},
		"a cordoned GPU is no fault": {
			stateOf(good, cordoned), "True", "GPUsCordoned",
			"all GPUs that are not cordoned are healthy; GPU 1 is cordoned: a fan is loud", 30,
		},
		"a fault beside a cordoned GPU": {
			stateOf(reset, cordoned), "False", "ResetNeeded",
			"GPU 0 is unhealthy: XID 95 (uncontained ECC error); it needs a reset; GPU 1 is cordoned: a fan is loud", 20,
		},
		"MIG devices that are as their GPU are not named": {
			withMIG(stateOf(reset), reset, good), "False", "ResetNeeded",
			"GPU 0 is unhealthy: XID 95 (uncontained ECC error); it needs a reset", 20,
		},
		"a MIG device alone": {
			withMIG(stateOf(good), good, reset), "False", "ResetNeeded",
			"MIG device 0:1 is unhealthy: XID 95 (uncontained ECC error); it needs a reset", 20,
		},
		"a GPU without a UUID": {unreadable, "False", "GPUsUnhealthy", "GPU 1 is unhealthy: it cannot be read", -1},
		"no driver":            {noDriver, "Unknown", "DriverNotUsable", "open:; no usable NVIDIA driver", -1},
		"the driver hangs": {
			hangs, "Unknown", "DriverNotUsable", "no usable NVIDIA driver: it does not answer", -1,
		},
		"another error is none of the GPUs'": {otherError, "True", "AllGPUsHealthy", "all GPUs are healthy", 0},
		"an error for which no device is offered": {
			noneOffered, "Unknown", "NotReconciled", "the driver is being replaced:; its library was removed", -1,
		},
		"such an error after a fault": {
			faultBefore, "False", "ResetNeeded",
			"GPU 0 is unhealthy: XID 95 (uncontained ECC error); it needs a reset", 20,
		},
		"no GPU": {
			node.State{Snapshot: &gpu.Snapshot{}}, "Unknown", "NoGPUs", "the node has no GPU", -1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := condition{Type: ConditionType, Status: c.status, Reason: c.reason, Message: c.message}
			if c.minutes >= 0 {
				want.LastTransition = start.Add(time.Duration(c.minutes) * time.Minute)
			}
			if diff := cmp.Diff(want, conditionOf(devicesOf(&c.state), c.state.Err, offersAny(c.state.Resources))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestALongMessageIsShortened(t *testing.T) {
	t.Parallel()
	s := stateOf(at(0, health.Unhealthy, strings.Repeat("é", 1000), health.None))
	c := conditionOf(devicesOf(&s), nil, true)
	if len(c.Message) > maxMessage || !strings.HasSuffix(c.Message, "é...") {
		t.Errorf("%d bytes: %s", len(c.Message), c.Message)
	}
}

// The time of the last transition changes only if the status does.
func TestTheTransitionTimeFollowsTheStatus(t *testing.T) {
	t.Parallel()
	c := &conditions{wake: make(chan struct{}, 1)}
	set := func(minutes int, gpus ...health.Status) time.Time {
		s := stateOf(gpus...)
		c.set(conditionOf(devicesOf(&s), nil, true), start.Add(time.Duration(minutes)*time.Minute))
		return c.last.LastTransition
	}
	link := func(minutes int) health.Status { return at(minutes, health.Unhealthy, "a link is down", health.None) }
	for _, step := range []struct {
		want, got time.Time
	}{
		{start, set(50, good, good)}, // after a restart: since when it has been so
		{start.Add(60 * time.Minute), set(60, link(60), good)},
		{start.Add(60 * time.Minute), set(70, link(60), link(70))},
		{start.Add(60 * time.Minute), set(80, good, link(70))},
		{start.Add(90 * time.Minute), set(90, good, good)},
	} {
		if !step.got.Equal(step.want) {
			t.Errorf("%v, want %v", step.got, step.want)
		}
	}
}
