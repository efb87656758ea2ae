package manager

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/model"
)

// maxResponse is the largest response to Allocate, in bytes. A response is kept as long as the pod is placed.
const maxResponse = 1 << 20

// errNoContainers has the kubelet's text. The kubelet appends the response, which is empty here.
var errNoContainers = errors.New("no containers return in allocation response ")

// attempt is an admission in progress. The devices that it has chosen are held in the pools.
type attempt struct {
	m           *Manager
	pod         model.Pod
	resources   map[string]bool // the names of the resources whose devices it takes
	reuse       admission.Reuse
	allocations []model.Allocation
	choices     []choice // by index of the allocation
}

// choice is a set of devices of one plugin, which must allocate them.
type choice struct {
	plugin *endpoint.Endpoint
	pool   *pool
	ids    []string // in the order in which they were chosen
}

// run allocates devices for all containers of the pod, or for none. It chooses and holds all devices before the first
// Allocate call, so that other pods can be admitted during the calls.
func (a *attempt) run(ctx context.Context) error {
	if err := a.resolve(); err != nil {
		return err
	}
	if err := a.choose(ctx); err != nil {
		a.giveBack()
		return err
	}
	for i, c := range a.choices {
		if err := a.allocate(ctx, c, &a.allocations[i]); err != nil {
			a.giveBack()
			return err
		}
	}
	return nil
}

// resolve finds the resources that the pod requests.
func (a *attempt) resolve() error {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	a.resources = map[string]bool{}
	for _, c := range a.pod.AllContainers() {
		for _, name := range slices.Sorted(maps.Keys(c.Limits)) {
			pool, ok := a.m.pools[name]
			switch {
			case ok && pool.known():
				a.resources[name] = true
			case c.Limits[name] > 0 && kubelet.IsPrefixedNative(name):
				return outOf(name, c.Limits[name], 0, 0)
			case c.Limits[name] > 0:
				return admission.UnregisteredError(name)
			}
		}
	}
	return nil
}

// choose chooses and holds the devices of all containers. It locks the resources meanwhile, so a slow
// GetPreferredAllocation delays other admissions until its deadline.
func (a *attempt) choose(ctx context.Context) error {
	unlock, err := a.m.lockResources(ctx, a.resources)
	if err != nil {
		return err
	}
	defer unlock()
	var affinity admission.Nodes
	perPod := a.m.o.Topology.Scope == admission.ScopePod
	if perPod {
		if affinity, err = a.align("", admission.Limits(a.pod)); err != nil {
			return err
		}
	}
	for i, c := range a.pod.AllContainers() {
		if !perPod {
			if affinity, err = a.align(c.Name, c.Limits); err != nil {
				return err
			}
		}
		ends := i < len(a.pod.InitContainers) && !c.Sidecar
		for _, resource := range a.known(c.Limits) {
			ids, err := a.take(ctx, resource, c, affinity)
			if err != nil {
				return err
			}
			a.reuse.Took(resource, ids, ends)
		}
	}
	return nil
}

// known returns the names of a container's resources, sorted. Unknown resources with the limit 0 are left out.
func (a *attempt) known(limits map[string]int) []string {
	names := slices.Sorted(maps.Keys(limits))
	return slices.DeleteFunc(names, func(name string) bool { return !a.resources[name] })
}

// align returns the NUMA nodes for a container, or for the whole pod if `container` is empty.
func (a *attempt) align(container string, limits map[string]int) (admission.Nodes, error) {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	var all [][]admission.Hint
	for _, name := range a.known(limits) {
		hints, err := a.m.pools[name].Hints(a.m.o.Topology, a.request(name, container, limits[name]))
		if err != nil {
			return 0, err
		}
		all = append(all, hints)
	}
	return a.m.o.Topology.Merge(all)
}

func (a *attempt) request(resource, container string, count int) admission.Request {
	r := admission.Request{Count: count, Among: a.pod.Among, Unhealthy: a.pod.Unhealthy, Random: a.m.random}
	if container != "" {
		r.Reusable = a.reuse.Devices(resource)
	}
	return r
}

// take chooses a container's devices of one resource, with regard to the plugin's preference, and holds them.
func (a *attempt) take(
	ctx context.Context, name string, c model.Container, affinity admission.Nodes,
) ([]string, error) {
	a.m.mu.Lock()
	pool := a.m.pools[name]
	request := a.request(name, c.Name, c.Limits[name])
	plugin, unknown := a.m.registry.Endpoint(name)
	request.Affinity = affinity
	request.Prefers = unknown == nil && plugin.Options().GetGetPreferredAllocationAvailable()
	plan, err := pool.Plan(request)
	a.m.mu.Unlock()
	if err != nil {
		return nil, err
	}
	var preferred []string
	if ask := plan.Ask; ask != nil {
		preferred, err = plugin.Preferred(ctx, ask.Available, ask.MustInclude, ask.Size)
		if err != nil {
			return nil, fmt.Errorf("device plugin GetPreferredAllocation rpc failed with err: %w", err)
		}
	}
	ids := plan.Pick(preferred)
	if len(ids) == 0 {
		return nil, nil
	}
	if unknown != nil { // the grace period of its plugin has just ended
		return nil, fmt.Errorf("unknown Device Plugin %s", name)
	}
	a.hold(c.Name, choice{plugin, pool, ids})
	return ids, nil
}

// hold records in the pool that a container has devices.
func (a *attempt) hold(container string, c choice) {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	c.pool.Hold(a.pod.UID, container, c.ids)
	a.choices = append(a.choices, c)
	a.allocations = append(a.allocations, model.Allocation{
		Container: container, Resource: c.pool.Listed().Name,
		IDs: slices.Sorted(slices.Values(c.ids)), NUMA: c.pool.NUMA(c.ids),
	})
}

// allocate calls the plugin's Allocate for a choice and stores the response in the allocation.
func (a *attempt) allocate(ctx context.Context, c choice, allocation *model.Allocation) error {
	begin := time.Now()
	response, err := c.plugin.Allocate(ctx, c.ids)
	a.m.o.Observer.Allocated(allocation.Resource, time.Since(begin))
	if err != nil {
		return err
	}
	if response == nil {
		return errNoContainers
	}
	if err := a.stillListed(c.pool, allocation); err != nil {
		return err
	}
	allocation.Response, err = marshal(response)
	if err != nil {
		return fmt.Errorf("response of Allocate for %s: %w", allocation.Resource, err)
	}
	return nil
}

func marshal(r *pluginapi.ContainerAllocateResponse) ([]byte, error) {
	if size := proto.Size(r); size > maxResponse {
		return nil, fmt.Errorf("it has %d bytes, more than the maximum of %d", size, maxResponse)
	}
	return proto.MarshalOptions{Deterministic: true}.Marshal(r)
}

// stillListed returns an error if devices have left the plugin's list during Allocate. The container could not start
// with them. No container of the pod has started yet, so another attempt with other devices costs nothing. Devices
// that have become unhealthy are accepted: that can also happen later.
func (a *attempt) stillListed(pool *pool, allocation *model.Allocation) error {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	for _, id := range allocation.IDs {
		if pool.Lists(id) {
			continue
		}
		return fmt.Errorf("device %s of %s left the list of its plugin during Allocate: %w",
			id, allocation.Resource, ErrRetry)
	}
	return nil
}

// giveBack releases all devices that the attempt holds.
func (a *attempt) giveBack() {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	a.m.releaseAll(a.pod.UID, a.allocations)
}
