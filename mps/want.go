package mps

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"gpu-cdi-plugin/resource"
)

// Want is the control daemon that a GPU should have.
type Want struct {
	// UUID is the GPU's.
	UUID string
	// Limits are those of each client.
	Limits resource.MPSLimits
	// Hold tells that the GPU cannot be used now: a daemon that runs goes on, and none is started.
	Hold bool
}

// Wants are the daemons that resources need, by UUID.
func Wants(resources []resource.Resource) []Want {
	all := map[string]Want{}
	for i := range resources {
		for j := range resources[i].Devices {
			if d := &resources[i].Devices[j]; d.MPS != nil {
				all[d.UUID] = Want{UUID: d.UUID, Limits: *d.MPS, Hold: !d.Healthy}
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b Want) int { return strings.Compare(a.UUID, b.UUID) })
}

// Judge returns the resources in which those devices are unhealthy whose daemon does not answer or has other limits, and
// those that are not shared by MPS and whose GPU is so still.
func (k *Keeper) Judge(resources []resource.Resource) []resource.Resource {
	list := slices.Clone(resources)
	for i := range list {
		list[i].Devices = slices.Clone(list[i].Devices)
		for j := range list[i].Devices {
			d := &list[i].Devices[j]
			if !d.Healthy {
				continue
			}
			if why := k.against(d); why != "" {
				d.Healthy, d.Reason = false, why
			}
		}
	}
	return list
}

// against says why a device cannot be used, or nothing.
func (k *Keeper) against(d *resource.Device) string {
	if d.MPS != nil {
		return k.Problem(d.UUID, *d.MPS)
	}
	return k.Occupied(d.Parent)
}

// mebibytes is the limit of memory in the unit that the daemon takes.
func mebibytes(l resource.MPSLimits) uint64 { return l.MemoryBytes >> 20 }

// inWords are limits for a log.
func inWords(l resource.MPSLimits) string {
	text := fmt.Sprintf("%d MiB", mebibytes(l))
	if l.ThreadPercent > 0 {
		text += fmt.Sprintf(", %d%% of the threads", l.ThreadPercent)
	}
	return text
}
