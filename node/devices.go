package node

import (
	"slices"

	"gpu-cdi-plugin/resource"
)

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
