package kubeapi

import (
	"fmt"
	"slices"

	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// device is a GPU or a MIG device with its health.
type device struct {
	health.Status
	name string // such as "GPU 3"
	mig  bool
	// asGPU means that this is a MIG device with the same health as its GPU, which is listed before it.
	asGPU bool
}

// sentence describes the device's health.
func (d *device) sentence() string { return d.name + " is " + d.String() }

// devicesOf returns the devices of a state in the driver's order. If the UUID of a GPU is unknown, it is empty.
func devicesOf(s *node.State) []device {
	if s.Snapshot == nil {
		return nil
	}
	var list []device
	for i := range s.Snapshot.Devices {
		g := &s.Snapshot.Devices[i]
		one := device{name: fmt.Sprintf("GPU %d", g.Index)}
		status, known := s.Health[g.UUID]
		switch {
		case known:
			one.Status = status
		case g.Usable():
			continue
		default:
			one.Status = health.Status{State: health.Unhealthy, Reason: "it cannot be read", Remedy: health.None}
		}
		list = append(list, one)
		for j := range g.MIG {
			m := &g.MIG[j]
			if status, known := s.Health[m.UUID]; known {
				list = append(list, device{
					Status: status, name: fmt.Sprintf("MIG device %d:%d", g.Index, m.Index),
					mig: true, asGPU: status.String() == one.String(),
				})
			}
		}
	}
	return list
}

// offersAny reports whether containers can get a device.
func offersAny(resources []resource.Resource) bool {
	return slices.ContainsFunc(resources, func(r resource.Resource) bool {
		return slices.ContainsFunc(r.Devices, func(d resource.Device) bool { return d.Healthy })
	})
}

// eventSince returns the Event for what has changed since the last reported status, if there is one. Suspect and
// recovering devices get none: within seconds they become healthy or unhealthy, which is reported then.
func (d *device) eventSince(before health.Status) (e event, changed bool) {
	switch {
	case d.State == before.State && d.String() == before.String():
		return event{}, false
	case d.State == health.Cordoned:
		return event{normal, "GPUCordoned", d.sentence()}, true
	case before.State == health.Cordoned:
		e = event{normal, "GPUUncordoned", d.name + " is not cordoned any more: it is " + d.String()}
		if d.State == health.Unhealthy {
			e.kind = warning
		}
		return e, true
	case d.State == health.Unhealthy && before.State == health.Unhealthy && d.Reason == health.NotAnswering:
		return event{}, false // for a moment while its library is opened again
	case d.State == health.Unhealthy:
		return event{warning, "GPUUnhealthy", d.sentence()}, true
	case d.State == health.Healthy:
		return event{normal, "GPUHealthy", d.name + " is healthy again"}, true
	default:
		return event{}, false
	}
}

// lastReported has the last reported status of each device, by UUID. GPUs with unknown UUIDs share an entry, since
// none of them can be read.
type lastReported map[string]health.Status

// events returns the Events for the changes since the last call. A new device gets none. A MIG device gets none if its
// GPU has the same Event.
func (l lastReported) events(devices []device) []event {
	var list []event
	ofGPU := false // whether the last GPU has an event
	there := map[string]bool{}
	for i := range devices {
		d := &devices[i]
		there[d.UUID] = true
		before, known := l[d.UUID]
		if !known {
			l[d.UUID] = d.Status
			before = d.Status
		}
		e, changed := d.eventSince(before)
		if changed {
			l[d.UUID] = d.Status
		}
		if changed && (!d.asGPU || !ofGPU) {
			list = append(list, e)
		}
		if !d.mig {
			ofGPU = changed
		}
	}
	for uuid := range l {
		if !there[uuid] {
			delete(l, uuid)
		}
	}
	return list
}
