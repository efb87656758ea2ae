package cluster

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

var (
	runFor = flag.Duration("cluster.duration", 2*time.Minute, "how long TestOneHolderInARandomRun changes the cluster")
	runBy  = flag.Uint64("cluster.seed", 1, "the seed of its changes; 0 takes another one each time")
)

// TestOneHolderInARandomRun creates and removes pods of all kinds at random, while the door, the names and the MIG
// devices of their node change, programs are killed and files are lost. No GPU has two holders at any time, and when
// all pods are gone, all GPUs are free. Seeds choose the changes, not how they meet.
func TestOneHolderInARandomRun(t *testing.T) {
	seed := *runBy
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("%v with -cluster.seed=%d", *runFor, seed)
	h := watchHolders(t)
	defer h.end(t)
	h.choose(t, "whole")
	h.capacity(t, gpuName, 8)
	r := &randomRun{holdersTest: h, t: t, random: rand.New(rand.NewPCG(seed, 0)), counts: map[string]int{}}
	defer r.report()
	r.change()
	testenv.Must(t, h.Err())
	r.freeAll()
}

// randomRun changes a cluster at random.
type randomRun struct {
	*holdersTest
	t      *testing.T
	random *rand.Rand
	began  time.Time
	counts map[string]int
	log    []string
	// last is when a change was made that needs some time before the next one of its kind.
	last map[string]time.Time
}

// change is a kind of change. Of those whose pause is over, one is chosen by weight.
type change struct {
	name   string
	weight int
	pause  time.Duration
	do     func() (detail string, err error)
}

// nameCount is how many names of pods there are: a pod that is created often has the name of one that runs or that was
// just removed, as those of a StatefulSet.
const nameCount = 14

func (r *randomRun) changes() []change {
	return []change{
		{"create", 50, 0, r.create},
		{"delete", 12, 0, r.remove},
		{"delete by force", 8, 0, r.forceRemove},
		{"delete by force and create", 8, 0, r.replace},
		{"choose a configuration", 30, 12 * time.Second, r.chooseAnother},
		{"change the MIG devices", 6, 10 * time.Second, r.changeMIG},
		{"roll out", 6, 20 * time.Second, r.rollOut},
		{"kill the plugin", 3, 10 * time.Second, r.kill},
		{"lose the plugin's state", 2, 30 * time.Second, r.loseState},
		{"kill the kubelet", 2, 40 * time.Second, func() (string, error) { return "", r.restartKubelet("") }},
		{"lose the kubelet's devices", 2, 60 * time.Second, func() (string, error) {
			return "", r.restartKubelet("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
		}},
		{"lose the kubelet's claims", 2, 60 * time.Second, func() (string, error) {
			return "", r.restartKubelet("/var/lib/kubelet/dra_manager_state")
		}},
	}
}

// change makes changes until the time is over or a GPU has two holders.
func (r *randomRun) change() {
	r.began, r.last = time.Now(), map[string]time.Time{}
	all := r.changes()
	for time.Since(r.began) < *runFor && r.Err() == nil {
		c := r.pick(all)
		r.last[c.name] = time.Now()
		detail, err := c.do()
		if err != nil {
			r.t.Fatalf("%s %s: %v", c.name, detail, err)
		}
		r.counts[c.name]++
		r.log = append(r.log, fmt.Sprintf("%s %s %s", r.last[c.name].Format("15:04:05.000"), c.name, detail))
		time.Sleep(time.Duration(r.random.IntN(1000)) * time.Millisecond) // at any point of the pods' lives
	}
}

func (r *randomRun) pick(all []change) change {
	var ready []change
	for _, c := range all {
		if time.Since(r.last[c.name]) >= c.pause {
			ready = append(ready, slices.Repeat([]change{c}, c.weight)...)
		}
	}
	return ready[r.random.IntN(len(ready))]
}

// report logs the steps and their numbers.
func (r *randomRun) report() {
	steps := 0
	for _, n := range r.counts {
		steps += n
	}
	r.t.Logf("%d steps in %.0f s, %d of them changes of the configuration: %v", steps, time.Since(r.began).Seconds(),
		r.counts["choose a configuration"], r.counts)
	r.t.Log(r.Holders())
	if r.t.Failed() {
		r.t.Logf("all steps:\n%s", strings.Join(r.log, "\n"))
		r.c.describe(r.t)
		r.t.Log(r.c.Run(context.Background(), "kubectl", "get", "resourceslices,resourceclaims", "-A", "-o", "yaml"))
	}
}

func (r *randomRun) name() string { return fmt.Sprint("random-", r.random.IntN(nameCount)) }

// fits has the kinds of requests that pods get devices by, for each configuration.
var fits = map[string][]Pod{
	"whole": {{GPUs: 1}, {GPUs: 2}, {GPUs: 3}, {GPUs: 1, Resource: migName}},
	"dra":   {{Claims: []string{"one"}}, {Claims: []string{"one"}}, {GPUs: 2}, {Claims: []string{"mig"}}},
	"shared": {
		{GPUs: 1, Resource: sharedName, Shares: true},
		{GPUs: 2, Resource: sharedName, Shares: true},
		{GPUs: 1, Resource: migName},
	},
	"dra-shared": {
		{GPUs: 1, Resource: sharedName, Shares: true}, {Claims: []string{"share"}, Shares: true}, {Claims: []string{"mig"}},
	},
}

// pod returns a pod of any kind. Most request what the configuration has; the others wait for another one.
func (r *randomRun) pod() Pod {
	config := r.config
	if r.random.IntN(8) == 0 {
		config = slices.Sorted(maps.Keys(fits))[r.random.IntN(len(fits))]
	}
	p := fits[config][r.random.IntN(len(fits[config]))]
	p.Grace, p.Restarts = 1+r.random.IntN(4), r.random.IntN(3) == 0
	p.Command = r.command()
	devices := func() int { // of another container, if the pod requests devices
		if p.GPUs == 0 || p.Resource == migName {
			return 0
		}
		return r.random.IntN(3)
	}
	ends := func() []string { return []string{"sleep", fmt.Sprint(r.random.IntN(30))} }
	switch r.random.IntN(6) {
	case 0, 1:
		p.Init = []Container{{Name: "first", GPUs: devices(), Command: ends()}}
	case 2:
		p.Init = []Container{
			{Name: "side", GPUs: devices(), Restarts: true}, {Name: "second", GPUs: devices(), Command: ends()},
		}
	case 3:
		p.Beside = []Container{{Name: "other", GPUs: devices(), Command: r.command()}}
	}
	return p
}

// command returns the command of a container that stays, ends, crashes, or ends at SIGKILL only.
func (r *randomRun) command() []string {
	switch r.random.IntN(6) {
	case 0:
		return []string{"sleep", fmt.Sprint(r.random.IntN(10))}
	case 1:
		return []string{"sh", "-c", "sleep 1; exit 1"}
	case 2:
		return untilKill
	default:
		return untilTerm
	}
}

// create creates a pod. One with this name that has ended is removed first; if it has not, nothing happens.
func (r *randomRun) create() (string, error) { return r.createAs(r.name()) }

func (r *randomRun) createAs(name string) (string, error) {
	p := r.pod()
	p.Name, p.Node = name, r.node.Name
	if old, err := r.c.pod(r.t.Context(), name); err == nil {
		if old.Status.Phase != "Succeeded" && old.Status.Phase != "Failed" {
			return name + " is there", nil
		}
		if err := r.c.forceRemove(r.t.Context(), name); err != nil {
			return name, ignoreAbsent(err)
		}
	}
	return fmt.Sprintf("%+v", p), ignoreAbsent(r.c.create(r.t.Context(), p))
}

func (r *randomRun) remove() (string, error) {
	name := r.name()
	return name, ignoreAbsent(r.c.remove(r.t.Context(), name))
}

func (r *randomRun) forceRemove() (string, error) {
	name := r.name()
	return name, ignoreAbsent(r.c.forceRemove(r.t.Context(), name))
}

func (r *randomRun) replace() (string, error) {
	name, err := r.forceRemove()
	if err != nil {
		return name, err
	}
	return r.createAs(name)
}

// ignoreAbsent returns nil if the object of a request is not there, or not gone yet.
func ignoreAbsent(err error) error {
	if err != nil && (strings.Contains(err.Error(), "404 Not Found") || strings.Contains(err.Error(), "409 Conflict")) {
		return nil
	}
	return err
}

// chooseAnother chooses another configuration, after the plugin has served with the present one.
func (r *randomRun) chooseAnother() (string, error) {
	r.choose(r.t, r.config)
	names := slices.Sorted(maps.Keys(configurations))
	names = slices.DeleteFunc(names, func(name string) bool { return name == r.config })
	name := names[r.random.IntN(len(names))]
	r.label(r.t, name)
	return name, nil
}

// changeMIG gives GPU 0 other MIG devices, or turns its MIG mode off.
func (r *randomRun) changeMIG() (string, error) {
	layouts := [][]string{nil, {"3g.40gb", "3g.40gb"}, {"1g.10gb", "1g.10gb", "1g.10gb"}}
	layout := layouts[r.random.IntN(len(layouts))]
	r.setMIG(r.t, layout...)
	return strings.Join(layout, ","), nil
}

func (r *randomRun) rollOut() (string, error) {
	name := r.daemonSet(r.config)
	r.c.kubectl(r.t, "-n", plugin.namespace, "rollout", "restart", "daemonset", name)
	return name, nil
}

func (r *randomRun) kill() (string, error) {
	r.killPlugin(r.t)
	return "", nil
}

// loseState removes all that the plugin keeps on the disk, and kills it.
func (r *randomRun) loseState() (string, error) {
	files, err := filepath.Glob(r.node.Host("/var/lib/gpu-cdi-plugin/*"))
	for _, file := range files {
		if err == nil && !strings.HasSuffix(file, "/bin") {
			// The plugin may write into a directory that is being removed.
			err = kubenode.Wait(r.t.Context(), patience, "the removal of "+file, func() error { return os.RemoveAll(file) })
		}
	}
	r.killPlugin(r.t)
	return "", err
}

// restartKubelet kills the kubelet, removes a file of its own, unless that is empty, and starts it.
func (r *randomRun) restartKubelet(lost string) error {
	if err := r.node.Kubelet.Kill(); err != nil {
		return err
	}
	if lost != "" {
		if err := os.RemoveAll(r.node.Host(lost)); err != nil {
			return err
		}
	}
	return r.node.StartKubelet(r.t.Context())
}

// freeAll deletes all pods and checks that all GPUs are free at both doors.
func (r *randomRun) freeAll() {
	t := r.t
	t.Helper()
	r.clear(t)
	r.choose(t, "whole")
	testenv.Must(t, kubenode.Wait(t.Context(), patience, "all GPUs are free", func() error {
		_, got, err := r.c.resource(t.Context(), r.node.Name, gpuName)
		if err == nil && got != 8 {
			err = fmt.Errorf("%d are, and the plugin says:\n%s", got, r.claims())
		}
		return err
	}))
	r.choose(t, "dra")
	testenv.Must(t, kubenode.Wait(t.Context(), patience, "no device has a taint", func() error {
		if all, tainted := r.c.devices(t, r.node.Name); all != 8 || tainted != 0 {
			return fmt.Errorf("%d of %d have, and the plugin says:\n%s", tainted, all, r.claims())
		}
		return nil
	}))
	r.c.noClaims(t)
	testenv.Must(t, r.Err())
}

// claims returns what the plugin says about who has which device.
func (r *randomRun) claims() string {
	out, err := r.c.Run(r.t.Context(), "kubectl", "-n", plugin.namespace, "exec", "daemonset/"+r.daemonSet(r.config), "--",
		"/launcher", "run", "claims")
	if err != nil {
		return err.Error()
	}
	return out
}
