package cluster

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestSharesByDRA shares two GPUs of a node in time, each in four replicas of 11517 MiB.
func TestSharesByDRA(t *testing.T) {
	c := start(t)
	const node = "node1"
	const shared = "door: dra, gpus: {include: [0, 1]}, sharing: {time-slicing: {resources: [{name: nvidia.com/gpu, "
	for _, step := range []struct {
		name string
		do   func(*testing.T)
	}{
		{"of nine pods with nvidia.com/gpu as many run as there are replicas", func(t *testing.T) {
			values := filepath.Join(t.TempDir(), "values.yaml")
			testenv.Must(t, os.WriteFile(values, []byte("dra: {enabled: true}\n"+
				"config: {default: whole, map: {whole: '{}', shared: '{"+shared+"replicas: 4}]}}}',\n"+
				"renamed: '{"+shared+"replicas: 2, rename: nvidia.com/gpu.shared}]}}}'}}"), 0o600))
			c.kubectl(t, "label", "node", node, chooses+"=shared")
			c.install(t, "--values", values)
			c.published(t, node, 2, 0)
			if got := c.launchAll(t, node, 9); len(got) != 2 || got[0] != 4 || got[1] != 4 {
				t.Errorf("the GPUs have so many pods: %v, want 4 each", got)
			}
		}},
		{"one request has shares of different GPUs, and two requests can have shares of one", func(t *testing.T) {
			p := c.launch(t, Pod{Name: "count", GPUs: 2, Node: node})
			c.distinct(t, c.checkClaims(t, p, 2))
			c.apply(t, `
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: both}
spec:
  spec:
    devices:
      requests:
        - {name: a, exactly: {deviceClassName: gpu.nvidia.com}}
        - {name: b, exactly: {deviceClassName: gpu.nvidia.com}}
`)
			p = c.launch(t, Pod{Name: "both", Claims: []string{"both"}, Node: node})
			if seen := c.checkClaims(t, p, 2); len(seen) != 1 {
				t.Errorf("a pod with two shares sees %v, want one GPU", seen)
			}
			c.end(t, "count", "both")
		}},
		{"a claim that asks for more memory gets it, and leaves room for one default", func(t *testing.T) {
			c.apply(t, `
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: large}
spec:
  spec:
    devices:
      requests:
        - name: gpu
          exactly: {deviceClassName: gpu.nvidia.com, capacity: {requests: {memory: 30Gi}}}
      config:
        - requests: [gpu]
          opaque:
            driver: gpu.nvidia.com
            parameters: {apiVersion: gpu-cdi-plugin/v1, kind: GPUConfig, prestart: {policy: clean}}
`)
			large := c.launch(t, Pod{Name: "large", Claims: []string{"large"}, Node: node})
			c.checkClaims(t, large, 1)
			const consumed = "{.items[*].status.allocation.devices.results[*].consumedCapacity.memory}"
			if got := c.kubectl(t, "get", "resourceclaims", "-o", "jsonpath="+consumed); got != "30Gi" {
				t.Errorf("the claim has %s of memory, want 30Gi", got)
			}
			if got := c.launchAll(t, node, 6); len(got) != 2 || got[0] != 1 || got[1] != 4 {
				t.Errorf("the GPUs have so many other pods: %v, want 1 and 4", got)
			}
			c.end(t, "large")
		}},
		{"shares with a name of their own are for pods that request this name", func(t *testing.T) {
			c.kubectl(t, "label", "node", node, "--overwrite", chooses+"=renamed")
			testenv.Must(t, kubenode.Wait(t.Context(), patience, "the slices have the name", func() error {
				out := c.kubectl(t, "get", "resourceslices", "-o", "yaml")
				if n := strings.Count(out, "nvidia.com/gpu.shared"); n != 2 {
					return fmt.Errorf("%d devices have it", n)
				}
				return nil
			}))
			testenv.Must(t, c.create(t.Context(), Pod{Name: "whole", GPUs: 1, Node: node}))
			p := c.launch(t, Pod{Name: "part", GPUs: 1, Resource: "nvidia.com/gpu.shared", Node: node})
			c.checkClaims(t, p, 1)
			testenv.Must(t, kubenode.Wait(t.Context(), patience, "no place for a whole GPU", func() error {
				return c.whyNotUnschedulable(t, "whole")
			}))
			c.end(t, "whole", "part")
		}},
		{"without the label the GPUs are whole again", func(t *testing.T) {
			c.kubectl(t, "label", "node", node, chooses+"-")
			c.offers(t, 4, 8)
			c.published(t, node, 0, 0)
			c.kubectl(t, "delete", "resourceclaimtemplates", "--all")
			c.uninstall(t)
		}},
	} {
		if !t.Run(step.name, step.do) {
			c.describe(t)
			t.Log(c.kubectl(t, "get", "resourceslices,resourceclaims", "-A", "-o", "yaml"))
			t.FailNow()
		}
	}
}

// launchAll creates pods on a node, each with a GPU of which only some can run: it waits until all but one run, and
// until the scheduler has no place for that one. It returns how many pods see each GPU, in ascending order, and ends
// the pods.
func (c *Cluster) launchAll(t testing.TB, node string, count int) []int {
	t.Helper()
	var names []string
	for i := range count {
		names = append(names, fmt.Sprint("share-", i))
		testenv.Must(t, c.create(t.Context(), Pod{
			Name: names[i], GPUs: 1, Node: node, Labels: map[string]string{"share": "yes"},
		}))
	}
	byGPU := map[string]int{}
	testenv.Must(t, kubenode.Wait(t.Context(), patience, "all pods but one run", func() error {
		list, err := c.pods(t.Context(), "share")
		if err != nil {
			return err
		}
		clear(byGPU)
		waiting := 0
		for _, p := range list {
			if p.Status.Phase == "Running" {
				for _, uuid := range c.seen(t, p, 1) {
					byGPU[uuid]++
				}
				continue
			}
			waiting++
			if err := c.whyNotUnschedulable(t, p.Metadata.Name); err != nil {
				return err
			}
		}
		if waiting != 1 {
			return fmt.Errorf("%d pods of %d wait", waiting, len(list))
		}
		return nil
	}))
	c.end(t, names...)
	return slices.Sorted(maps.Values(byGPU))
}

// whyNotUnschedulable returns nil if the scheduler has no place for a pod.
func (c *Cluster) whyNotUnschedulable(t testing.TB, name string) error {
	t.Helper()
	const reason = "jsonpath={.status.conditions[?(@.type=='PodScheduled')].reason}"
	if got := c.kubectl(t, "get", "pod", name, "-o", reason); got != "Unschedulable" {
		return fmt.Errorf("the condition PodScheduled of pod %s is %q", name, got)
	}
	return nil
}
