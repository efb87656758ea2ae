package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestCleanup removes the chart while pods have GPUs by both doors.
func TestCleanup(t *testing.T) {
	c := start(t)
	before := []map[string]string{listing(t, c.Nodes[0]), listing(t, c.Nodes[1])}
	const node = "node2"
	// The end of what the plugin's pod on the node waits for.
	const byClaim, byPlugin = " of pod default/by-claim (GPU-", "container main of pod default/by-plugin (GPU-"
	var owned map[string]string
	for _, step := range []struct {
		name string
		do   func(*testing.T)
	}{
		{"pods have GPUs by both doors", func(t *testing.T) {
			values := filepath.Join(t.TempDir(), "values.yaml")
			testenv.Must(t, os.WriteFile(values, []byte("dra: {enabled: true}\n"+
				"config: {map: {default: '{door: both, dra-gpus: [0]}'}}"), 0o600))
			c.install(t, "--values", values)
			c.offers(t, 3, 7)
			c.published(t, node, 1, 0)
			c.claimTemplate(t, "one", 1)
			c.check(t, c.launch(t, Pod{Name: "by-plugin", GPUs: 1, Node: node, Restarts: true}), 1)
			c.checkClaims(t, c.launch(t, Pod{Name: "by-claim", Claims: []string{"one"}, Node: node, Restarts: true}), 1)
		}},
		{"the command of the notes cleans the other node, and removes nothing of the pods", func(t *testing.T) {
			owned = c.owned(t, node)
			c.followNotes(t)
			c.offers(t, 0, 0)
			c.published(t, node, 0, 0)
			c.waitsFor(t, node, byClaim, byPlugin)
			c.cleaned(t, "node1")
			if c.isReady(t, node) {
				t.Error("the plugin's pod is ready")
			}
			if diff := cmp.Diff(owned, c.owned(t, node)); diff != "" || len(owned) < 4 {
				t.Errorf("the plugin's files on the node (-before +after):\n%s", diff)
			}
		}},
		{"the containers of the pods can restart", func(t *testing.T) {
			for _, name := range []string{"by-plugin", "by-claim"} {
				// The command may be killed with the container.
				_, _ = c.Run(t.Context(), "kubectl", "exec", name, "--", "sh", "-c", "kill 1")
				testenv.Must(t, kubenode.Wait(t.Context(), patience, name+" runs again", func() error {
					p, err := c.pod(t.Context(), name)
					if err == nil && (p.Status.ContainerStatuses[0].RestartCount == 0 || !p.Status.ContainerStatuses[0].Ready) {
						err = fmt.Errorf("its status is %+v", p.Status)
					}
					return err
				}))
			}
			for _, name := range []string{"by-plugin", "by-claim"} {
				p, err := c.pod(t.Context(), name)
				testenv.Must(t, err)
				c.seen(t, p, 1)
			}
		}},
		{"the pods end, and the node is cleaned when none is left", func(t *testing.T) {
			c.end(t, "by-claim")
			c.waitsFor(t, node, "end their pods: "+byPlugin)
			if c.isReady(t, node) {
				t.Error("the plugin's pod is ready")
			}
			c.end(t, "by-plugin")
			c.cleaned(t, node)
		}},
		{"nothing is left", func(t *testing.T) {
			c.kubectl(t, "delete", "resourceclaimtemplates", "--all")
			c.uninstall(t)
			c.unchanged(t, before)
		}},
		{"with cleanupForce a container of the device plugin does not block", func(t *testing.T) {
			c.install(t)
			c.offers(t, 4, 8)
			c.check(t, c.launch(t, Pod{Name: "by-plugin", GPUs: 1, Node: node}), 1)
			c.helm(t, "upgrade", release, chart, "--reuse-values", "--set", "cleanup=true,cleanupForce=true")
			c.cleaned(t, node)
			p, err := c.pod(t.Context(), "by-plugin")
			testenv.Must(t, err)
			if p.Status.Phase != "Running" {
				t.Errorf("the pod is %+v", p.Status)
			}
			c.waitsFor(t, node, "although containers have devices: "+byPlugin)
			c.end(t, "by-plugin")
			c.uninstall(t)
			c.unchanged(t, before)
		}},
	} {
		if !t.Run(step.name, step.do) {
			c.describe(t)
			t.Log(c.kubectl(t, "get", "resourceslices,resourceclaims", "-A", "-o", "yaml"))
			t.FailNow()
		}
	}
}

// followNotes runs the command that the notes of the release have for its cleanup.
func (c *Cluster) followNotes(t testing.TB) {
	t.Helper()
	notes, err := c.Run(t.Context(), "helm", "--namespace", plugin.namespace, "get", "notes", release)
	testenv.Must(t, err)
	_, command, found := strings.Cut(notes, "\n  helm upgrade ")
	command, _, _ = strings.Cut(command, "\n")
	if !found || !strings.Contains(command, " CHART ") {
		t.Fatalf("the notes have no command for the cleanup:\n%s", notes)
	}
	args := strings.Fields(strings.Replace(command, " CHART ", " "+chart+" ", 1))
	_, err = c.Run(t.Context(), "helm", append([]string{"upgrade"}, args...)...)
	testenv.Must(t, err)
}

// owned describes the files of the plugin on a node that its pods need: specs, records and programs.
func (c *Cluster) owned(t testing.TB, node string) map[string]string {
	t.Helper()
	files := map[string]string{}
	for _, n := range c.Nodes {
		if n.Name == node {
			for path, is := range listing(t, n) {
				program := strings.HasPrefix(path, "/var/lib/gpu-cdi-plugin/bin/")
				record := strings.HasPrefix(path, "/var/lib/gpu-cdi-plugin/claims/") && filepath.Ext(path) == ".json"
				if program || record || filepath.Base(path) == "nvidia.com-gpu.json" {
					files[path] = is
				}
			}
		}
	}
	return files
}

// pluginPod has what tests read of the plugin's pod.
type pluginPod struct {
	Metadata struct{ Name string }
	Status   struct {
		Conditions []struct{ Type, Status string }
	}
}

// ofPlugin returns the plugin's pod on a node, without one that is about to end.
func (c *Cluster) ofPlugin(t testing.TB, node string) (p pluginPod, found bool) {
	t.Helper()
	var list struct{ Items []pluginPod }
	testenv.Must(t, json.Unmarshal([]byte(c.kubectl(t, "-n", plugin.namespace, "get", "pods", "-l", label,
		"--field-selector", "spec.nodeName="+node, "-o", "json")), &list))
	if len(list.Items) != 1 {
		return pluginPod{}, false
	}
	return list.Items[0], true
}

func (c *Cluster) isReady(t testing.TB, node string) bool {
	t.Helper()
	p, _ := c.ofPlugin(t, node)
	for _, condition := range p.Status.Conditions {
		if condition.Type == "Ready" {
			return condition.Status == "True"
		}
	}
	return false
}

// waitsFor waits until the last word of the plugin's pod on a node, in the log of its init container, has these texts.
func (c *Cluster) waitsFor(t testing.TB, node string, texts ...string) {
	t.Helper()
	testenv.Must(t, kubenode.Wait(t.Context(), patience, "the pod of "+node+" says whom it waits for", func() error {
		p, found := c.ofPlugin(t, node)
		if !found {
			return errors.New("the old pod has not ended")
		}
		log, err := c.Run(t.Context(), "kubectl", "-n", plugin.namespace, "logs", p.Metadata.Name, "-c", "leave")
		if err != nil {
			return err
		}
		last := ""
		for line := range strings.Lines(log) {
			if strings.Contains(line, "this program") {
				last = line
			}
		}
		for _, text := range texts {
			if !strings.Contains(last, text) {
				return fmt.Errorf("want %q, its log is\n%s", text, log)
			}
		}
		return nil
	}))
}

// cleaned waits until the plugin's pod on a node is ready, and checks that the node has no spec any more.
func (c *Cluster) cleaned(t testing.TB, node string) {
	t.Helper()
	testenv.Must(t, kubenode.Wait(t.Context(), patience, node+" is clean", func() error {
		p, _ := c.ofPlugin(t, node)
		if !c.isReady(t, node) { // files may be removed right now
			return fmt.Errorf("the pod is %+v", p)
		}
		if files := c.owned(t, node); len(files) > 0 { // the pod of before was ready too
			return fmt.Errorf("the pod is %+v, and the node has %v", p, files)
		}
		return nil
	}))
}

// unchanged checks that the nodes have the files of before.
func (c *Cluster) unchanged(t testing.TB, before []map[string]string) {
	t.Helper()
	for i, n := range c.Nodes {
		if diff := cmp.Diff(before[i], listing(t, n)); diff != "" {
			t.Errorf("the files of %s (-before +after):\n%s", n.Name, diff)
		}
	}
}
