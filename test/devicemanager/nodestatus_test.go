package devicemanager

import (
	"strings"
	"testing"
	_ "unsafe" // for go:linkname

	cadvisor "github.com/google/cadvisor/lib/model"
	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"
	kubeletcadvisor "k8s.io/kubernetes/pkg/kubelet/cadvisor"
	_ "k8s.io/kubernetes/pkg/kubelet/cm" // which has evictionReservation
	"k8s.io/kubernetes/pkg/kubelet/eviction"
	evictionapi "k8s.io/kubernetes/pkg/kubelet/eviction/api"
	kubeletstatus "k8s.io/kubernetes/pkg/kubelet/nodestatus"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/nodestatus"
	"gpu-cdi-plugin/test/lib/testenv"
)

// evictionReservation is what the kubelet reserves for its hard eviction thresholds.
//
//go:linkname evictionReservation k8s.io/kubernetes/pkg/kubelet/cm.hardEvictionReservation
func evictionReservation(thresholds []evictionapi.Threshold, capacity v1.ResourceList) v1.ResourceList

// TestNodeStatusIsTheKubelets compares the capacity and the allocatable amounts with those of the kubelet's setter, for
// the same machines, reservations and devices.
func TestNodeStatusIsTheKubelets(t *testing.T) {
	machines := map[string]nodestatus.Machine{
		"a small one": {CPUs: 2, Memory: 8294277120, EphemeralStorage: 20 << 30},
		"a large one": {
			CPUs:             224,
			Memory:           2164129374208,
			EphemeralStorage: 1967317618688,
			HugePages:        map[int64]int64{2 << 20: 1024, 1 << 30: 16, 64 << 10: 0},
		},
		"odd sizes": {CPUs: 1000, Memory: 1001, EphemeralStorage: 3333},
		"only huge pages": {
			CPUs:             4,
			Memory:           4 << 30,
			EphemeralStorage: 1 << 40,
			HugePages:        map[int64]int64{1 << 30: 4},
		},
		"nothing": {},
	}
	reservations := map[string]struct{ system, kube, eviction []string }{
		"nothing": {},
		"defaults": {
			nil,
			nil,
			[]string{"memory.available<100Mi", "nodefs.available<10%", "nodefs.inodesFree<5%", "imagefs.available<15%"},
		},
		"quantities": {
			[]string{"cpu=500m", "memory=1Gi", "ephemeral-storage=1G"},
			[]string{"cpu=0.25", "memory=1.5Gi", "pid=1k"},
			[]string{"memory.available<1e6", "nodefs.available<1500M"},
		},
		"percentages": {
			[]string{"memory=500Mi"},
			nil,
			[]string{"memory.available<7.5%", "nodefs.available<33.3%"},
		},
		"ignored": {nil, nil, []string{"memory.available<0%", "nodefs.available<100%", "pid.available<10%"}},
		"tiny parts": {
			[]string{"cpu=1u", "memory=100m"},
			[]string{"cpu=1n"},
			[]string{"memory.available<0.001%"},
		},
		"more than it has": {
			[]string{"cpu=2k", "memory=9Ti"},
			[]string{"ephemeral-storage=9Ti"},
			[]string{"memory.available<9Ti"},
		},
	}
	limits := map[string]struct{ maxPods, perCore int }{
		"the default": {110, 0}, "few per core": {250, 3}, "many per core": {110, 1000},
	}
	devices := map[string]manager.Count{
		"nvidia.com/gpu": {
			Capacity:    8,
			Allocatable: 7,
		}, "a.b/gone": {}, "a.b/away": {Capacity: 4}, "a.b/many": {Capacity: 10000, Allocatable: 9999},
	}
	for machineName, m := range machines {
		for reservedName, r := range reservations {
			for limitName, l := range limits {
				t.Run(machineName+", "+reservedName+", "+limitName, func(t *testing.T) {
					reserved, err := nodestatus.ParseReserved(r.system, r.kube, r.eviction)
					testenv.Must(t, err)
					want := kubeletStatus(t, m, l.maxPods, l.perCore, r.system, r.kube, r.eviction, devices)
					pods := nodestatus.Pods(m, l.maxPods, l.perCore)
					if diff := cmp.Diff(want, nodestatus.Compute(m, reserved, pods, devices)); diff != "" {
						t.Errorf("-kubelet +ours:\n%s", diff)
					}
				})
			}
		}
	}
}

// kubeletStatus is the status by the kubelet's own functions, but the sum of the reservations: that is a method of its
// container manager, which needs a machine with control groups.
func kubeletStatus(
	t *testing.T, m nodestatus.Machine, maxPods, podsPerCore int, system, kube, hard []string,
	devices map[string]manager.Count,
) nodestatus.Status {
	t.Helper()
	info := &cadvisor.MachineInfo{NumCores: m.CPUs, MemoryCapacity: uint64(m.Memory)}
	for size, n := range m.HugePages {
		info.HugePages = append(
			info.HugePages,
			cadvisor.HugePagesInfo{PageSize: uint64(size) >> 10, NumPages: uint64(n)},
		)
	}
	capacity := kubeletcadvisor.CapacityFromMachineInfo(info)
	capacity[v1.ResourceEphemeralStorage] = *resource.NewQuantity(m.EphemeralStorage, resource.BinarySI)
	thresholds, err := eviction.ParseThresholdConfig(nil, pairs(hard, "<"), nil, nil, nil)
	testenv.Must(t, err)
	forEviction := evictionReservation(thresholds, capacity)
	reservation := func() v1.ResourceList {
		sums := v1.ResourceList{}
		for name := range capacity {
			sum := resource.NewQuantity(0, resource.DecimalSI)
			for _, items := range [][]string{system, kube} {
				if text, ok := pairs(items, "=")[string(name)]; ok {
					sum.Add(resource.MustParse(text))
				}
			}
			sum.Add(forEviction[name])
			sums[name] = *sum
		}
		return sums
	}
	counts := func(klog.Logger) (v1.ResourceList, v1.ResourceList, []string) {
		all, healthy, removed := v1.ResourceList{}, v1.ResourceList{}, []string{}
		for name, c := range devices {
			if c == (manager.Count{}) {
				removed = append(removed, name)
				continue
			}
			all[v1.ResourceName(name)] = *resource.NewQuantity(int64(c.Capacity), resource.DecimalSI)
			healthy[v1.ResourceName(name)] = *resource.NewQuantity(int64(c.Allocatable), resource.DecimalSI)
		}
		return all, healthy, removed
	}
	set := kubeletstatus.MachineInfo("node", maxPods, podsPerCore,
		func() (*cadvisor.MachineInfo, error) { return info, nil },
		func(klog.Logger, bool) v1.ResourceList { return capacity }, counts, reservation,
		func(string, string, string) {}, func() *bool { return nil }, true)
	node := &v1.Node{}
	testenv.Must(t, set(t.Context(), node))
	return nodestatus.Status{Capacity: texts(node.Status.Capacity), Allocatable: texts(node.Status.Allocatable)}
}

// texts are quantities as the API has them.
func texts(list v1.ResourceList) map[string]string {
	all := map[string]string{}
	for name, q := range list {
		all[string(name)] = q.String()
	}
	return all
}

func pairs(items []string, separator string) map[string]string {
	all := map[string]string{}
	for _, item := range items {
		name, value, _ := strings.Cut(item, separator)
		all[name] = value
	}
	return all
}
