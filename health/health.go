// Package health decides which devices are healthy. It gets events and probes of GPUs, and returns a state for each
// device, with a reason and a remedy.
//
// A Machine is pure: it has no side effects and no clock. Each input has its time, and inputs must be in order. Of
// NVIDIA's terms the package knows only XIDs and the recovery action.
package health

import (
	"time"
)

// State is the health of a device. Containers get only healthy devices.
type State string

// The states of a device.
const (
	Healthy State = "healthy"
	// Suspect is a device that may have a fault: a report is no proof of one, and probes will decide, or the device is
	// still in use after its last container. Containers do not get it meanwhile: on a bad device they would lose their
	// work, and to do without the device for some seconds costs little.
	Suspect State = "suspect"
	// Unhealthy is a device that needs its Remedy, or whose probes fail.
	Unhealthy State = "unhealthy"
	// Recovering is a device whose probes pass again, but have not done so for long enough.
	Recovering State = "recovering"
	// Cordoned is a device that an administrator has taken out of service, or that is held for an administrator's
	// reset.
	Cordoned State = "cordoned"
)

// Device is a GPU, or a MIG device of a GPU.
type Device struct {
	UUID string `json:"uuid"`
	// GPU is the UUID of the GPU to which a MIG device belongs. For a GPU it is the GPU's own UUID.
	GPU string `json:"gpu"`
	// GPUInstance and ComputeInstance are the IDs of a MIG device's instances, or gpu.NoInstance.
	GPUInstance     int `json:"gpuInstance"`
	ComputeInstance int `json:"computeInstance"`
}

// Finding is a fault of a GPU, with the action that the GPU needs.
type Finding struct {
	// Text is part of a sentence, such as "a row of its memory could not be remapped".
	Text string `json:"text"`
	// Action is the action that the GPU needs, or None if the fault can pass by itself.
	Action Action `json:"action"`

	byRule bool // whether an administrator's rule produced it
}

// Status is the health of a device at one time.
type Status struct {
	UUID  string `json:"uuid"`
	State State  `json:"state"`
	// Reason says why the device is not healthy, as part of a sentence.
	Reason string `json:"reason,omitempty"`
	// Remedy is the action that the device needs.
	Remedy Action `json:"remedy,omitempty"`
	// InUse means that nothing is wrong with the device but that something uses it without a container. Reason says
	// what.
	InUse bool `json:"-"`
	// Since is when the device entered its State.
	Since time.Time `json:"since"`
	// XIDs has the number of events of each XID.
	XIDs map[uint64]int `json:"xids,omitempty"`
	// EventsMissed says why the events of a GPU are not received, or is empty. Meanwhile only probes detect faults of
	// that GPU.
	EventsMissed string `json:"eventsMissed,omitempty"`
}

// String describes the state as the rest of a sentence about the device, such as "unhealthy: XID 95 (uncontained ECC
// error); it needs a reset".
func (s Status) String() string {
	switch s.State {
	case Healthy:
		return string(Healthy)
	case Cordoned:
		return s.Reason
	case Recovering:
		return "recovering: its probes pass; the fault was: " + s.Reason
	}
	text := string(s.State) + ": " + s.Reason
	needs := map[Action]string{Reset: "a reset", Reboot: "a reboot of the node", Service: "service"}
	if n := needs[s.Remedy]; n != "" {
		text += "; it needs " + n
	}
	return text
}

// Transition is a change of a device's state or reason.
type Transition struct {
	From State
	To   Status
}
