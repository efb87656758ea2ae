package endpoint

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/model"
)

const (
	maxUsualID = 63      // bytes; the API allows no longer ID, so longer ones are reported
	maxID      = 1 << 10 // bytes; longer IDs are refused, since placements store IDs (the kubelet has no limit)
	maxNode    = 63      // the highest NUMA node; Topology Managers have no more, and each placement stores its nodes
)

// checkIDs returns an error if an ID is too long.
func checkIDs(list []*v1beta1.Device) error {
	for _, d := range list {
		if id := d.GetID(); len(id) > maxID {
			return fmt.Errorf("a device ID has %d bytes, more than the maximum of %d: %.80q", len(id), maxID, id)
		}
	}
	return nil
}

// normalise converts a list to devices sorted by ID, each ID once. If a device is listed several times, it has the
// NUMA nodes of all entries, and is healthy only if all entries are. normalise also returns what is wrong with the
// list, or "": like the kubelet it accepts faulty lists, but it drops NUMA nodes above maxNode.
func normalise(list []*v1beta1.Device) ([]model.Device, string) {
	devices := make([]model.Device, len(list))
	var unusual, duplicate, distant faults
	for i, d := range list {
		nodes, all := numaNodes(d.GetTopology())
		devices[i] = model.Device{ID: d.GetID(), Healthy: d.GetHealth() == v1beta1.Healthy, NUMA: nodes}
		if id := d.GetID(); id == "" || len(id) > maxUsualID || strings.ContainsFunc(id, unprintable) {
			unusual.add(id)
		}
		if !all {
			distant.add(d.GetID())
		}
	}
	slices.SortStableFunc(devices, func(a, b model.Device) int { return cmp.Compare(a.ID, b.ID) })
	unique := devices[:0]
	for _, d := range devices {
		if n := len(unique); n > 0 && unique[n-1].ID == d.ID {
			duplicate.add(d.ID)
			unique[n-1] = merge(unique[n-1], d)
			continue
		}
		unique = append(unique, d)
	}
	var problems []string
	if duplicate.n > 0 {
		problems = append(problems, fmt.Sprintf("%d device IDs are duplicates, such as %q", duplicate.n, duplicate.first))
	}
	if unusual.n > 0 {
		problems = append(problems, fmt.Sprintf("%d device IDs are empty, longer than %d bytes or not printable, "+
			"such as %.80q",
			unusual.n, maxUsualID, unusual.first))
	}
	if distant.n > 0 {
		problems = append(problems, fmt.Sprintf("%d devices have NUMA nodes above %d, which are ignored, such as %.80q",
			distant.n, maxNode, distant.first))
	}
	return slices.Clip(unique), strings.Join(problems, "; ")
}

// faults has the IDs of devices with the same fault.
type faults struct {
	n     int
	first string
}

func (f *faults) add(id string) {
	if f.n == 0 {
		f.first = id
	}
	f.n++
}

func unprintable(r rune) bool { return r <= ' ' || r > '~' }

func merge(a, b model.Device) model.Device {
	a.Healthy = a.Healthy && b.Healthy
	if a.NUMA == nil {
		a.NUMA = b.NUMA
	} else {
		a.NUMA = ascending(append(a.NUMA, b.NUMA...))
	}
	return a
}

// numaNodes returns the NUMA nodes of a topology up to maxNode, ascending, or nil if there is no topology. `all` is
// false if the topology has a higher node. Negative numbers mean no node and are left out.
func numaNodes(t *v1beta1.TopologyInfo) (nodes []int, all bool) {
	if t == nil {
		return nil, true
	}
	nodes, all = []int{}, true
	for _, n := range t.GetNodes() {
		switch id := n.GetID(); {
		case id > maxNode:
			all = false
		case id >= 0:
			nodes = append(nodes, int(id))
		}
	}
	return ascending(nodes), all
}

// ascending returns the nodes in ascending order, without duplicates.
func ascending(nodes []int) []int {
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// unhealthy returns copies of the devices that are not healthy.
func unhealthy(devices []model.Device) []model.Device {
	all := slices.Clone(devices)
	for i := range all {
		all[i].Healthy = false
	}
	return all
}

func equal(a, b []model.Device) bool {
	return slices.EqualFunc(a, b, func(a, b model.Device) bool {
		return a.ID == b.ID && a.Healthy == b.Healthy &&
			(a.NUMA == nil) == (b.NUMA == nil) && slices.Equal(a.NUMA, b.NUMA)
	})
}
