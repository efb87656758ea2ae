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

	"gpu-cdi-plugin/test/lib/guide"
	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestTheDoors moves a node from the device plugin to dynamic resource allocation and back, under running pods.
func TestTheDoors(t *testing.T) {
	c := start(t)
	before := []map[string]string{listing(t, c.Nodes[0]), listing(t, c.Nodes[1])}
	const node = "node2"
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
		{"a node's token makes only slices of that node", func(t *testing.T) { c.slicePolicy(t, "node2", "node1") }},
		{"a kubelet reads a claim without a pod on its node only if the chart lets it", c.claimPolicy},
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
			c.holders(t, node, map[string]int{"old/main by plugin": 1, "pair/main by dra": 2, "plain/main by dra": 1})
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
			c.unchanged(t, before)
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

// TestTheGuideToDRA runs the commands and the examples of docs/dra.md.
func TestTheGuideToDRA(t *testing.T) {
	c := start(t)
	defer func() {
		if t.Failed() {
			c.describe(t)
		}
	}()
	out := c.follow(t, "docs/dra.md", map[string]string{"kubectl wait": "kubectl wait --timeout=2m"})
	if strings.Count(out, "(UUID: ") != 1 {
		t.Errorf("the output of the guide's commands:\n%s", out)
	}
	root := c.addNIC(t)
	for _, example := range guide.Manifests(t, "docs/dra.md") {
		c.apply(t, example)
	}
	for pod, gpus := range map[string]int{
		"default/large-gpu": 1, "default/nvlink-pair": 2, "gpu-monitor/monitor": -1, "default/one-gpu-for-two": 1,
		"default/first-choice": 1, "default/one-of-two": 1, "default/two-of-two": 1, "default/large-share": 1,
	} {
		namespace, name, _ := strings.Cut(pod, "/")
		c.kubectl(t, "-n", namespace, "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/"+name, "--timeout=2m")
		logs := c.kubectl(t, "-n", namespace, "logs", name)
		if n := strings.Count(logs, "(UUID: "); gpus > 0 && n != gpus || n != 4 && n != 8 && gpus < 0 {
			t.Errorf("pod %s sees %d GPUs, want %d:\n%s", pod, n, gpus, logs)
		}
	}
	first, second := c.kubectl(t, "logs", "one-gpu-for-two", "-c", "first"),
		c.kubectl(t, "logs", "one-gpu-for-two", "-c", "second")
	if first != second {
		t.Errorf("the containers of a pod see different GPUs:\n%s%s", first, second)
	}
	first, second = c.kubectl(t, "logs", "one-of-two"), c.kubectl(t, "logs", "two-of-two")
	if first != second {
		t.Errorf("the pods of a claim see different GPUs:\n%s%s", first, second)
	}
	testenv.Must(t, kubenode.Wait(t.Context(), patience, "the GPU beside the adapter", func() error {
		device := c.kubectl(t, "get", "resourceclaim", "gpu-and-nic", "-o",
			"jsonpath={.status.allocation.devices.results[?(@.request=='gpu')].device}")
		got := c.kubectl(t, "get", "resourceslices", "-o",
			`jsonpath={.items[*].spec.devices[?(@.name=="`+device+`")].attributes.resource\.kubernetes\.io/pcieRoot.string}`)
		if device == "" || got != root {
			return fmt.Errorf("it is %q on %q, want one on %q", device, got, root)
		}
		return nil
	}))
	for _, example := range guide.Manifests(t, "docs/dra.md") {
		c.removeAll(t, example)
	}
	c.kubectl(t, "delete", "-f", "../../docs/gpu-claim.yaml")
	c.kubectl(t, "delete", "resourceslice,deviceclass", "nic.example.com")
	c.uninstall(t)
}

// addNIC adds a network adapter to node2, which no driver prepares, and returns its PCIe root. A GPU has the same.
func (c *Cluster) addNIC(t testing.TB) (root string) {
	t.Helper()
	root = strings.Fields(c.kubectl(t, "get", "resourceslices", "--field-selector", "spec.nodeName=node2", "-o",
		`jsonpath={.items[*].spec.devices[*].attributes.resource\.kubernetes\.io/pcieRoot.string}`))[5]
	c.apply(t, `
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: nic.example.com}
spec: {selectors: [{cel: {expression: "device.driver == 'nic.example.com'"}}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: nic.example.com}
spec:
  driver: nic.example.com
  nodeName: node2
  pool: {name: node2, generation: 1, resourceSliceCount: 1}
  devices: [{name: nic-0, attributes: {resource.kubernetes.io/pcieRoot: {string: "`+root+`"}}}]
`)
	return root
}

// claimTemplate makes a template of claims for a number of GPUs.
func (c *Cluster) claimTemplate(t testing.TB, name string, count int) {
	t.Helper()
	c.claimTemplateOf(t, name, "gpu.nvidia.com", count)
}

// claimTemplateOf makes a template of claims for a number of devices of a class.
func (c *Cluster) claimTemplateOf(t testing.TB, name, class string, count int) {
	t.Helper()
	c.apply(t, fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %s}
spec: {spec: {devices: {requests: [{name: gpus, exactly: {deviceClassName: %s, count: %d}}]}}}
`, name, class, count))
}

// apply applies a manifest.
func (c *Cluster) apply(t testing.TB, manifest string) {
	t.Helper()
	c.kubectl(t, "apply", "-f", c.file(t, manifest))
}

// removeAll removes what is in a manifest.
func (c *Cluster) removeAll(t testing.TB, manifest string) {
	t.Helper()
	c.kubectl(t, "delete", "--timeout=2m", "-f", c.file(t, manifest))
}

// file writes a manifest into a file. kubectl splits a path with a comma, as that of t.TempDir may be.
func (c *Cluster) file(t testing.TB, manifest string) string {
	t.Helper()
	file := filepath.Join(c.Dir(), "manifest.yaml")
	testenv.Must(t, os.WriteFile(file, []byte(manifest), 0o600))
	return file
}

// published waits until the ResourceSlices of a node have this many devices, of which so many have a taint.
func (c *Cluster) published(t testing.TB, node string, devices, tainted int) {
	t.Helper()
	testenv.Must(t, kubenode.Wait(t.Context(), patience, "the ResourceSlices of "+node, func() error {
		if all, taints := c.devices(t, node); all != devices || taints != tainted {
			return fmt.Errorf("they have %d devices, %d of them with taints, want %d and %d", all, taints, devices, tainted)
		}
		return nil
	}))
}

// devices returns how many devices the ResourceSlices of a node have, and how many of these have a taint.
func (c *Cluster) devices(t testing.TB, node string) (all, tainted int) {
	t.Helper()
	var list struct {
		Items []struct {
			Spec struct {
				NodeName string
				Devices  []struct{ Taints []struct{ Key string } }
			}
		}
	}
	testenv.Must(t, json.Unmarshal([]byte(c.kubectl(t, "get", "resourceslices", "-o", "json")), &list))
	for _, s := range list.Items {
		if s.Spec.NodeName != node {
			continue
		}
		for _, d := range s.Spec.Devices {
			all++
			if len(d.Taints) > 0 {
				tainted++
			}
		}
	}
	return all, tainted
}

// holders waits until the verb claims of a node has these containers, each with so many devices.
func (c *Cluster) holders(t testing.TB, node string, want map[string]int) {
	t.Helper()
	testenv.Must(t, kubenode.Wait(t.Context(), patience, "the holders of "+node, func() error {
		pods := c.kubectl(t, "-n", plugin.namespace, "get", "pods", "-l", label,
			"--field-selector", "status.phase=Running,spec.nodeName="+node, "-o", "name")
		var claims struct {
			Holders []struct {
				Door       string
				Containers []struct{ Pod, Container string }
			}
		}
		out, err := c.Run(t.Context(), "kubectl", "-n", plugin.namespace, "exec", strings.TrimSpace(pods), "--",
			"/launcher", "run", "claims", "-o", "json")
		if err != nil {
			return err
		}
		testenv.Must(t, json.Unmarshal([]byte(out), &claims))
		got := map[string]int{}
		for _, h := range claims.Holders {
			for _, one := range h.Containers {
				got[one.Pod+"/"+one.Container+" by "+h.Door]++
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("-want +got\n%s", diff)
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
	given = slices.Compact(given) // several shares of a GPU are one GPU
	seen := c.seen(t, p, len(given))
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
