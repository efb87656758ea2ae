package node

import (
	"slices"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
)

// remember gives GPUs that no longer say who they are the names that they had: a GPU that has fallen off the bus does
// not even answer with its UUID, and it is that one which is unhealthy, not one that is gone.
func remember(before, now *gpu.Snapshot) *gpu.Snapshot {
	if before == nil {
		return now
	}
	kept := *now
	kept.Devices = slices.Clone(now.Devices)
	for i := range kept.Devices {
		d := &kept.Devices[i]
		if d.Usable() {
			continue
		}
		if old := earlier(before, now, d); old != nil {
			restored := *old
			restored.Index, restored.Error = d.Index, d.Error
			*d = restored
		}
	}
	return &kept
}

// earlier is what was known of a GPU that cannot be read: by its UUID or its address, or by its index where it says
// neither and no other GPU is the one that had it.
func earlier(before, now *gpu.Snapshot, d *gpu.Device) *gpu.Device {
	find := func(same func(*gpu.Device) bool) *gpu.Device {
		for i := range before.Devices {
			if same(&before.Devices[i]) {
				return &before.Devices[i]
			}
		}
		return nil
	}
	switch {
	case d.UUID != "":
		return find(func(o *gpu.Device) bool { return o.UUID == d.UUID })
	case d.PCIBusID != "":
		return find(func(o *gpu.Device) bool { return o.PCIBusID == d.PCIBusID })
	}
	old := find(func(o *gpu.Device) bool { return o.Index == d.Index })
	if old == nil || slices.ContainsFunc(now.Devices, func(n gpu.Device) bool { return n.UUID == old.UUID }) {
		return nil
	}
	return old
}

// known are the resources with only those devices that were listed before, and those not healthier than before.
func known(next, before []resource.Resource) []resource.Resource {
	listed := map[[2]string]resource.Device{}
	for _, r := range before {
		for _, d := range r.Devices {
			listed[[2]string{r.Name, d.ID}] = d
		}
	}
	list := slices.Clone(next)
	for i := range list {
		r := &list[i]
		devices := r.Devices
		r.Devices = []resource.Device{}
		for _, d := range devices {
			old, ok := listed[[2]string{r.Name, d.ID}]
			if ok && d.Healthy && !old.Healthy {
				d.Healthy, d.Reason = false, old.Reason
			}
			if ok {
				r.Devices = append(r.Devices, d)
			}
		}
	}
	return list
}

// unhealthy are the resources with those healthy devices marked for which reason has one.
func unhealthy(resources []resource.Resource, reason func(*resource.Device) string) []resource.Resource {
	list := slices.Clone(resources)
	for i := range list {
		list[i].Devices = slices.Clone(list[i].Devices)
		for j := range list[i].Devices {
			d := &list[i].Devices[j]
			if !d.Healthy {
				continue
			}
			if why := reason(d); why != "" {
				d.Healthy, d.Reason = false, why
			}
		}
	}
	return list
}
