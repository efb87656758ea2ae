package cluster

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestOneHolder changes a node under running pods in all ways that once gave a GPU to two of them. The oracle watches
// the containers meanwhile.
func TestOneHolder(t *testing.T) {
	h := watchHolders(t)
	defer h.end(t)
	for _, test := range []struct {
		name string
		do   func(*holdersTest, *testing.T)
	}{
		// The first two begin without our plugin on the node.
		{"a claim that another driver of our name has prepared", (*holdersTest).foreignDriver},
		{"NVIDIA's device plugin before and after ours", (*holdersTest).nvidiaBeforeAndAfter},
		{"a pod deleted by force, whose containers run on", (*holdersTest).deletedByForce},
		{"a MIG device, and its GPU that is whole again", (*holdersTest).migDeviceAndGPU},
		{"a MIG device, and its GPU that has other MIG devices", (*holdersTest).migDeviceAndOthers},
		{"an init container, and the door dra", (*holdersTest).initContainerAndDRA},
		{"an init container, and shares with a name of their own", (*holdersTest).initContainerAndShares},
		{"a claim that waits for a pod deleted by force", (*holdersTest).refusedClaim},
		{"a claim that the API server does not have any more", (*holdersTest).claimWithoutObject},
		{"a claim of a MIG device, and its GPU that is whole again", (*holdersTest).migClaim},
		{"a claim whose record is lost", (*holdersTest).lostRecord},
	} {
		t.Run(test.name, func(t *testing.T) {
			h.Reset()
			defer h.clear(t)
			test.do(h, t)
			testenv.Must(t, h.Err())
		})
	}
}

// holdersTest is a release on node2, whose configuration a label chooses, and the oracle of that node. The plugin runs
// there once a configuration is chosen.
type holdersTest struct {
	*Oracle
	c      *Cluster
	node   *Node
	config string // that of the node's label; empty if the plugin is not there
}

// Labels of node2.
const (
	chooses = "nvidia.com/device-plugin.config"
	hasOurs = "has-our-plugin"
)

const timeSlicing = "sharing: {time-slicing: {resources: [{name: nvidia.com/gpu, rename: " + sharedName +
	", replicas: 4}]}}"

const (
	sharedName = "nvidia.com/gpu.shared"
	migName    = "nvidia.com/mig-3g.40gb"
	smallName  = "nvidia.com/mig-1g.10gb"
)

// configurations are those of the release. Shares have a name of their own, so that a pod's request says whether others
// may have its GPU too.
var configurations = map[string]string{
	"whole": "{}", "dra": "door: dra", "shared": timeSlicing, "dra-shared": "door: dra\n" + timeSlicing,
}

// watchHolders installs the release and starts the oracle.
func watchHolders(t *testing.T) *holdersTest {
	t.Helper()
	c := start(t)
	h := &holdersTest{c: c, node: c.Nodes[1]}
	values := "nodeSelector: {" + hasOurs + ": here}\nmigStrategy: mixed\ndra: {enabled: true}\nconfig:\n" +
		"  default: whole\n  map:\n"
	for name, text := range configurations {
		values += fmt.Sprintf("    %s: %q\n", name, text)
	}
	file := filepath.Join(t.TempDir(), "values.yaml")
	testenv.Must(t, os.WriteFile(file, []byte(values), 0o600))
	c.install(t, "--values", file)
	for name, class := range map[string]string{
		"one": "gpu.nvidia.com", "eight": "gpu.nvidia.com", "mig": "mig.nvidia.com", "share": "shared.gpu.nvidia.com",
	} {
		count := 1
		if name == "eight" {
			count = 8
		}
		c.claimTemplateOf(t, name, class, count)
	}
	var err error
	h.Oracle, err = StartOracle(t.Context(), h.node)
	testenv.Must(t, err)
	return h
}

// end ends the oracle and removes the release.
func (h *holdersTest) end(t testing.TB) {
	t.Helper()
	if t.Failed() {
		h.empty(t)
	}
	testenv.Must(t, h.Close())
	h.choose(t, "whole") // the plugin must be there for its cleanup
	h.c.kubectl(t, "delete", "resourceclaimtemplates", "--all")
	h.c.uninstall(t)
	h.c.kubectl(t, "label", "node", h.node.Name, chooses+"-", hasOurs+"-")
}

// choose chooses a configuration by the node's label and waits until the plugin serves it. Without a name the plugin
// leaves the node.
func (h *holdersTest) choose(t testing.TB, config string) {
	t.Helper()
	h.label(t, config)
	// A DaemonSet whose controller does not know the label yet is rolled out.
	h.await(t, patience, "the plugin of the configuration "+config+" is alone and ready", func() error {
		const component, ready = `.metadata.labels.app\.kubernetes\.io/component`, `.status.conditions[?(@.type=="Ready")]`
		got := h.c.kubectl(t, "-n", plugin.namespace, "get", "pods", "-l", label, "-o",
			"jsonpath={range .items[*]}{"+component+"} {"+ready+".status} {end}")
		want := h.daemonSet(config) + " True "
		if config == "" {
			want = ""
		}
		if got != want {
			return fmt.Errorf("the pods are %q", got)
		}
		return nil
	})
}

// label sets the labels of the node for a configuration.
func (h *holdersTest) label(t testing.TB, config string) {
	t.Helper()
	labels := map[string]string{"": hasOurs + "- " + chooses + "-", "whole": hasOurs + "=here " + chooses + "-"}
	words := cmp.Or(labels[config], hasOurs+"=here "+chooses+"="+config)
	h.c.kubectl(t, append([]string{"label", "node", h.node.Name, "--overwrite"}, strings.Fields(words)...)...)
	h.config = config
}

// daemonSet returns the DaemonSet of a configuration; the default one has the name of the release.
func (h *holdersTest) daemonSet(config string) string {
	if config == "whole" {
		return plugin.name
	}
	return plugin.name + "-" + config
}

// clear deletes all pods and the MIG devices, and waits until no container has a GPU. It describes a failure first.
func (h *holdersTest) clear(t *testing.T) {
	t.Helper()
	if t.Failed() {
		t.Log(h.Holders())
		h.c.describe(t)
		t.Log(h.c.Run(context.Background(), "kubectl", "get", "resourceslices,resourceclaims", "-A", "-o", "yaml"))
	}
	h.empty(t)
}

// empty does that without a description.
func (h *holdersTest) empty(t testing.TB) {
	t.Helper()
	if t.Failed() {
		h.choose(t, "dra") // a pod with a claim is deleted only where its driver is
	}
	h.c.kubectl(t, "delete", "pods", "--all", "--grace-period=1", "--timeout=2m")
	h.setMIG(t)
	h.await(t, patience, "no container has a GPU", func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		if len(h.running) > 0 {
			return fmt.Errorf("%d have", len(h.running))
		}
		return nil
	})
}

// setMIG replaces the MIG devices of GPU 0. Without profiles its MIG mode is off.
func (h *holdersTest) setMIG(t testing.TB, profiles ...string) {
	t.Helper()
	h.SetLayout(0, profiles)
	if len(profiles) == 0 {
		testenv.Must(t, h.node.GPUs.DisableMIG(0))
		return
	}
	testenv.Must(t, h.node.GPUs.SetMIG(0, profiles))
}

// await waits until f returns no error. It ends the test as soon as a GPU has two holders.
func (h *holdersTest) await(t testing.TB, limit time.Duration, what string, f func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	testenv.Must(t, kubenode.Wait(ctx, limit, what, func() error {
		if err := h.Err(); err != nil && !t.Failed() {
			cancel()
			return err
		}
		return f()
	}))
}

// capacity waits until the node's status has this many devices of a resource, for pods or not.
func (h *holdersTest) capacity(t testing.TB, name string, want int) {
	t.Helper()
	h.await(t, patience, fmt.Sprintf("the node has %d of %s", want, name), func() error {
		got, _, err := h.c.resource(t.Context(), h.node.Name, name)
		if err == nil && got != want {
			err = fmt.Errorf("it has %d", got)
		}
		return err
	})
}

// slices waits until the node's ResourceSlices have this many devices. How many have a taint is for others to check.
func (h *holdersTest) slices(t testing.TB, want int) {
	t.Helper()
	h.await(t, patience, fmt.Sprintf("the ResourceSlices have %d devices", want), func() error {
		if got, _ := h.c.devices(t, h.node.Name); got != want {
			return fmt.Errorf("they have %d", got)
		}
		return nil
	})
}

// tainted waits until this many devices of the node's ResourceSlices have a taint.
func (h *holdersTest) tainted(t testing.TB, want int) {
	t.Helper()
	h.await(t, time.Minute, fmt.Sprintf("%d devices have a taint", want), func() error {
		if _, got := h.c.devices(t, h.node.Name); got != want {
			return fmt.Errorf("%d have", got)
		}
		return nil
	})
}

// create creates pods like this one on the node.
func (h *holdersTest) create(t testing.TB, p Pod, names ...string) {
	t.Helper()
	for _, name := range names {
		p.Name, p.Node, p.Labels = name, h.node.Name, map[string]string{"holders": "yes"}
		testenv.Must(t, h.c.create(t.Context(), p))
	}
}

// launch creates a pod and waits until it runs.
func (h *holdersTest) launch(t testing.TB, name string, p Pod) {
	t.Helper()
	h.create(t, p, name)
	h.run(t, patience, 1, name)
}

// run waits until this many of some pods run.
func (h *holdersTest) run(t testing.TB, limit time.Duration, want int, names ...string) {
	t.Helper()
	h.await(t, limit, fmt.Sprintf("%d of the pods %v run", want, names), func() error {
		running, err := h.countRunning(t, names)
		if err == nil && running < want {
			err = fmt.Errorf("%d run", running)
		}
		return err
	})
}

func (h *holdersTest) countRunning(t testing.TB, names []string) (running int, err error) {
	for _, name := range names {
		p, err := h.c.pod(t.Context(), name)
		if err != nil {
			return 0, err
		}
		if p.Status.Phase == "Running" {
			running++
		}
	}
	return running, nil
}

// wait checks that no more than this many of some pods run, after a pod that was created later and needs no GPU.
func (h *holdersTest) wait(t testing.TB, want int, names ...string) {
	t.Helper()
	h.launch(t, "without-a-gpu", Pod{})
	h.c.end(t, "without-a-gpu")
	testenv.Must(t, h.Err())
	if running, err := h.countRunning(t, names); err != nil || running != want {
		t.Errorf("%d of the pods %v run (error: %v), want %d", running, names, err, want)
	}
}

// names returns the names of pods.
func names(prefix string, count int) (all []string) {
	for i := range count {
		all = append(all, fmt.Sprint(prefix, "-", i))
	}
	return all
}

// A pod deleted by force has its GPUs until its containers end. The kubelet gives them to the next pod at once.
func (h *holdersTest) deletedByForce(t *testing.T) {
	h.choose(t, "whole")
	h.capacity(t, gpuName, 8)
	h.launch(t, "old", Pod{GPUs: 8, Command: untilKill, Grace: 30})
	testenv.Must(t, h.c.forceRemove(t.Context(), "old"))
	h.create(t, Pod{GPUs: 8}, "new")
	h.run(t, 30*time.Second, 1, "new")
}

// A container that has a MIG device can open the node of its GPU, also when the GPU is whole again.
func (h *holdersTest) migDeviceAndGPU(t *testing.T) {
	h.launchMIG(t)
	h.setMIG(t)
	h.capacity(t, gpuName, 8)
	whole := names("whole", 8)
	h.create(t, Pod{GPUs: 1}, whole...)
	h.run(t, patience, 7, whole...)
	h.wait(t, 7, whole...)
	h.c.end(t, "holder")
	h.run(t, patience, 8, whole...)
}

// The driver may use the number of a GPU instance again, for which the container has the capability.
func (h *holdersTest) migDeviceAndOthers(t *testing.T) {
	h.launchMIG(t)
	h.setMIG(t, "1g.10gb", "1g.10gb")
	h.capacity(t, smallName, 2)
	h.create(t, Pod{GPUs: 1, Resource: smallName}, "small")
	h.wait(t, 0, "small")
	h.c.end(t, "holder")
	h.run(t, patience, 1, "small")
}

// launchMIG launches a pod "holder" that has a MIG device of GPU 0 from the device plugin.
func (h *holdersTest) launchMIG(t testing.TB) {
	t.Helper()
	h.choose(t, "whole")
	h.setMIG(t, "3g.40gb", "3g.40gb")
	h.capacity(t, migName, 2)
	h.capacity(t, gpuName, 7)
	h.launch(t, "holder", Pod{GPUs: 1, Resource: migName})
}

// The kubelet does not list init containers. While one runs, no claim gets its GPUs.
func (h *holdersTest) initContainerAndDRA(t *testing.T) {
	h.launchInit(t)
	h.choose(t, "dra")
	h.slices(t, 8)
	claims := names("claim", 7)
	h.create(t, Pod{Claims: []string{"one"}}, claims...)
	h.run(t, patience, 6, claims...)
	h.wait(t, 6, claims...)
	h.c.end(t, "init")
	h.run(t, patience, 7, claims...)
}

// The names of all devices change, so the kubelet takes the GPUs of the init container for free ones.
func (h *holdersTest) initContainerAndShares(t *testing.T) {
	h.launchInit(t)
	h.choose(t, "shared")
	h.capacity(t, sharedName, 32)
	shares := names("share", 7) // of seven GPUs, if so many have a free share
	h.create(t, Pod{GPUs: 1, Resource: sharedName, Shares: true}, shares...)
	h.run(t, patience, 7, shares...)
}

// launchInit launches a pod whose init container runs and has more GPUs than the containers after it.
func (h *holdersTest) launchInit(t testing.TB) {
	t.Helper()
	h.choose(t, "whole")
	h.capacity(t, gpuName, 8)
	h.create(t, Pod{Init: []Container{{Name: "first", GPUs: 2}}, GPUs: 1}, "init")
	h.await(t, patience, "the init container runs", func() error {
		p, err := h.c.pod(t.Context(), "init")
		s := p.Status.InitContainerStatuses
		if err == nil && (len(s) == 0 || s[0].State.Running == nil) {
			err = fmt.Errorf("the pod is %+v", p.Status)
		}
		return err
	})
}

// A claim whose GPUs are not free yet is refused. The kubelet asks again after a minute at the latest, and a pod must
// not wait so long.
func (h *holdersTest) refusedClaim(t *testing.T) {
	h.choose(t, "dra")
	h.slices(t, 8)
	h.launch(t, "old", Pod{Claims: []string{"eight"}, Command: untilKill, Grace: 30})
	testenv.Must(t, h.c.forceRemove(t.Context(), "old"))
	h.create(t, Pod{Claims: []string{"eight"}}, "new")
	h.run(t, 15*time.Second, 1, "new")
}

// A claim was deleted by force while its pod runs: the scheduler takes its GPU for a free one until that has a taint.
func (h *holdersTest) claimWithoutObject(t *testing.T) {
	h.choose(t, "dra")
	h.slices(t, 8)
	h.launch(t, "holder", Pod{Claims: []string{"one"}})
	claim := h.c.kubectl(t, "get", "pod", "holder", "-o", "jsonpath={.status.resourceClaimStatuses[0].resourceClaimName}")
	h.c.kubectl(t, "delete", "resourceclaim", claim, "--wait=false")
	h.c.kubectl(t, "patch", "resourceclaim", claim, "--type=merge", "--patch", `{"metadata": {"finalizers": null}}`)
	h.tries(t)
}

// The scheduler does not know that a claim of a MIG device, which is not there any more, holds the whole GPU.
func (h *holdersTest) migClaim(t *testing.T) {
	h.choose(t, "dra")
	h.setMIG(t, "3g.40gb", "3g.40gb")
	h.slices(t, 9)
	h.launch(t, "holder", Pod{Claims: []string{"mig"}})
	h.setMIG(t)
	h.slices(t, 8)
	h.tries(t)
}

// tries has a pod claim all GPUs of the node, one of which the pod "holder" has by a claim that the scheduler does not
// count. It waits until that GPU has a taint, ends the holder, and waits until the new pod runs.
func (h *holdersTest) tries(t testing.TB) {
	t.Helper()
	h.create(t, Pod{Claims: []string{"eight"}}, "next")
	h.tainted(t, 1)
	h.wait(t, 0, "next")
	h.c.end(t, "holder")
	h.tainted(t, 0)
	h.run(t, patience, 1, "next")
}

// The plugin has lost its record of a claim, and the device plugin does not give the GPU to others.
func (h *holdersTest) lostRecord(t *testing.T) {
	h.choose(t, "dra")
	h.slices(t, 8)
	h.launch(t, "stay", Pod{Claims: []string{"one"}})
	h.loseRecords(t)
	h.killPlugin(t)
	h.choose(t, "whole")
	h.capacity(t, gpuName, 8)
	plain := names("plain", 8)
	h.create(t, Pod{GPUs: 1}, plain...)
	h.run(t, patience, 7, plain...)
	h.wait(t, 7, plain...)
	h.c.end(t, "stay")
	h.run(t, patience, 8, plain...)
}

// loseRecords removes the records of claims.
func (h *holdersTest) loseRecords(t testing.TB) {
	t.Helper()
	records, err := filepath.Glob(h.node.Host("/var/lib/gpu-cdi-plugin/claims/*.json"))
	testenv.Must(t, err)
	for _, file := range records {
		testenv.Must(t, os.Remove(file))
	}
}

// killPlugin kills all processes of the plugin on the node.
func (h *holdersTest) killPlugin(t testing.TB) {
	t.Helper()
	_, err := h.node.Run(t.Context(), "sh", "-c", `for p in /proc/[0-9]*; do
read -r name <$p/comm; [ "$name" = gpu-cdi-plugin ] && kill -KILL ${p#/proc/}; done 2>/dev/null`)
	testenv.Must(t, err)
}

// NVIDIA's device plugin has the names of our devices. Pods keep their GPUs when one takes the place of the other.
func (h *holdersTest) nvidiaBeforeAndAfter(t *testing.T) {
	h.choose(t, "")
	h.c.installNVIDIA(t)
	h.capacity(t, gpuName, 8)
	h.launch(t, "before-ours", Pod{GPUs: 2})
	h.c.removeNVIDIA(t)

	h.choose(t, "whole")
	h.launch(t, "ours", Pod{GPUs: 2})
	h.choose(t, "dra")
	h.slices(t, 8)
	claims := names("claim", 5)
	h.create(t, Pod{Claims: []string{"one"}}, claims...)
	h.run(t, patience, 4, claims...)
	h.wait(t, 4, claims...)
	h.c.end(t, claims...)

	h.choose(t, "") // NVIDIA's plugin would give GPUs that claims have
	h.c.installNVIDIA(t)
	defer h.c.removeNVIDIA(t)
	h.slices(t, 0) // the scheduler has DRA serve the pod as long as these are there
	h.c.offers(t, 0, 8)
	h.launch(t, "after-ours", Pod{GPUs: 4})
	h.c.end(t, "before-ours", "ours", "after-ours")
}

// Another DRA driver has our name, and names of its own for the GPUs: what its claims have is unknown. So no GPU is
// given until their pods have ended.
func (h *holdersTest) foreignDriver(t *testing.T) {
	h.choose(t, "")
	h.slices(t, 0)
	d := startForeignDriver(t, h)
	h.launch(t, "theirs", Pod{Claims: []string{"foreign"}})
	d.stop(t)

	h.choose(t, "whole")
	h.capacity(t, gpuName, 8)
	plain := names("plain", 8)
	h.create(t, Pod{GPUs: 1}, plain...)
	h.wait(t, 0, plain...)
	h.choose(t, "dra") // which serves the same requests
	h.slices(t, 8)
	h.wait(t, 0, plain...)
	h.c.end(t, "theirs")
	h.run(t, patience, 8, plain...)
}
