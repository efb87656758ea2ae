package cluster

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/guide"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestTheLifeOfARelease installs the chart on two nodes, upgrades and configures it under running pods, and removes it.
func TestTheLifeOfARelease(t *testing.T) {
	c := start(t)
	before := []map[string]string{listing(t, c.Nodes[0]), listing(t, c.Nodes[1])}
	var few, many PodStatus
	for _, step := range []struct {
		name string
		do   func(*testing.T)
	}{
		{"the commands of the guide install the chart, and a pod lists its GPU", func(t *testing.T) {
			out := c.follow(t, "docs/kubernetes.md", map[string]string{"kubectl wait": "kubectl wait --timeout=2m"})
			if !strings.Contains(out, "GPU 0: NVIDIA ") {
				t.Errorf("the output of the guide's commands:\n%s", out)
			}
			c.offers(t, 4, 8)
			c.end(t, "gpu")
		}},
		{"the scheduler places pods on both nodes, and each sees the GPUs that it was given", func(t *testing.T) {
			many = c.launch(t, Pod{Name: "many", GPUs: 6})
			few = c.launch(t, Pod{Name: "few", GPUs: 3}) // node2 has only two left
			if many.Spec.NodeName != "node2" || few.Spec.NodeName != "node1" {
				t.Errorf("the pods are on %s and %s", many.Spec.NodeName, few.Spec.NodeName)
			}
			c.check(t, many, 6)
			c.check(t, few, 3)
		}},
		{"an upgrade leaves running pods their GPUs, and new pods get others", func(t *testing.T) {
			c.helm(t, "upgrade", release, chart, "--reuse-values", "--set", "image.tag="+UpgradeTag)
			c.rolledOut(t, plugin)
			testenv.Must(t, kubenode.Wait(t.Context(), patience, "the old pods have ended", func() error {
				got := c.kubectl(t, "-n", plugin.namespace, "get", "pods", "-l", label, "-o",
					"jsonpath={.items[*].spec.containers[0].image}")
				if got != UpgradeImage+" "+UpgradeImage {
					return fmt.Errorf("the pods of the DaemonSet have the images %s", got)
				}
				return nil
			}))
			c.offers(t, 4, 8)
			held := append(c.check(t, many, 6), c.check(t, few, 3)...)
			for _, p := range []PodStatus{many, few} {
				now, err := c.pod(t.Context(), p.Metadata.Name)
				testenv.Must(t, err)
				if diff := cmp.Diff(p, now); diff != "" {
					t.Errorf("pod %s has changed (-before +after):\n%s", p.Metadata.Name, diff)
				}
			}
			fresh := c.launch(t, Pod{Name: "fresh", GPUs: 2})
			for _, uuid := range c.check(t, fresh, 2) {
				if slices.Contains(held, uuid) {
					t.Errorf("%s was given to two pods", uuid)
				}
			}
			c.end(t, "many", "few", "fresh")
		}},
		{"the label of a node chooses its configuration, and the other node keeps its own", func(t *testing.T) {
			const shared = "sharing: {time-slicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}"
			values := filepath.Join(t.TempDir(), "values.yaml")
			testenv.Must(t, os.WriteFile(values, []byte("config: {default: whole, map: {whole: '{}', shared: '"+
				shared+"'}}"), 0o600))
			c.helm(t, "upgrade", release, chart, "--reuse-values", "--values", values)
			c.rolledOut(t, plugin)
			c.kubectl(t, "label", "node", "node2", "nvidia.com/device-plugin.config=shared")
			c.offers(t, 4, 16)
			c.rolledOut(t, plugin)
			c.rolledOut(t, daemonSet{plugin.namespace, plugin.name + "-shared"})
			c.kubectl(t, "label", "node", "node2", "nvidia.com/device-plugin.config-")
			c.offers(t, 4, 8)
		}},
		{"after cleanup and uninstall nothing is left on the nodes", func(t *testing.T) {
			c.uninstall(t)
			c.unchanged(t, before)
		}},
	} {
		if !t.Run(step.name, step.do) {
			c.describe(t)
			t.FailNow()
		}
	}
}

// daemonSet names a DaemonSet.
type daemonSet struct{ namespace, name string }

// plugin is the DaemonSet of the release, which has the same name. Its pods have the label.
var plugin = daemonSet{"kube-system", release}

const (
	release = "gpu-cdi-plugin"
	label   = "app.kubernetes.io/name=gpu-cdi-plugin"
	chart   = "../../deploy/chart"
)

// follow runs the commands of a document's first block with the chart and the image of this tree, and with other
// replacements. It returns their output.
func (c *Cluster) follow(t testing.TB, document string, replacements map[string]string) string {
	t.Helper()
	root, err := suite.Root()
	testenv.Must(t, err)
	script := guide.First(t, document)
	maps.Copy(replacements, map[string]string{
		"dist/gpu-cdi-plugin-*.tgz": "deploy/chart", "registry.example.com/gpu-cdi-plugin": "localhost/gpu-cdi-plugin",
	})
	for old, replacement := range replacements {
		if !strings.Contains(script, old) {
			t.Errorf("%s has no %q", document, old)
		}
		script = strings.ReplaceAll(script, old, replacement)
	}
	out, err := c.run(t.Context(), root, "sh", "-e", "-c", script)
	testenv.Must(t, err)
	return out
}

// helm runs Helm in the namespace of the release.
func (c *Cluster) helm(t testing.TB, args ...string) {
	t.Helper()
	_, err := c.Run(t.Context(), "helm", append([]string{"--namespace", plugin.namespace}, args...)...)
	testenv.Must(t, err)
}

// kubectl runs kubectl and returns its output.
func (c *Cluster) kubectl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := c.Run(t.Context(), "kubectl", args...)
	testenv.Must(t, err)
	return out
}

// install installs the chart.
func (c *Cluster) install(t testing.TB, args ...string) {
	t.Helper()
	c.helm(t, append([]string{"install", release, chart}, args...)...)
}

// uninstall uninstalls the chart as its notes say, and waits until the pods are gone and the API server knows it. The
// kubelets remove the ResourceSlices of a driver that is gone after half a minute.
func (c *Cluster) uninstall(t testing.TB) {
	t.Helper()
	c.helm(t, "upgrade", release, chart, "--reuse-values", "--set", "cleanup=true")
	c.rolledOut(t, plugin)
	c.helm(t, "uninstall", release)
	c.kubectl(t, "-n", plugin.namespace, "wait", "--for=delete", "pod", "-l", label, "--timeout=2m")
	c.offers(t, 0, 0)
	for _, n := range c.Nodes {
		c.published(t, n.Name, 0, 0)
	}
}

// rolledOut waits until the pods of a DaemonSet are those of its latest version, and ready.
func (c *Cluster) rolledOut(t testing.TB, d daemonSet) {
	t.Helper()
	c.kubectl(t, "-n", d.namespace, "rollout", "status", "daemonset", d.name, "--timeout=4m")
}

// offers waits until the nodes have these numbers of GPUs.
func (c *Cluster) offers(t testing.TB, want ...int) {
	t.Helper()
	for i, n := range c.Nodes {
		testenv.Must(t, c.awaitAllocatable(t.Context(), n.Name, want[i]))
	}
}

// launch creates a pod and waits until it runs.
func (c *Cluster) launch(t testing.TB, p Pod) PodStatus {
	t.Helper()
	testenv.Must(t, c.create(t.Context(), p))
	s, err := c.awaitPhase(t.Context(), p.Name, "Running")
	testenv.Must(t, err)
	return s
}

// end removes pods and waits until they are gone.
func (c *Cluster) end(t testing.TB, names ...string) {
	t.Helper()
	c.kubectl(t, append([]string{"delete", "pod", "--timeout=2m"}, names...)...)
}

var uuidPattern = regexp.MustCompile(`\(UUID: (\S+)\)`)

// check checks that a running pod has a number of GPUs from the kubelet, sees exactly these, and may open their device
// nodes. It returns their UUIDs.
func (c *Cluster) check(t testing.TB, p PodStatus, count int) []string {
	t.Helper()
	i := slices.IndexFunc(c.Nodes, func(n *Node) bool { return n.Name == p.Spec.NodeName })
	assigned, err := c.Nodes[i].Assigned(t.Context())
	testenv.Must(t, err)
	given := assigned[p.Metadata.Name][gpuName]
	if len(given) != count {
		t.Errorf("pod %s has the GPUs %v, want %d", p.Metadata.Name, given, count)
	}
	seen := c.seen(t, p, count)
	if diff := cmp.Diff(given, seen); diff != "" {
		t.Errorf("GPUs of pod %s (-given +seen):\n%s", p.Metadata.Name, diff)
	}
	return seen
}

// seen returns the UUIDs of the GPUs that a running pod sees, and checks that it may open their device nodes.
func (c *Cluster) seen(t testing.TB, p PodStatus, count int) []string {
	t.Helper()
	const script = `nvidia-smi -L; for node in /dev/nvidia[0-9]*; do echo "$node"; (: <>"$node"); done 2>&1; true`
	out := c.kubectl(t, "exec", p.Metadata.Name, "--", "sh", "-c", script)
	var seen []string
	for _, m := range uuidPattern.FindAllStringSubmatch(out, -1) {
		seen = append(seen, m[1])
	}
	slices.Sort(seen)
	if n := strings.Count(out, "/dev/nvidia"); n < count || strings.Contains(out, "not permitted") {
		t.Errorf("device nodes of pod %s:\n%s", p.Metadata.Name, out)
	}
	return seen
}

// kept are the directories in which the kubelet, containerd and the network plugins keep what they need of pods that
// they had, such as images, logs and addresses.
var kept = []string{
	"/var/lib/containerd", "/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers", "/run/containerd",
	"/run/netns",
}

// listing describes the files of a node, but those that are kept. The kubelet's directories for plugins are listed.
func listing(t testing.TB, n *Node) map[string]string {
	t.Helper()
	root := fmt.Sprintf("/proc/%d/root", n.Pid())
	files := map[string]string{}
	for _, top := range []string{"/etc", "/run", "/var/lib", "/var/lib/kubelet", "/var/log"} {
		entries, err := os.ReadDir(root + top)
		testenv.Must(t, err)
		for _, e := range entries {
			path := filepath.Join(top, e.Name())
			if slices.Contains(kept, path) || top == "/var/lib/kubelet" && !strings.Contains(path, "plugin") {
				continue
			}
			for name, is := range image.Digest(t, root+path) {
				files[filepath.Join(path, name)] = is
			}
		}
	}
	// The kubelet's own record of devices, and the directory that all writers of CDI specs share.
	delete(files, "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
	delete(files, "/run/cdi")
	return files
}

// describe logs what helps to understand a failure.
func (c *Cluster) describe(t testing.TB) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, args := range [][]string{
		{"get", "pods", "-A", "-o", "wide"},
		{"describe", "pods", "-A"},
		{"get", "events", "-A"},
		{"-n", plugin.namespace, "logs", "-l", label, "--tail=40"},
	} {
		out, err := c.Run(ctx, "kubectl", args...)
		t.Logf("kubectl %q: %v\n%s", args, err, out)
	}
	for _, n := range c.Nodes {
		t.Logf("the end of the log of the kubelet of %s:\n%s", n.Name, kubenode.Tail(n.Kubelet.Log(), 40))
	}
}
