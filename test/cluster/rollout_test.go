package cluster

import (
	"flag"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

var draRollouts = flag.Int("dra-rollouts", 5, "rollouts with door dra in TestNewPodsDuringRollouts")

// TestNewPodsDuringRollouts replaces the plugin's pod 20 times, and then that of NVIDIA's plugin, while new pods with
// GPUs are created all the time. Pods that come while a plugin is away fail for good.
func TestNewPodsDuringRollouts(t *testing.T) {
	c := start(t)
	defer func() {
		if t.Failed() {
			c.describe(t)
		}
	}()
	if ours := c.rollOutPlugin(t, 20); ours.Failures() > 0 {
		t.Errorf("new pods during rollouts: %v", ours)
	}
	if ours := c.rollOutDRA(t, *draRollouts); ours.Failures() > 0 {
		t.Errorf("new pods with claims during rollouts: %v", ours)
	}
	c.rollOutNVIDIA(t, 5)
}

// rollOutPlugin installs the chart on node2, has the DaemonSet replace its pod a number of times, and removes it.
func (c *Cluster) rollOutPlugin(t testing.TB, times int) Outcome {
	t.Helper()
	c.install(t, "--set", `nodeSelector.kubernetes\.io/hostname=node2`)
	defer c.uninstall(t)
	c.offers(t, 0, 8)
	return c.rollOut(t, plugin, times, Pod{Node: "node2", GPUs: 1})
}

// rollOutDRA does the same with the door dra and pods with claims, which wait for a driver that is away.
func (c *Cluster) rollOutDRA(t testing.TB, times int) Outcome {
	t.Helper()
	c.install(t, "--set", `nodeSelector.kubernetes\.io/hostname=node2,dra.enabled=true,door=dra`)
	defer c.uninstall(t)
	c.published(t, "node2", 8, 0)
	c.claimTemplate(t, "one", 1)
	defer c.kubectl(t, "delete", "resourceclaimtemplates", "--all")
	outcome := c.rollOut(t, plugin, times, Pod{Node: "node2", Claims: []string{"one"}})
	for _, text := range c.lostCalls(t) {
		t.Errorf("a call of the kubelet is lost: %s", text)
	}
	return outcome
}

// lostCalls returns the events of pods of the stream for whose claims the kubelet found no driver, or got no answer.
// Such a pod waits until the kubelet's next sync, which is one minute with its default configuration.
func (c *Cluster) lostCalls(t testing.TB) (texts []string) {
	t.Helper()
	var events struct {
		Items []struct {
			InvolvedObject struct{ Name string }
			Message        string
		}
	}
	const path = "/api/v1/namespaces/default/events?fieldSelector=reason=FailedPrepareDynamicResources"
	testenv.Must(t, c.client.do(t.Context(), http.MethodGet, path, nil, &events))
	for _, e := range events.Items {
		lost := strings.Contains(e.Message, "rpc error") || strings.Contains(e.Message, "is not registered")
		if lost && strings.HasPrefix(e.InvolvedObject.Name, "stream-") {
			texts = append(texts, e.InvolvedObject.Name+": "+e.Message)
		}
	}
	return texts
}

// rollOutNVIDIA does the same with NVIDIA's device plugin and its default strategy, maxUnavailable 1.
func (c *Cluster) rollOutNVIDIA(t testing.TB, times int) Outcome {
	t.Helper()
	c.installNVIDIA(t)
	defer c.removeNVIDIA(t)
	c.offers(t, 0, 8)
	return c.rollOut(t, nvidia, times, Pod{Node: "node2", GPUs: 1})
}

// rollOut has a DaemonSet of node2 replace its pod a number of times, one rollout after the other, each until a new pod
// with a GPU has succeeded. It returns what became of the pods that a stream created meanwhile.
func (c *Cluster) rollOut(t testing.TB, d daemonSet, times int, p Pod) Outcome {
	t.Helper()
	c.rolledOut(t, d)
	s := c.startStream(t.Context(), p)
	testenv.Must(t, s.awaitSuccess(t.Context()))
	for range times {
		c.kubectl(t, "-n", d.namespace, "rollout", "restart", "daemonset", d.name)
		c.rolledOut(t, d)
		testenv.Must(t, s.awaitSuccess(t.Context()))
	}
	outcome, err := s.Stop()
	testenv.Must(t, err)
	t.Logf("new pods during %d rollouts of %s: %v; %.1f failed in each", times, d.name, outcome,
		float64(outcome.Failures())/float64(times))
	return outcome
}

// TestMoveFromNVIDIAsPlugin follows the guide on node2, while a pod runs that NVIDIA's plugin has given GPUs.
func TestMoveFromNVIDIAsPlugin(t *testing.T) {
	c := start(t)
	defer func() {
		if t.Failed() {
			c.describe(t)
		}
	}()
	c.installNVIDIA(t)
	defer c.removeNVIDIA(t)
	c.offers(t, 0, 8)
	before := c.launch(t, Pod{Name: "before", GPUs: 6})
	c.follow(t, "docs/migrating.md", map[string]string{" NODE ": " node2 "})
	defer c.kubectl(t, "label", "nodes", "--all", "gpu-plugin-")
	defer c.uninstall(t)
	c.kubectl(t, "-n", nvidia.namespace, "wait", "--for=delete", "pod", "--all", "--timeout=2m")
	c.offers(t, 0, 8)
	c.check(t, c.launch(t, Pod{Name: "after", GPUs: 2}), 2)
	now, err := c.pod(t.Context(), "before")
	testenv.Must(t, err)
	if diff := cmp.Diff(before, now); diff != "" {
		t.Errorf("the pod from before the move (-before +after):\n%s", diff)
	}
	c.end(t, "before", "after")
}

// nvidia is the DaemonSet of NVIDIA's chart.
var nvidia = daemonSet{"nvidia-device-plugin", "nvidia-device-plugin-daemonset"}

// installNVIDIA runs NVIDIA's device plugin on node2, in the directory of the node's machine, which gets a C
// library. Its containers get a variable only, and no devices.
func (c *Cluster) installNVIDIA(t testing.TB) {
	t.Helper()
	const script = `set -e
busybox mkdir -p /machine/run/proc
busybox mount -t proc proc /machine/run/proc
busybox ln -sfn /run/proc/self /machine/proc/self
exec busybox chroot /machine /usr/bin/nvidia-device-plugin --device-list-strategy=envvar --driver-root-ctr-path=/ ` +
		`--gdrcopy-enabled=false --gds-enabled=false --mofed-enabled=false`
	program := shared.NodePeer(t, "nvidia-device-plugin")
	root := c.Nodes[1].GPUs.Root()
	if _, err := os.Stat(filepath.Join(root, "usr/bin", filepath.Base(program))); err != nil { // of an earlier test
		suite.Install(t, root, program)
	}
	manifest := map[string]any{
		"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": map[string]any{"name": nvidia.name},
		"spec": map[string]any{
			"selector": map[string]any{"matchLabels": map[string]any{"name": nvidia.name}},
			"template": map[string]any{
				"metadata": map[string]any{"labels": map[string]any{"name": nvidia.name}},
				"spec": map[string]any{
					"nodeSelector": map[string]any{"kubernetes.io/hostname": "node2"},
					"containers": []any{map[string]any{
						"name": "main", "image": ToolImage, "imagePullPolicy": "Never", "command": []string{"sh", "-c", script},
						"securityContext": map[string]any{"privileged": true},
						"volumeMounts": []any{
							map[string]any{"name": "machine", "mountPath": "/machine"},
							map[string]any{"name": "kubelet", "mountPath": "/machine" + devicePlugins},
						},
					}},
					"volumes": []any{
						map[string]any{"name": "machine", "hostPath": map[string]any{"path": machineRoot}},
						map[string]any{"name": "kubelet", "hostPath": map[string]any{"path": devicePlugins}},
					},
				},
			},
		},
	}
	c.kubectl(t, "create", "namespace", nvidia.namespace)
	path := "/apis/apps/v1/namespaces/" + nvidia.namespace + "/daemonsets"
	testenv.Must(t, c.client.do(t.Context(), http.MethodPost, path, manifest, nil))
}

const devicePlugins = "/var/lib/kubelet/device-plugins"

// removeNVIDIA removes NVIDIA's device plugin, and waits until the API server knows that node2 has lost its GPUs.
func (c *Cluster) removeNVIDIA(t testing.TB) {
	t.Helper()
	c.kubectl(t, "delete", "namespace", nvidia.namespace)
	c.offers(t, 0, 0)
}
