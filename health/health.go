// Package health decides which devices are healthy. Events and probes of GPUs go in; a state with its reason and its
// remedy comes out for each device.
//
// A Machine is pure: it touches nothing and has no clock. Each input has its time, in the order of the inputs. The
// package knows XIDs and the recovery action, and nothing else of NVIDIA's.
package health

import (
	"time"
)

// State is the health of a device. Only a healthy device is given to containers.
type State string

// The states.
const (
	Healthy State = "healthy"
	// Suspect is a device about which something was reported that proves no fault, until probes decide; or one that is
	// in use after its last container. A container on a bad device would lose its work, while a device that is missing
	// for some seconds costs little.
	Suspect State = "suspect"
	// Unhealthy is a device that needs its Remedy, or whose probes do not pass.
	Unhealthy State = "unhealthy"
	// Recovering is a device whose probes pass again, but not yet for long enough.
	Recovering State = "recovering"
	// Cordoned is a device that an administrator took out of service, or one that is held for a reset by one.
	Cordoned State = "cordoned"
)

// Device is a GPU, or a MIG device of one.
type Device struct {
	UUID string `json:"uuid"`
	// GPU is the UUID of the GPU that it is on, or its own.
	GPU string `json:"gpu"`
	// GPUInstance and ComputeInstance are the IDs of a MIG device's instances, or gpu.NoInstance.
	GPUInstance     int `json:"gpuInstance"`
	ComputeInstance int `json:"computeInstance"`
}

// Finding is what is wrong with a GPU, and what it needs.
type Finding struct {
	// Text is a part of a sentence, such as "a row of its memory could not be remapped".
	Text string `json:"text"`
	// Action is what the GPU needs; None if the finding can pass by itself.
	Action Action `json:"action"`

	byRule bool // whether an administrator's rule says so
}

// Status is the health of a device at one time.
type Status struct {
	UUID  string `json:"uuid"`
	State State  `json:"state"`
	// Reason is why the device is not healthy, as a part of a sentence.
	Reason string `json:"reason,omitempty"`
	// Remedy is what it needs.
	Remedy Action `json:"remedy,omitempty"`
	// Since is when the device came to its State.
	Since time.Time `json:"since"`
	// XIDs counts the events of each code.
	XIDs map[uint64]int `json:"xids,omitempty"`
	// EventsMissed is why the events of a GPU are not received, or empty. Only probes see its faults meanwhile.
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
