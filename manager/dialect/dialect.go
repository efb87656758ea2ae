// Package dialect names the faults of the kubelet's device manager that plugins meet on real nodes. The device manager
// here has none of them, unless a dialect asks for them: then the author of a plugin sees what it will meet.
package dialect

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// ErrUnknown is wrapped by the error of New for a name without a dialect.
var ErrUnknown = errors.New("unknown dialect")

// Dialect is a set of faults. The zero value has none, and New has those that plugins meet below a kubelet.
type Dialect struct {
	// Name is that of the release, as kubelet-1.36, or empty.
	Name string

	// OldInstanceDisconnectsNew (B1): a resource has one client, found by its name. When an old instance of a plugin
	// ends, the instance that has replaced it is disconnected.
	OldInstanceDisconnectsNew bool
	// FailedRegistrationOrphans (B1b): a registration that fails leaves the client before it without an owner, and its
	// later end is not noticed.
	FailedRegistrationOrphans bool
	// LeaksDevices (B2): an Allocate response without containers, or an error of GetPreferredAllocation after some
	// devices were picked, leaves devices allocated to no pod.
	LeaksDevices bool
	// CrashesOnLeavingDevice (B3): a device that leaves the list during its Allocate call ends the manager.
	CrashesOnLeavingDevice bool
	// CrashesOnMissingDevice (B4): topology hints for a pod whose device has left the list end the manager, when the pod
	// is admitted again after a restart.
	CrashesOnMissingDevice bool
	// RejectsAfterInit (B5): after a restart of the manager a running pod is rejected if an init container that has
	// ended had a device.
	RejectsAfterInit bool
	// ForgetsDamagedState (B6): a damaged checkpoint is dropped, and devices of running pods are given to others.
	ForgetsDamagedState bool
	// HealthyWhenGone (B7): the health in a pod's status of a device that is gone, or whose plugin is, is Healthy.
	HealthyWhenGone bool
	// HealthByID (B8): a change of health is looked up by the device's ID alone: with the same ID in two resources it
	// may go to the wrong pod.
	HealthByID bool
	// NoTimeouts (B9): Allocate, GetPreferredAllocation and GetDevicePluginOptions may take for ever, and all
	// admissions wait.
	NoTimeouts bool
	// CrashesOnConcurrency (B10): two admissions at the same time end the manager. No named dialect has it: the kubelet
	// itself admits pods one by one, and the clients here need not know that. For a client that stands for the kubelet.
	CrashesOnConcurrency bool
	// RejectsWithoutPlugin (B11): after a restart, a pod that has its devices is rejected for good while its plugin
	// has not registered again.
	RejectsWithoutPlugin bool
	// ChargesInitDevices (B12): devices of init containers that have ended stay with the pod, and
	// GetPreferredAllocation is not asked if devices of init containers suffice.
	ChargesInitDevices bool
	// SmallLists (B13): a ListAndWatch message has at most 4 MiB, and a device with an empty topology is missing in
	// GetAllocatableResources.
	SmallLists bool
	// SkipsUnknownPreStart: after a restart of the manager, a container starts without PreStartContainer while the
	// plugin has not registered again.
	SkipsUnknownPreStart bool
	// IgnoresUnknownResources: a limit for a resource that no plugin has registered is ignored, and the pod is admitted
	// without these devices.
	IgnoresUnknownResources bool
	// RefusesConnectedSocket: a second registration from a socket that is connected is refused, and the resource's
	// other instances take over when one is lost.
	RefusesConnectedSocket bool
}

// dialects are all that there are, oldest first.
var dialects = []Dialect{kubelet136, kubelet137()}

var kubelet136 = Dialect{
	Name:                      "kubelet-1.36",
	OldInstanceDisconnectsNew: true, FailedRegistrationOrphans: true, LeaksDevices: true,
	CrashesOnLeavingDevice: true, CrashesOnMissingDevice: true, RejectsAfterInit: true,
	ForgetsDamagedState: true, HealthyWhenGone: true, HealthByID: true, NoTimeouts: true,
	RejectsWithoutPlugin: true, ChargesInitDevices: true, SmallLists: true,
	SkipsUnknownPreStart: true, IgnoresUnknownResources: true,
}

func kubelet137() Dialect {
	d := kubelet136
	d.Name = "kubelet-1.37"
	d.OldInstanceDisconnectsNew, d.FailedRegistrationOrphans, d.HealthByID = false, false, false
	d.RefusesConnectedSocket = true
	return d
}

// Names returns the names of the dialects, oldest first.
func Names() []string {
	names := make([]string, len(dialects))
	for i, d := range dialects {
		names[i] = d.Name
	}
	return names
}

// New returns a dialect by its name. The empty name has no faults.
func New(name string) (Dialect, error) {
	if name == "" {
		return Dialect{}, nil
	}
	i := slices.IndexFunc(dialects, func(d Dialect) bool { return d.Name == name })
	if i < 0 {
		return Dialect{}, fmt.Errorf("%w %q: the dialects are %s", ErrUnknown, name, strings.Join(Names(), ", "))
	}
	return dialects[i], nil
}

// CrashError is what a dialect returns where the kubelet would panic. The manager ends with it.
type CrashError struct {
	Fault string // as B3
	What  string // what made it crash
}

// Error says what made the manager crash.
func (e *CrashError) Error() string {
	return fmt.Sprintf("the kubelet crashes here (%s): %s", e.Fault, e.What)
}
