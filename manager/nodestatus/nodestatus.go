// Package nodestatus computes a node's capacity and allocatable resources as the kubelet reports them in the status of
// a Node: cpu, memory, huge pages, ephemeral storage, pods and the resources of device plugins. Everything except
// ReadMachine is pure.
package nodestatus

import (
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/quantity"
)

// Status is the part of a v1.NodeStatus about resources. The values are quantities.
type Status struct {
	Capacity    map[string]string `json:"capacity"`
	Allocatable map[string]string `json:"allocatable"`
}

const (
	cpu              = "cpu"
	memory           = "memory"
	ephemeralStorage = "ephemeral-storage"
	pods             = "pods"
)

// Pods returns how many pods a machine can have. If podsPerCore is not 0, it limits the number too.
func Pods(m Machine, maxPods, podsPerCore int) int {
	if podsPerCore > 0 {
		return min(maxPods, podsPerCore*m.CPUs)
	}
	return maxPods
}

// Compute returns the status of a node from its machine, the reservations, the number of pods that it can have, and the
// devices of plugins by resource. A resource whose plugin is gone for good stays, with 0 devices: if it were missing,
// the scheduler would not limit it.
func Compute(m Machine, r Reserved, maxPods int, devices map[string]manager.Count) Status {
	capacity := map[string]quantity.Quantity{
		cpu:              quantity.New(int64(m.CPUs), quantity.Decimal),
		memory:           quantity.New(m.Memory, quantity.Binary),
		ephemeralStorage: quantity.New(m.EphemeralStorage, quantity.Binary),
		pods:             quantity.New(int64(maxPods), quantity.Decimal),
	}
	inHugePages := quantity.Quantity{}
	for size, n := range m.HugePages {
		q := quantity.New(size*n, quantity.Binary)
		inHugePages = inHugePages.Add(q)
		capacity["hugepages-"+quantity.New(size, quantity.Binary).String()] = q
	}
	allocatable := map[string]quantity.Quantity{}
	for name, q := range capacity {
		allocatable[name] = less(q, r.of(name, q))
	}
	allocatable[memory] = less(allocatable[memory], inHugePages)
	s := Status{Capacity: texts(capacity), Allocatable: texts(allocatable)}
	for name, count := range devices {
		s.Capacity[name] = quantity.New(int64(count.Capacity), quantity.Decimal).String()
		s.Allocatable[name] = quantity.New(int64(count.Allocatable), quantity.Decimal).String()
	}
	return s
}

// of returns how much is reserved of a resource with this capacity.
func (r Reserved) of(name string, capacity quantity.Quantity) quantity.Quantity {
	amount, eviction := r.amounts[name], r.eviction[name]
	if eviction.part > 0 {
		n, _ := capacity.Whole()
		return amount.Add(quantity.New(int64(float64(n)*float64(eviction.part)), quantity.Binary))
	}
	return amount.Add(eviction.quantity)
}

// less returns q - r, but at least 0.
func less(q, r quantity.Quantity) quantity.Quantity {
	if q = q.Sub(r); q.Sign() < 0 {
		return quantity.Quantity{}
	}
	return q
}

func texts(quantities map[string]quantity.Quantity) map[string]string {
	all := map[string]string{}
	for name, q := range quantities {
		all[name] = q.String()
	}
	return all
}
