package node

import (
	"slices"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
)

// withLastNames gives unreadable GPUs the UUIDs and other properties that they had: a GPU that has fallen off the bus
// does not even return its UUID, and would otherwise look like one that was removed.
func withLastNames(before, now *gpu.Snapshot) *gpu.Snapshot {
	if before == nil {
		return now
	}
	named := *now
	named.Devices = slices.Clone(now.Devices)
	for i := range named.Devices {
		d := &named.Devices[i]
		if d.Usable() {
			continue
		}
		if last := lastSeen(before, now, d); last != nil {
			index, err := d.Index, d.Error
			*d = *last
			d.Index, d.Error = index, err
		}
	}
	return &named
}

// lastSeen finds an unreadable GPU in the snapshot before: by its UUID or its PCI address, or by its index if both are
// unknown and no other GPU has the UUID of the one that had that index.
func lastSeen(before, now *gpu.Snapshot, d *gpu.Device) *gpu.Device {
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

// onlyPublished returns the resources with those devices that were published before, none of them healthier than
// before.
func onlyPublished(next, before []resource.Resource) []resource.Resource {
	published := map[[2]string]resource.Device{}
	for _, r := range before {
		for _, d := range r.Devices {
			published[[2]string{r.Name, d.ID}] = d
		}
	}
	list := slices.Clone(next)
	for i := range list {
		r := &list[i]
		devices := r.Devices
		r.Devices = []resource.Device{}
		for _, d := range devices {
			old, ok := published[[2]string{r.Name, d.ID}]
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

// countHealthy counts the healthy devices, the replicas of one device once.
func countHealthy(resources []resource.Resource) int {
	uuids := map[string]bool{}
	for _, r := range resources {
		for j := range r.Devices {
			if r.Devices[j].Healthy {
				uuids[r.Devices[j].UUID] = true
			}
		}
	}
	return len(uuids)
}
