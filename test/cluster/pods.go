package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"gpu-cdi-plugin/test/lib/kubenode"
)

// patience is how long a test waits for the cluster, on a busy machine too.
const patience = 2 * time.Minute

// gpuName is the resource of whole GPUs.
const gpuName = "nvidia.com/gpu"

// Pod describes a pod of a container "main", with GPUImage, and of others where the test says so.
type Pod struct {
	Name string
	// Node is the name of the node that the scheduler must choose; empty for any.
	Node string
	// GPUs is how many GPUs it requests, of Resource or of gpuName. Claims are the templates of its claims.
	GPUs     int
	Resource string
	Claims   []string
	// Init are its init containers, Beside the containers that run beside main.
	Init, Beside []Container
	// Restarts has the container started again when it has ended.
	Restarts bool
	// Command replaces the default, which waits for the end of the pod.
	Command []string
	Labels  map[string]string
	// Grace is the grace period at its deletion, in seconds; 0 means 5.
	Grace int
	// Shares says that its GPUs are shares.
	Shares bool
}

// Container describes a container of a pod. It requests the resource of the pod, and has its claims.
type Container struct {
	Name    string
	GPUs    int
	Command []string
	// Restarts makes an init container one that runs beside the others.
	Restarts bool
}

// Commands of containers that end at SIGTERM, and at SIGKILL only.
var (
	untilTerm = []string{"sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"}
	untilKill = []string{"sh", "-c", "trap '' TERM; while :; do sleep 3600 & wait $!; done"}
)

// container returns the manifest of a container.
func (p Pod) container(c Container, init bool) map[string]any {
	if c.Command == nil {
		c.Command = untilTerm
	}
	var uses []any
	for _, name := range p.Claims {
		uses = append(uses, map[string]any{"name": name})
	}
	limits := map[string]any{}
	if c.GPUs > 0 {
		limits[cmp.Or(p.Resource, gpuName)] = c.GPUs
	}
	container := map[string]any{
		"name": c.Name, "image": GPUImage, "imagePullPolicy": "Never", "command": c.Command,
		"resources": map[string]any{"limits": limits, "claims": uses},
	}
	if p.Shares {
		container["env"] = []any{map[string]any{"name": sharesVariable, "value": "true"}}
	}
	if init && c.Restarts {
		container["restartPolicy"] = "Always"
	}
	return container
}

func (p Pod) manifest() map[string]any {
	selector := map[string]string{}
	if p.Node != "" {
		selector["kubernetes.io/hostname"] = p.Node
	}
	var claims, before []any
	for _, name := range p.Claims {
		claims = append(claims, map[string]any{"name": name, "resourceClaimTemplateName": name})
	}
	for _, c := range p.Init {
		before = append(before, p.container(c, true))
	}
	containers := []any{p.container(Container{Name: "main", GPUs: p.GPUs, Command: p.Command}, false)}
	for _, c := range p.Beside {
		containers = append(containers, p.container(c, false))
	}
	policy := "Never"
	if p.Restarts {
		policy = "Always"
	}
	return map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": p.Name, "labels": p.Labels},
		"spec": map[string]any{
			"resourceClaims": claims, "initContainers": before, "containers": containers,
			"restartPolicy": policy, "terminationGracePeriodSeconds": cmp.Or(p.Grace, 5), "nodeSelector": selector,
		},
	}
}

// PodStatus has what tests read of a pod.
type PodStatus struct {
	Metadata struct{ Name, UID, DeletionTimestamp string }
	Spec     struct{ NodeName string }
	Status   struct {
		Phase, Reason, Message string
		InitContainerStatuses  []struct {
			State struct{ Running *struct{ StartedAt string } }
		}
		ContainerStatuses []struct {
			ContainerID  string
			Ready        bool
			RestartCount int
			State        struct {
				Terminated struct{ Reason, Message string }
			}
		}
	}
}

const podsPath = "/api/v1/namespaces/default/pods"

func (c *Cluster) create(ctx context.Context, p Pod) error {
	return c.client.do(ctx, http.MethodPost, podsPath, p.manifest(), nil)
}

// remove removes a pod, and does not wait for its end.
func (c *Cluster) remove(ctx context.Context, name string) error {
	return c.client.do(ctx, http.MethodDelete, podsPath+"/"+name, nil, nil)
}

// forceRemove removes a pod from the API server, as kubectl delete --force does. Its containers may still run.
func (c *Cluster) forceRemove(ctx context.Context, name string) error {
	return c.client.do(ctx, http.MethodDelete, podsPath+"/"+name, map[string]any{"gracePeriodSeconds": 0}, nil)
}

func (c *Cluster) pod(ctx context.Context, name string) (p PodStatus, err error) {
	return p, c.client.do(ctx, http.MethodGet, podsPath+"/"+name, nil, &p)
}

// awaitPhase waits until a pod is in a phase.
func (c *Cluster) awaitPhase(ctx context.Context, name, phase string) (p PodStatus, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	err = kubenode.Wait(ctx, patience, "pod "+name+" is "+phase, func() (err error) {
		if p, err = c.pod(ctx, name); err != nil || p.Status.Phase == phase {
			return err
		}
		err = fmt.Errorf("it is %+v", p)
		if p.Status.Phase == "Failed" { // for good
			cancel()
		}
		return err
	})
	return p, err
}

// pods returns the pods with a label.
func (c *Cluster) pods(ctx context.Context, label string) ([]PodStatus, error) {
	var list struct{ Items []PodStatus }
	return list.Items, c.client.do(ctx, http.MethodGet, podsPath+"?labelSelector="+label, nil, &list)
}

// awaitAllocatable waits until a node's status has this many GPUs for pods.
func (c *Cluster) awaitAllocatable(ctx context.Context, node string, want int) error {
	return kubenode.Wait(ctx, patience, fmt.Sprintf("%s has %d GPUs", node, want), func() error {
		_, got, err := c.resource(ctx, node, gpuName)
		if err == nil && got != want {
			err = fmt.Errorf("it has %d", got)
		}
		return err
	})
}

// resource returns how many devices of a resource a node's status has, and how many of these are for pods.
func (c *Cluster) resource(ctx context.Context, node, name string) (capacity, allocatable int, err error) {
	var n struct {
		Status struct{ Capacity, Allocatable map[string]string }
	}
	if err := c.client.do(ctx, http.MethodGet, "/api/v1/nodes/"+node, nil, &n); err != nil {
		return 0, 0, err
	}
	// A node that does not have the resource has 0 of it.
	capacity, err = strconv.Atoi(cmp.Or(n.Status.Capacity[name], "0"))
	allocatable, err2 := strconv.Atoi(cmp.Or(n.Status.Allocatable[name], "0"))
	return capacity, allocatable, errors.Join(err, err2)
}
