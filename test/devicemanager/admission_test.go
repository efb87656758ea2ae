package devicemanager

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	cadvisor "github.com/google/cadvisor/lib/model"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"

	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

// node is the kubelet's device manager and Topology Manager on a machine, with plugins that are called directly. It
// notes what the plugins are asked and which hints the device manager gives.
type node struct {
	*devicemanager.ManagerImpl
	topology topologymanager.Manager
	pods     []*v1.Pod
	random   *rand.Rand
	seen     []step // of the pod that is admitted
}

// step is what the kubelet does for a container, or for a pod in the scope of pods.
type step struct {
	hints    map[string][]topologymanager.TopologyHint
	affinity topologymanager.TopologyHint
	asked    map[string]*pluginapi.ContainerPreferredAllocationRequest // by resource, as the others
	answered map[string][]string
	given    map[string][]string
}

func newNode(tb testing.TB, numa int, policy admission.Policy, scope admission.Scope, random *rand.Rand) *node {
	tb.Helper()
	klog.SetLogger(klog.Logger{}) // discards
	var nodes []cadvisor.Node
	for id := range numa {
		nodes = append(nodes, cadvisor.Node{Id: id})
	}
	limit := map[string]string{topologymanager.MaxAllowableNUMANodes: "64"}
	topology, err := topologymanager.NewManager(klog.Background(), nodes, string(policy), string(scope), limit)
	testenv.Must(tb, err)
	n := &node{topology: topology, random: random}
	n.ManagerImpl, err = newManager(klog.Background(), filepath.Join(tb.TempDir(), "kubelet.sock"), nodes, topology)
	testenv.Must(tb, err)
	topology.AddHintProvider(klog.Background(), n)
	active := func() []*v1.Pod { return n.pods }
	sources := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	err = n.Start(klog.Background(), active, sources, containermap.NewContainerMap(), sets.New[string]())
	testenv.Must(tb, err)
	tb.Cleanup(func() {
		if err := n.Stop(klog.Background()); err != nil {
			tb.Error(err)
		}
	})
	return n
}

// GetTopologyHints notes the hints of a container, which begin its step.
func (n *node) GetTopologyHints(
	logger klog.Logger, p *v1.Pod, c *v1.Container, operation lifecycle.Operation,
) map[string][]topologymanager.TopologyHint {
	n.begin().hints = n.ManagerImpl.GetTopologyHints(logger, p, c, operation)
	return n.last().hints
}

// GetPodTopologyHints notes the hints of a pod.
func (n *node) GetPodTopologyHints(
	logger klog.Logger, p *v1.Pod, operation lifecycle.Operation,
) map[string][]topologymanager.TopologyHint {
	n.begin().hints = n.ManagerImpl.GetPodTopologyHints(logger, p, operation)
	return n.last().hints
}

// Allocate notes a container's affinity. Without hints for it, it has its step here.
func (n *node) Allocate(ctx context.Context, p *v1.Pod, c *v1.Container, operation lifecycle.Operation) error {
	if len(n.seen) == 0 || n.last().asked != nil {
		n.begin()
	}
	s := n.last()
	s.affinity = n.topology.GetAffinity(klog.Background(), string(p.UID), c.Name)
	s.asked = map[string]*pluginapi.ContainerPreferredAllocationRequest{}
	s.answered, s.given = map[string][]string{}, map[string][]string{}
	return n.ManagerImpl.Allocate(ctx, p, c, operation)
}

func (n *node) begin() *step {
	n.seen = append(n.seen, step{})
	return n.last()
}

func (n *node) last() *step { return &n.seen[len(n.seen)-1] }

// connect connects a plugin for a resource.
func (n *node) connect(tb testing.TB, name string, prefers bool) {
	tb.Helper()
	p := &directPlugin{node: n, resource: name, prefers: prefers}
	testenv.Must(tb, n.PluginConnected(tb.Context(), name, p))
}

// list is a plugin's ListAndWatch message.
func (n *node) list(r model.Resource) {
	var list pluginapi.ListAndWatchResponse
	for _, d := range r.Devices {
		listed := &pluginapi.Device{ID: d.ID, Health: pluginapi.Unhealthy}
		if d.Healthy {
			listed.Health = pluginapi.Healthy
		}
		if d.NUMA != nil {
			listed.Topology = &pluginapi.TopologyInfo{}
			for _, id := range d.NUMA {
				listed.Topology.Nodes = append(listed.Topology.Nodes, &pluginapi.NUMANode{ID: int64(id)})
			}
		}
		list.Devices = append(list.Devices, listed)
	}
	n.PluginListAndWatchReceiver(klog.Background(), r.Name, &list)
}

// directPlugin is a plugin without a connection.
type directPlugin struct {
	pluginapi.DevicePluginClient // the calls that are not made

	node     *node
	resource string
	prefers  bool
}

func (p *directPlugin) API() pluginapi.DevicePluginClient { return p }
func (p *directPlugin) Resource() string                  { return p.resource }
func (p *directPlugin) SocketPath() string                { return "" }

func (p *directPlugin) GetDevicePluginOptions(
	context.Context, *pluginapi.Empty, ...grpc.CallOption,
) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: p.prefers}, nil
}

// GetPreferredAllocation answers with some of the available devices and with one that there is not. It does not answer
// with more than the kubelet can take: which of them it takes would be random.
func (p *directPlugin) GetPreferredAllocation(
	_ context.Context, r *pluginapi.PreferredAllocationRequest, _ ...grpc.CallOption,
) (*pluginapi.PreferredAllocationResponse, error) {
	asked := r.ContainerRequests[0]
	answer := slices.DeleteFunc(sorted(asked.AvailableDeviceIDs), func(id string) bool {
		return slices.Contains(asked.MustIncludeDeviceIDs, id)
	})
	p.node.random.Shuffle(len(answer), func(i, j int) { answer[i], answer[j] = answer[j], answer[i] })
	needed := int(asked.AllocationSize) - len(asked.MustIncludeDeviceIDs)
	answer = append([]string{"unknown"}, answer[:p.node.random.IntN(needed+1)]...)
	s := p.node.last()
	s.asked[p.resource], s.answered[p.resource] = asked, answer
	return &pluginapi.PreferredAllocationResponse{
		ContainerResponses: []*pluginapi.ContainerPreferredAllocationResponse{{DeviceIDs: answer}},
	}, nil
}

func (p *directPlugin) Allocate(
	_ context.Context, r *pluginapi.AllocateRequest, _ ...grpc.CallOption,
) (*pluginapi.AllocateResponse, error) {
	p.node.last().given[p.resource] = r.ContainerRequests[0].DevicesIds
	return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{{}}}, nil
}

// comparison is the kubelet's admission of pods beside that of package admission, which gets the devices that the
// kubelet chose: its choice is random.
type comparison struct {
	*testing.T
	kubelet  *node
	topology admission.Topology
	pools    map[string]*admission.Pool
	lists    map[string]model.Resource
	prefers  map[string]bool
	placed   []model.Pod
}

// TestAdmissionIsThatOfTheKubelet admits random pods on random machines, and compares each step: hints, affinity, the
// parameters of GetPreferredAllocation, the choice and the rejection.
func TestAdmissionIsThatOfTheKubelet(t *testing.T) {
	policies := []admission.Policy{
		admission.PolicyNone, admission.PolicyBestEffort, admission.PolicyRestricted, admission.PolicySingleNUMANode,
	}
	count := map[string]int{}
	for seed := range uint64(80) {
		policy := policies[seed%4]
		scope := []admission.Scope{admission.ScopeContainer, admission.ScopePod}[seed/4%2]
		t.Run(fmt.Sprintf("seed %d, %s, %s", seed, policy, scope), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			numa := 1 + random.IntN(6)
			c := &comparison{
				T:        t,
				kubelet:  newNode(t, numa, policy, scope, random),
				topology: admission.Topology{Policy: policy, Scope: scope, Machine: 1<<numa - 1},
				pools:    map[string]*admission.Pool{}, lists: map[string]model.Resource{}, prefers: map[string]bool{},
			}
			for i := range 1 + random.IntN(3) {
				name := fmt.Sprintf("example.com/%c", 'a'+i)
				c.prefers[name], c.pools[name] = random.IntN(3) > 0, admission.NewPool(name)
				c.kubelet.connect(t, name, c.prefers[name])
				c.lists[name] = randomResource(random, name, numa)
			}
			for i := range 12 {
				c.change(random)
				p := randomPod(random, fmt.Sprint("pod-", i), slices.Sorted(maps.Keys(c.pools)))
				outcome := c.admit(p)
				if count[outcome]++; outcome == "admitted" || outcome == "asked" {
					c.placed = append(c.placed, p)
				} else {
					c.release(p)
				}
			}
		})
	}
	t.Log(count)
	for _, outcome := range []string{
		"admitted", "UnexpectedAdmissionError", "TopologyAffinityError", "asked",
	} {
		if count[outcome] < 20 {
			t.Errorf("%d pods were %s: the machines are too alike", count[outcome], outcome)
		}
	}
}

// randomResource makes devices near no, one or two NUMA nodes. Some are on a node that the machine does not have too.
func randomResource(random *rand.Rand, name string, numa int) model.Resource {
	r := model.Resource{Name: name, Connected: true}
	alike := random.IntN(4) == 0 // without any NUMA nodes
	for i := range 1 + random.IntN(24) {
		d := model.Device{ID: fmt.Sprintf("%s-%02d", name, i)}
		for range []int{1, 1, 1, 1, 2, 0}[random.IntN(6)] {
			d.NUMA = append(d.NUMA, random.IntN(numa))
		}
		if d.NUMA != nil && random.IntN(10) == 0 {
			d.NUMA = append(d.NUMA, numa)
		}
		if alike {
			d.NUMA = nil
		}
		slices.Sort(d.NUMA)
		d.NUMA = slices.Compact(d.NUMA)
		r.Devices = append(r.Devices, d)
	}
	return r
}

// randomPod makes a pod with up to two init containers, some of them sidecars, and up to two containers.
func randomPod(random *rand.Rand, uid string, resources []string) model.Pod {
	p := model.Pod{UID: uid, Namespace: "default", Name: uid}
	container := func(name string) model.Container {
		c := model.Container{Name: name, Limits: map[string]int{}}
		for _, r := range resources {
			if random.IntN(3) > 0 {
				c.Limits[r] = 1 + random.IntN(1+random.IntN(8))
			}
		}
		return c
	}
	for i := range random.IntN(3) {
		c := container(fmt.Sprint("init-", i))
		c.Sidecar = random.IntN(3) == 0
		p.InitContainers = append(p.InitContainers, c)
	}
	for i := range 1 + random.IntN(2) {
		p.Containers = append(p.Containers, container(fmt.Sprint("app-", i)))
	}
	return p
}

func kubePod(p model.Pod) *v1.Pod {
	pod := Pod(p.UID, "example.com/none", 0)
	container := func(c model.Container) v1.Container {
		limits := v1.ResourceList{}
		for name, n := range c.Limits {
			limits[v1.ResourceName(name)] = *resource.NewQuantity(int64(n), resource.DecimalSI)
		}
		return v1.Container{Name: c.Name, Resources: v1.ResourceRequirements{Limits: limits, Requests: limits}}
	}
	pod.Spec.Containers = nil
	for _, c := range p.InitContainers {
		made := container(c)
		if always := v1.ContainerRestartPolicyAlways; c.Sidecar {
			made.RestartPolicy = &always
		}
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, made)
	}
	for _, c := range p.Containers {
		pod.Spec.Containers = append(pod.Spec.Containers, container(c))
	}
	return pod
}

// change lists the devices again, some of them with another health, and ends a pod now and then.
func (c *comparison) change(random *rand.Rand) {
	for _, name := range slices.Sorted(maps.Keys(c.lists)) {
		for i := range c.lists[name].Devices {
			c.lists[name].Devices[i].Healthy = random.IntN(12) > 0
		}
		if random.IntN(30) == 0 { // a plugin in trouble
			for i := range c.lists[name].Devices {
				c.lists[name].Devices[i].Healthy = false
			}
		}
		c.kubelet.list(c.lists[name])
		c.pools[name].Set(c.lists[name])
	}
	if len(c.placed) > 0 && random.IntN(3) == 0 {
		i := random.IntN(len(c.placed))
		c.release(c.placed[i])
		c.placed = slices.Delete(c.placed, i, i+1)
	}
}

func (c *comparison) release(p model.Pod) {
	c.kubelet.pods = slices.DeleteFunc(c.kubelet.pods, func(pod *v1.Pod) bool { return string(pod.UID) == p.UID })
	for name, pool := range c.pools {
		for _, container := range slices.Concat(p.InitContainers, p.Containers) {
			pool.Release(p.UID, container.Name, c.held(name, p.UID, container.Name))
		}
	}
}

// held returns the devices that a container has, or the pod if it has no name.
func (c *comparison) held(name, pod, container string) (ids []string) {
	for _, d := range c.pools[name].States() {
		if d.Pod == pod && (container == "" || slices.Contains(d.Containers, container)) {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

// admit admits a pod, and returns how it went: asked, admitted or the reason of the rejection.
func (c *comparison) admit(p model.Pod) string {
	c.Helper()
	k, pod := c.kubelet, kubePod(p)
	k.seen = nil
	if !slices.ContainsFunc(k.pods, func(pod *v1.Pod) bool { return string(pod.UID) == p.UID }) {
		k.pods = append(k.pods, pod)
	}
	result := k.topology.Admit(c.Context(), &lifecycle.PodAdmitAttributes{Pod: pod, Operation: lifecycle.AddOperation})
	err := c.replay(p, result)
	switch {
	case result.Admit && err == nil:
		if slices.ContainsFunc(k.seen, func(s step) bool { return len(s.asked) > 0 }) {
			return "asked"
		}
		return "admitted"
	case result.Admit || err == nil:
		c.Fatalf("%s: the kubelet says %+v, we say %v\n%+v", p.UID, result, err, p)
	}
	return result.Reason
}

// replay takes a pod through the steps that the kubelet took.
func (c *comparison) replay(p model.Pod, result lifecycle.PodAdmitResult) error {
	c.Helper()
	byPod := c.topology.Scope == admission.ScopePod && c.topology.Policy != admission.PolicyNone
	var affinity admission.Nodes
	steps := c.kubelet.seen
	if byPod {
		nodes, err := c.affinity(p, "", admission.Limits(p), nil, steps[0])
		if err != nil {
			return c.rejected(result, err)
		}
		affinity = nodes
	}
	reuse := admission.Reuse{}
	for i, container := range slices.Concat(p.InitContainers, p.Containers) {
		if i >= len(steps) {
			c.Fatalf("%s: the kubelet stopped before container %s: %+v", p.UID, container.Name, result)
		}
		if !byPod && c.topology.Policy != admission.PolicyNone {
			nodes, err := c.affinity(p, container.Name, container.Limits, reuse, steps[i])
			if err != nil {
				return c.rejected(result, err)
			}
			affinity = nodes
		}
		want := admission.Nodes(0)
		if steps[i].affinity.NUMANodeAffinity != nil {
			want = admission.NodesOf(steps[i].affinity.NUMANodeAffinity.GetBits()...)
		}
		if affinity != want {
			c.Fatalf("%s, container %s: affinity %b, that of the kubelet is %b", p.UID, container.Name, affinity, want)
		}
		if err := c.allocate(p, container, reuse, affinity, steps[i], result); err != nil {
			return err
		}
		for name := range container.Limits {
			reuse.Took(name, c.held(name, p.UID, container.Name), i < len(p.InitContainers) && !container.Sidecar)
		}
	}
	return nil
}

// rejected compares a rejection with that of the kubelet.
func (c *comparison) rejected(result lifecycle.PodAdmitResult, errs ...error) error {
	c.Helper()
	err := errors.Join(errs...)
	for _, err := range errs {
		want := "Allocate failed due to " + err.Error() + ", which is unexpected"
		if errors.Is(err, admission.ErrTopologyAffinity) {
			want = err.Error()
		}
		if want == result.Message {
			return err
		}
	}
	c.Errorf("the kubelet says %+v, we say %v", result, err)
	return err
}

// affinity compares hints, and merges them.
func (c *comparison) affinity(
	p model.Pod, container string, limits map[string]int, reuse admission.Reuse, s step,
) (admission.Nodes, error) {
	c.Helper()
	var all [][]admission.Hint
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		r := admission.Request{Count: limits[name], Reusable: reuse.Devices(name)}
		hints, err := c.pools[name].Hints(c.topology, r)
		testenv.Must(c, err)
		if diff := cmp.Diff(fromKubelet(s.hints[name]), hints); diff != "" {
			c.Fatalf("hints of %s %s for %d of %s (-kubelet +ours):\n%s", p.UID, container, limits[name], name, diff)
		}
		all = append(all, hints)
	}
	return c.topology.Merge(all)
}

// fromKubelet returns hints as ours, in the order of their nodes.
func fromKubelet(hints []topologymanager.TopologyHint) []admission.Hint {
	if hints == nil {
		return nil
	}
	same := make([]admission.Hint, len(hints))
	for i, h := range hints {
		same[i] = admission.Hint{Nodes: admission.NodesOf(h.NUMANodeAffinity.GetBits()...), Preferred: h.Preferred}
	}
	slices.SortFunc(same, func(a, b admission.Hint) int { return int(a.Nodes) - int(b.Nodes) })
	return same
}

// allocate plans a container's devices, and holds those that the kubelet gave it. The kubelet takes the resources in
// a random order: it rejects the pod for any one of those that lack devices.
func (c *comparison) allocate(
	p model.Pod, container model.Container, reuse admission.Reuse, affinity admission.Nodes, s step,
	result lifecycle.PodAdmitResult,
) error {
	c.Helper()
	plans, errs := map[string]*admission.Plan{}, []error(nil)
	for name, n := range container.Limits {
		plan, err := c.pools[name].Plan(admission.Request{
			Count: n, Reusable: reuse.Devices(name), Affinity: affinity, Prefers: c.prefers[name],
		})
		if err != nil {
			errs = append(errs, err)
		}
		plans[name] = plan
	}
	if errs != nil {
		return c.rejected(result, errs...)
	}
	for name, plan := range plans {
		what := fmt.Sprintf("%s, container %s, %s", p.UID, container.Name, name)
		c.comparePreference(what, s.asked[name], plan.Ask)
		ours := c.summary(name, reuse, affinity, s.answered[name], plan.Pick(s.answered[name]))
		kubelets := c.summary(name, reuse, affinity, s.answered[name], s.given[name])
		if ours != kubelets {
			c.Errorf("%s: we choose %+v, the kubelet %+v", what, ours, kubelets)
		}
		c.pools[name].Hold(p.UID, container.Name, s.given[name])
	}
	return nil
}

// comparePreference compares what the plugin is asked. The kubelet asks about an only answer too, and never about
// devices of init containers that suffice (bug B12): there only one of both asks.
func (c *comparison) comparePreference(
	what string, kubelets *pluginapi.ContainerPreferredAllocationRequest, ours *admission.Preference,
) {
	c.Helper()
	if ours == nil {
		if kubelets != nil && len(kubelets.AvailableDeviceIDs) > int(kubelets.AllocationSize) {
			c.Errorf("%s: we do not ask about %v, and the kubelet does", what, kubelets)
		}
		return
	}
	if kubelets == nil {
		if len(ours.MustInclude) > 0 && len(ours.MustInclude) >= ours.Size {
			c.Errorf("%s: we ask about %+v, and the kubelet does not", what, ours)
		}
		return
	}
	want := &admission.Preference{
		Available: sorted(kubelets.AvailableDeviceIDs), MustInclude: sorted(kubelets.MustIncludeDeviceIDs),
		Size: int(kubelets.AllocationSize),
	}
	if diff := cmp.Diff(want, ours, cmpopts.EquateEmpty()); diff != "" {
		c.Errorf("%s: GetPreferredAllocation (-kubelet +ours):\n%s", what, diff)
	}
}

func sorted(ids []string) []string { return slices.Sorted(slices.Values(ids)) }

// summary is what is not random in a choice of devices.
type summary struct{ total, reused, aligned, unaligned, preferred int }

func (c *comparison) summary(
	name string, reuse admission.Reuse, affinity admission.Nodes, preferred, chosen []string,
) (sum summary) {
	near := c.pools[name].NUMA(chosen)
	for _, id := range chosen {
		sum.total++
		switch {
		case slices.Contains(reuse.Devices(name), id):
			sum.reused++
			continue
		case admission.NodesOf(near[id]...)&affinity != 0:
			sum.aligned++
		case near[id] != nil && affinity != 0: // without an affinity the choice among all is random
			sum.unaligned++
		}
		if slices.Contains(preferred, id) {
			sum.preferred++
		}
	}
	return sum
}
