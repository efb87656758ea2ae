package gpu

import (
	"fmt"
	"strconv"
)

// Allocatable is a device that a container can get: a whole GPU, or a MIG device of a GPU in MIG mode.
type Allocatable struct {
	// GPU is the whole GPU, or the GPU to which the MIG device belongs.
	GPU *Device
	// MIG is nil for a whole GPU.
	MIG *MIGDevice
	// Reason says why no container can get the device; it is the end of a sentence that begins with the label. It is
	// empty if containers can get the device.
	Reason string
}

// Allocatables returns the devices of a GPU that containers can get: the GPU or, in MIG mode, its MIG devices. If a
// GPU in MIG mode has no MIG devices, the list has the GPU itself, with that reason.
func (d *Device) Allocatables() []Allocatable {
	reason := ""
	switch {
	case !d.Usable():
		reason = "cannot be read: " + d.Error
	case d.MIGEnabled && len(d.MIG) == 0:
		reason = "is in MIG mode and has no MIG device"
	case d.Minor == NoMinor:
		reason = "has a device node whose minor number is unknown"
	}
	if !d.MIGEnabled || len(d.MIG) == 0 {
		return []Allocatable{{GPU: d, Reason: reason}}
	}
	var list []Allocatable
	for i := range d.MIG {
		a := Allocatable{GPU: d, MIG: &d.MIG[i], Reason: reason}
		if reason == "" && (a.MIG.GPUInstanceCap == NoMinor || a.MIG.ComputeInstanceCap == NoMinor) {
			a.Reason = "has device nodes in /dev/nvidia-caps whose minor numbers are unknown"
		}
		list = append(list, a)
	}
	return list
}

// UUID returns the UUID of the GPU or of the MIG device. It is empty for a GPU whose UUID is unknown.
func (a *Allocatable) UUID() string {
	if a.MIG != nil {
		return a.MIG.UUID
	}
	return a.GPU.UUID
}

// IndexName returns the index of the device: "3", or "0:1" for a MIG device.
func (a *Allocatable) IndexName() string {
	if a.MIG != nil {
		return fmt.Sprintf("%d:%d", a.GPU.Index, a.MIG.Index)
	}
	return strconv.Itoa(a.GPU.Index)
}

// Label returns the device's name for people: "GPU 3", or "MIG device 0:1 (1g.10gb)".
func (a *Allocatable) Label() string {
	if a.MIG != nil {
		return fmt.Sprintf("MIG device %s (%s)", a.IndexName(), a.MIG.Profile)
	}
	return "GPU " + a.IndexName()
}
