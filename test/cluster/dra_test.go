package cluster

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestTheDoors moves a node from the device plugin to dynamic resource allocation and back, under running pods.
func TestTheDoors(t *testing.T) {
	c := start(t)
	before := []map[string]string{listing(t, c.Nodes[0]), listing(t, c.Nodes[1])}
	const node, chooses = "node2", "nvidia.com/device-plugin.config"
	var old, pair, plain PodStatus
	var held []string
	for _, step := range []struct {
		name string
		do   func(*testing.T)
	}{
		{"with the chart's default the device plugin has all GPUs", func(t *testing.T) {
			values := filepath.Join(t.TempDir(), "values.yaml")
			testenv.Must(t, os.WriteFile(values, []byte("dra: {enabled: true}\n"+
				"config: {default: whole, map: {whole: '{}', dra: 'door: dra'}}"), 0o600))
			c.install(t, "--values", values)
			c.offers(t, 4, 8)
			old = c.launch(t, Pod{Name: "old", GPUs: 1, Node: node})
			held = c.check(t, old, 1)
		}},
		{"a node's label moves it to DRA, and the GPU of a running pod waits", func(t *testing.T) {
			c.kubectl(t, "label", "node", node, chooses+"=dra")
			c.offers(t, 4, 0)
			c.published(t, node, 8, 1)
		}},
		{"a pod gets GPUs by a claim, and another one by its old request", func(t *testing.T) {
			c.claimTemplate(t, "two", 2)
			pair = c.launch(t, Pod{Name: "pair", Claims: []string{"two"}, Node: node})
			held = append(held, c.checkClaims(t, pair, 2)...)
			plain = c.launch(t, Pod{Name: "plain", GPUs: 1, Node: node})
			held = append(held, c.checkClaims(t, plain, 1)...)
			c.distinct(t, held)
		}},
		{"a claim for the GPU of the old pod waits for its end", func(t *testing.T) {
			c.claimTemplate(t, "five", 5)
			testenv.Must(t, c.create(t.Context(), Pod{Name: "rest", Claims: []string{"five"}, Node: node}))
			testenv.Must(t, kubenode.Wait(t.Context(), patience, "the pod cannot be scheduled", func() error {
				out := c.kubectl(t, "get", "pod", "rest", "-o", "jsonpath={.status.conditions[0].message}")
				if !strings.Contains(out, "cannot allocate all claims") {
					return fmt.Errorf("its condition is %q", out)
				}
				return nil
			}))
			c.end(t, "old")
			c.published(t, node, 8, 0)
			rest, err := c.awaitPhase(t.Context(), "rest", "Running")
			testenv.Must(t, err)
			c.distinct(t, append(held[1:], c.checkClaims(t, rest, 5)...))
			c.end(t, "rest")
		}},
		{"the node goes back, and pods with a claim keep their GPUs", func(t *testing.T) {
			c.kubectl(t, "label", "node", node, chooses+"-")
			c.offers(t, 4, 5)
			c.published(t, node, 0, 0)
			// Until its end the scheduler counts the request of the pod "plain" too.
			fresh := c.launch(t, Pod{Name: "fresh", GPUs: 4, Node: node})
			held := append(c.check(t, fresh, 4), c.checkClaims(t, pair, 2)...)
			c.distinct(t, append(held, c.checkClaims(t, plain, 1)...))
			c.end(t, "fresh", "pair", "plain")
			c.offers(t, 4, 8)
		}},
		{"after cleanup and uninstall nothing is left", func(t *testing.T) {
			c.kubectl(t, "delete", "resourceclaimtemplates", "--all")
			c.uninstall(t)
			for i, n := range c.Nodes {
				if diff := cmp.Diff(before[i], listing(t, n)); diff != "" {
					t.Errorf("the files of %s (-before +after):\n%s", n.Name, diff)
				}
			}
			const kinds = "resourceclaims,resourceslices,deviceclasses,validatingadmissionpolicies"
			if out := c.kubectl(t, "get", kinds, "-A", "-o", "name"); out != "" {
				t.Errorf("left in the API server:\n%s", out)
			}
		}},
	} {
		if !t.Run(step.name, step.do) {
			c.describe(t)
			t.Log(c.kubectl(t, "get", "resourceslices,resourceclaims", "-A", "-o", "yaml"))
			t.FailNow()
		}
	}
}

// claimTemplate makes a template of claims for a number of GPUs.
func (c *Cluster) claimTemplate(t testing.TB, name string, count int) {
	t.Helper()
	c.apply(t, fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %s}
spec: {spec: {devices: {requests: [{name: gpus, exactly: {deviceClassName: gpu.nvidia.com, count: %d}}]}}}
`, name, count))
}

// apply applies a manifest.
func (c *Cluster) apply(t testing.TB, manifest string) {
	t.Helper()
	file := filepath.Join(c.Dir(), "manifest.yaml") // kubectl splits a path with a comma, as that of t.TempDir may be
	testenv.Must(t, os.WriteFile(file, []byte(manifest), 0o600))
	c.kubectl(t, "apply", "-f", file)
}

// published waits until the ResourceSlices of a node have this many devices, of which so many have a taint.
func (c *Cluster) published(t testing.TB, node string, devices, tainted int) {
	t.Helper()
	testenv.Must(t, kubenode.Wait(t.Context(), patience, "the ResourceSlices of "+node, func() error {
		var list struct {
			Items []struct {
				Spec struct {
					NodeName string
					Devices  []struct{ Taints []struct{ Key string } }
				}
			}
		}
		testenv.Must(t, json.Unmarshal([]byte(c.kubectl(t, "get", "resourceslices", "-o", "json")), &list))
		var all, taints int
		for _, s := range list.Items {
			if s.Spec.NodeName != node {
				continue
			}
			for _, d := range s.Spec.Devices {
				all++
				taints += len(d.Taints)
			}
		}
		if all != devices || taints != tainted {
			return fmt.Errorf("they have %d devices and %d taints, want %d and %d", all, taints, devices, tainted)
		}
		return nil
	}))
}

// checkClaims checks that a running pod sees exactly the GPUs that the scheduler has allocated to its claims, and may
// open their device nodes. It returns their UUIDs.
func (c *Cluster) checkClaims(t testing.TB, p PodStatus, count int) []string {
	t.Helper()
	var list struct {
		Items []struct {
			Status struct {
				ReservedFor []struct{ Name string }
				Allocation  struct {
					Devices struct{ Results []struct{ Device string } }
				}
			}
		}
	}
	testenv.Must(t, json.Unmarshal([]byte(c.kubectl(t, "get", "resourceclaims", "-o", "json")), &list))
	var given []string
	for _, claim := range list.Items {
		if len(claim.Status.ReservedFor) == 1 && claim.Status.ReservedFor[0].Name == p.Metadata.Name {
			for _, r := range claim.Status.Allocation.Devices.Results {
				given = append(given, r.Device)
			}
		}
	}
	slices.Sort(given)
	if len(given) != count {
		t.Errorf("the claims of pod %s have the devices %v, want %d", p.Metadata.Name, given, count)
	}
	seen := c.seen(t, p, count)
	lower := make([]string, len(seen))
	for i, uuid := range seen {
		lower[i] = strings.ToLower(uuid)
	}
	if diff := cmp.Diff(given, lower); diff != "" {
		t.Errorf("GPUs of pod %s (-given +seen):\n%s", p.Metadata.Name, diff)
	}
	return seen
}

// distinct checks that no GPU was given twice.
func (c *Cluster) distinct(t testing.TB, uuids []string) {
	t.Helper()
	sorted := slices.Sorted(slices.Values(uuids))
	if len(slices.Compact(slices.Clone(sorted))) != len(sorted) {
		t.Errorf("a GPU was given twice: %v", sorted)
	}
}
