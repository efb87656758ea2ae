package devicemanager

import (
	"fmt"
	"math/rand/v2"
	"testing"

	cadvisor "github.com/google/cadvisor/lib/model"
	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager/bitmask"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"

	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

// largeNode returns 128 devices on so many NUMA nodes of the kubelet's machine, and the pool with them.
func largeNode(tb testing.TB, numa int) (*node, *admission.Pool) {
	tb.Helper()
	const name = "example.com/a"
	n := newNode(tb, numa, admission.PolicyBestEffort, admission.ScopeContainer, nil)
	r := model.Resource{Name: name, Connected: true}
	for i := range 128 {
		r.Devices = append(
			r.Devices,
			model.Device{ID: fmt.Sprintf("%03d", i), Healthy: true, NUMA: []int{i * numa / 128}},
		)
	}
	n.connect(tb, name, false)
	n.list(r)
	pool := admission.NewPool(name)
	pool.Set(r)
	return n, pool
}

// BenchmarkTopologyHints is P10 of the targets: 128 devices on 16 NUMA nodes, of which a container requests 20.
func BenchmarkTopologyHints(b *testing.B) {
	for _, numa := range []int{2, 8, 12, 16} {
		n, pool := largeNode(b, numa)
		pod := Pod("pod", "example.com/a", 20)
		topology := admission.Topology{Policy: admission.PolicyBestEffort, Machine: 1<<numa - 1}
		hints := func() []admission.Hint {
			hints, err := pool.Hints(topology, admission.Request{Count: 20})
			testenv.Must(b, err)
			return hints
		}
		kubelets := func() map[string][]topologymanager.TopologyHint {
			return n.ManagerImpl.GetTopologyHints(
				klog.Background(), pod, &pod.Spec.Containers[0], lifecycle.AddOperation)
		}
		if diff := cmp.Diff(fromKubelet(kubelets()["example.com/a"]), hints()); diff != "" {
			b.Fatalf("hints (-kubelet +ours):\n%s", diff)
		}
		b.Run(fmt.Sprintf("nodes=%d/of=kubelet", numa), func(b *testing.B) {
			for b.Loop() {
				kubelets()
			}
		})
		b.Run(fmt.Sprintf("nodes=%d/of=admission", numa), func(b *testing.B) {
			for b.Loop() {
				hints()
			}
		})
	}
}

// TestMergeIsThatOfTheKubelet merges random hints, of machines as there are none too.
func TestMergeIsThatOfTheKubelet(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	outcomes := map[string]int{}
	klog.SetLogger(klog.Logger{}) // discards
	for range 4000 {
		numa := 1 + random.IntN(6)
		resources := make([][]admission.Hint, random.IntN(4))
		for i := range resources {
			resources[i] = randomHints(random, numa)
		}
		for _, policy := range []admission.Policy{
			admission.PolicyNone, admission.PolicyBestEffort, admission.PolicyRestricted, admission.PolicySingleNUMANode,
		} {
			topology := admission.Topology{Policy: policy, Machine: 1<<numa - 1}
			got, err := topology.Merge(resources)
			want, admitted := kubeletMerge(t, policy, numa, resources)
			if (err == nil) != admitted || admitted && got != want {
				t.Fatalf("%s: we merge %v on %d nodes to %b, %v; the kubelet to %b, %v",
					policy, resources, numa, got, err, want, admitted)
			}
			outcomes[fmt.Sprint(policy, " ", admitted)]++
		}
	}
	t.Log(outcomes)
	for _, policy := range []admission.Policy{admission.PolicyRestricted, admission.PolicySingleNUMANode} {
		if outcomes[fmt.Sprint(policy, " true")] < 500 || outcomes[fmt.Sprint(policy, " false")] < 500 {
			t.Error("the hints are too alike")
		}
	}
}

// randomHints makes hints that mean that any nodes will do, that none will, or some.
func randomHints(random *rand.Rand, numa int) []admission.Hint {
	switch random.IntN(12) {
	case 0:
		return nil
	case 1:
		return []admission.Hint{}
	}
	var hints []admission.Hint
	// The kubelet looks at all combinations.
	for _, nodes := range random.Perm(1 << numa)[:1+random.IntN(min(1<<numa, 10))] {
		if nodes != 0 {
			hints = append(hints, admission.Hint{Nodes: admission.Nodes(nodes), Preferred: random.IntN(3) == 0})
		}
	}
	return hints
}

func kubeletMerge(
	t *testing.T, policy admission.Policy, numa int, resources [][]admission.Hint,
) (admission.Nodes, bool) {
	t.Helper()
	hints := map[string][]topologymanager.TopologyHint{}
	for i, r := range resources {
		name := fmt.Sprint(i)
		if hints[name] = nil; r != nil {
			hints[name] = []topologymanager.TopologyHint{}
		}
		for _, h := range r {
			mask, err := bitmask.NewBitMask(h.Nodes.IDs()...)
			testenv.Must(t, err)
			hints[name] = append(
				hints[name],
				topologymanager.TopologyHint{NUMANodeAffinity: mask, Preferred: h.Preferred},
			)
		}
	}
	var nodes []cadvisor.Node
	for id := range numa {
		nodes = append(nodes, cadvisor.Node{Id: id})
	}
	options := topologymanager.PolicyOptions{}
	info, err := topologymanager.NewNUMAInfo(nodes, options)
	testenv.Must(t, err)
	merger := topologymanager.NewNonePolicy()
	switch policy {
	case admission.PolicyBestEffort:
		merger = topologymanager.NewBestEffortPolicy(info, options)
	case admission.PolicyRestricted:
		merger = topologymanager.NewRestrictedPolicy(info, options)
	case admission.PolicySingleNUMANode:
		merger = topologymanager.NewSingleNumaNodePolicy(info, options)
	}
	best, admitted := merger.Merge(klog.Background(), []map[string][]topologymanager.TopologyHint{hints})
	if best.NUMANodeAffinity == nil {
		return 0, admitted
	}
	return admission.NodesOf(best.NUMANodeAffinity.GetBits()...), admitted
}
