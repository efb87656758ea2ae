package endpoint

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/model"
)

// maxID is the longest ID that is not reported, in bytes.
const maxID = 63

// normalise converts a list to devices that are sorted by ID, each ID once. A device that is listed several times is
// healthy only if it is each time, and has the NUMA nodes of all. It also says what is wrong with the list, or returns
// the empty string: the kubelet accepts all of it.
func normalise(list []*v1beta1.Device) ([]model.Device, string) {
	devices := make([]model.Device, len(list))
	var unusual, duplicate faults
	for i, d := range list {
		devices[i] = model.Device{ID: d.GetID(), Healthy: d.GetHealth() == v1beta1.Healthy, NUMA: numaNodes(d.GetTopology())}
		if id := d.GetID(); id == "" || len(id) > maxID || strings.ContainsFunc(id, unprintable) {
			unusual.add(id)
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
	if duplicate.n > 0 { // once: a list can have a device a million times
		for i, d := range unique {
			slices.Sort(d.NUMA)
			unique[i].NUMA = slices.Compact(d.NUMA)
		}
	}
	var problems []string
	if duplicate.n > 0 {
		problems = append(problems, fmt.Sprintf("%d device IDs are there already, as %q", duplicate.n, duplicate.first))
	}
	if unusual.n > 0 {
		problems = append(problems, fmt.Sprintf("%d device IDs are empty, longer than %d bytes or not printable, as %.80q",
			unusual.n, maxID, unusual.first))
	}
	return slices.Clip(unique), strings.Join(problems, "; ")
}

// faults are IDs with the same fault.
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

// merge leaves the NUMA nodes of both in any order.
func merge(a, b model.Device) model.Device {
	a.Healthy = a.Healthy && b.Healthy
	if a.NUMA == nil {
		a.NUMA = b.NUMA
	} else {
		a.NUMA = append(a.NUMA, b.NUMA...)
	}
	return a
}

// numaNodes returns the NUMA nodes of a topology, ascending, and nil for none. Negative ones mean no node.
func numaNodes(t *v1beta1.TopologyInfo) []int {
	if t == nil {
		return nil
	}
	nodes := make([]int, 0, len(t.GetNodes()))
	for _, n := range t.GetNodes() {
		if n.GetID() >= 0 {
			nodes = append(nodes, int(n.GetID()))
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// unhealthy returns the devices, none of them healthy.
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
