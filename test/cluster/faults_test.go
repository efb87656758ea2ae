package cluster

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestClaimsUnderFaults kills programs under pods that come and go with claims, and one that stays. Whatever happens, a
// new pod gets its GPU afterwards, no GPU has two pods, and nothing is left of claims that have ended.
func TestClaimsUnderFaults(t *testing.T) {
	c := start(t)
	c.install(t, "--set", `nodeSelector.kubernetes\.io/hostname=node2,dra.enabled=true,door=dra`)
	c.published(t, "node2", 8, 0)
	c.claimTemplate(t, "one", 1)
	c.claimTemplate(t, "two", 2)
	kept := c.launch(t, Pod{Name: "kept", Claims: []string{"two"}})
	held := c.checkClaims(t, kept, 2)
	f := &faults{c, 0}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	list := f.list()
	for _, step := range append(random.Perm(len(list)), random.IntN(len(list)), random.IntN(len(list))) {
		t.Run(list[step].name, func(t *testing.T) {
			pods := f.pods(t)
			time.Sleep(time.Duration(random.IntN(1500)) * time.Millisecond) // at any point of the pods' lives
			list[step].happens(t)
			f.await(t, pods, list[step].endsStarts)
			f.await(t, f.pods(t), false)
			now, err := c.pod(t.Context(), "kept")
			testenv.Must(t, err)
			if got, want := fmt.Sprint(now.Status.ContainerStatuses), fmt.Sprint(kept.Status.ContainerStatuses); got != want {
				t.Errorf("the container of the pod that stays was %s and is %s", want, got)
			}
			if got := c.checkClaims(t, kept, 2); fmt.Sprint(got) != fmt.Sprint(held) {
				t.Errorf("the pod that stays has the GPUs %v, and had %v", got, held)
			}
		})
		if t.Failed() {
			c.describe(t)
			t.FailNow()
		}
	}
	c.published(t, "node2", 8, 0)
	c.end(t, "kept")
	c.noClaims(t)
	c.kubectl(t, "delete", "resourceclaimtemplates", "--all")
	c.uninstall(t)
}

// noClaims waits until neither the API server nor the driver of node2 knows a claim.
func (c *Cluster) noClaims(t testing.TB) {
	t.Helper()
	testenv.Must(t, kubenode.Wait(t.Context(), patience, "all claims have ended", func() error {
		if out := c.kubectl(t, "get", "resourceclaims", "-o", "name"); out != "" {
			return fmt.Errorf("the API server has %s", strings.Fields(out))
		}
		records, err := filepath.Glob(c.Nodes[1].Host("/var/lib/gpu-cdi-plugin/claims/*.json"))
		if err == nil && len(records) > 0 {
			err = fmt.Errorf("the driver has the records %v", records)
		}
		return err
	}))
}

// faults are what can happen to a cluster.
type faults struct {
	c    *Cluster
	next int // the number of the next pod
}

type fault struct {
	name    string
	happens func(testing.TB)
	// endsStarts means that containers which are just starting may fail for good: containerd ends a start when the kubelet
	// that asked for it is gone.
	endsStarts bool
}

func (f *faults) list() []fault {
	return []fault{
		{"the driver is killed", func(t testing.TB) {
			f.c.kubectl(t, "-n", plugin.namespace, "delete", "pod", "-l", label, "--force", "--grace-period=0")
			f.c.rolledOut(t, plugin)
		}, false},
		{"the driver is replaced", func(t testing.TB) {
			f.c.kubectl(t, "-n", plugin.namespace, "rollout", "restart", "daemonset", plugin.name)
			f.c.rolledOut(t, plugin)
		}, false},
		{"the kubelet is killed", func(t testing.TB) {
			n := f.c.Nodes[1]
			testenv.Must(t, n.Kubelet.Kill(), n.StartKubelet(t.Context()))
		}, true},
		{"the API server is killed", f.killPlane("kube-apiserver"), false},
		{"the controller manager is killed", f.killPlane("kube-controller-manager"), false},
		{"the scheduler is killed", f.killPlane("kube-scheduler"), false},
	}
}

func (f *faults) killPlane(name string) func(testing.TB) {
	return func(t testing.TB) {
		testenv.Must(t, f.c.plane.daemons[name].Kill(), f.c.plane.startDaemon(t.Context(), name))
	}
}

// pods creates pods that list their GPU, and returns their names.
func (f *faults) pods(t testing.TB) (names []string) {
	t.Helper()
	for range 4 {
		f.next++
		names = append(names, fmt.Sprint("short-", f.next))
		testenv.Must(t, f.c.create(t.Context(), Pod{
			Name: names[len(names)-1], Claims: []string{"one"}, Command: []string{"nvidia-smi", "-L"},
		}))
	}
	return names
}

// await waits until pods have succeeded, or where that may happen, their start was ended. It removes them.
func (f *faults) await(t testing.TB, names []string, endsStarts bool) {
	t.Helper()
	for _, name := range names {
		p, err := f.c.awaitPhase(t.Context(), name, "Succeeded")
		if s := p.Status.ContainerStatuses; err != nil && endsStarts && len(s) == 1 &&
			s[0].State.Terminated.Reason == "StartError" {
			t.Log(name, "was just starting:", s[0].State.Terminated.Message)
			continue
		}
		testenv.Must(t, err)
	}
	f.c.end(t, names...)
}

// TestClaimsAfterAReboot empties /run and ends all containers of a node, whose driver then finds another boot ID.
func TestClaimsAfterAReboot(t *testing.T) {
	c := start(t)
	defer func() {
		if t.Failed() {
			c.describe(t)
		}
	}()
	n := c.Nodes[1]
	boot := func(id string) {
		dir := n.Host(machineRoot + "/proc/sys/kernel/random")
		testenv.Must(t, os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "boot_id"), []byte(id+"\n"), 0o644))
	}
	boot("first")
	c.install(t, "--set", `nodeSelector.kubernetes\.io/hostname=node2,dra.enabled=true,door=dra`)
	c.published(t, "node2", 8, 0)
	c.claimTemplate(t, "two", 2)
	p := c.launch(t, Pod{Name: "restarts", Claims: []string{"two"}, Restarts: true})
	held := c.checkClaims(t, p, 2)

	testenv.Must(t, n.Kubelet.Kill())
	res, err := n.Run(t.Context(), n.Programs.Ctr, "--namespace", "k8s.io", "tasks", "ls", "-q")
	testenv.Must(t, err)
	for id := range strings.FieldsSeq(res.Stdout) {
		_ = n.Ctr(t.Context(), "tasks", "kill", "--signal", "SIGKILL", id) // it may have ended by itself
	}
	testenv.Must(t, os.RemoveAll(n.Host("/run/cdi")), os.RemoveAll(n.Host("/run/gpu-cdi-plugin")))
	boot("second")
	testenv.Must(t, n.StartKubelet(t.Context()))

	testenv.Must(t, kubenode.Wait(t.Context(), patience, "the pod runs again", func() error {
		now, err := c.pod(t.Context(), "restarts")
		if s := now.Status.ContainerStatuses; err == nil && (now.Status.Phase != "Running" || len(s) != 1 ||
			s[0].ContainerID == p.Status.ContainerStatuses[0].ContainerID || !s[0].Ready) {
			err = fmt.Errorf("it is %+v", now.Status)
		}
		return err
	}))
	if got := c.checkClaims(t, p, 2); fmt.Sprint(got) != fmt.Sprint(held) {
		t.Errorf("the pod has the GPUs %v after the reboot, and had %v", got, held)
	}
	c.end(t, "restarts")
	c.noClaims(t)
	c.kubectl(t, "delete", "resourceclaimtemplates", "--all")
	c.uninstall(t)
}

// TestAnAPIServerThatIsAway ends the API server for a minute, and then the driver until its slices are gone.
func TestAnAPIServerThatIsAway(t *testing.T) {
	c := start(t)
	defer func() {
		if t.Failed() {
			c.describe(t)
		}
	}()
	c.install(t, "--set", `nodeSelector.kubernetes\.io/hostname=node2,dra.enabled=true,door=dra`)
	c.published(t, "node2", 8, 0)
	c.claimTemplate(t, "one", 1)
	kept := c.launch(t, Pod{Name: "kept", Claims: []string{"one"}})
	held := c.checkClaims(t, kept, 1)

	testenv.Must(t, c.plane.daemons["kube-apiserver"].Kill())
	time.Sleep(time.Minute)
	testenv.Must(t, c.plane.startDaemon(t.Context(), "kube-apiserver"))
	c.published(t, "node2", 8, 0)
	second := c.launch(t, Pod{Name: "second", Claims: []string{"one"}})
	c.distinct(t, append(c.checkClaims(t, second, 1), held...))
	c.checkClaims(t, kept, 1)

	// The kubelet removes the slices of a driver that is gone, and the driver makes them again.
	c.helm(t, "upgrade", release, chart, "--reuse-values", "--set", "nodeSelector.driver=here")
	c.published(t, "node2", 0, 0)
	c.kubectl(t, "label", "node", "node2", "driver=here")
	defer c.kubectl(t, "label", "node", "node2", "driver-")
	c.published(t, "node2", 8, 0)
	third := c.launch(t, Pod{Name: "third", Claims: []string{"one"}})
	c.distinct(t, append(c.checkClaims(t, third, 1), append(c.checkClaims(t, second, 1), held...)...))
	c.end(t, "kept", "second", "third")
	c.noClaims(t)
	c.kubectl(t, "delete", "resourceclaimtemplates", "--all")
	c.uninstall(t)
}
