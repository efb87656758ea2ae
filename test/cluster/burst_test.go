package cluster

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestSlowBurst measures how fast pods start by each door, on a node with eight GPUs: one after the other, and 64 at
// once, each of which ends after it has seen its GPU.
func TestSlowBurst(t *testing.T) {
	c := start(t)
	defer func() {
		if t.Failed() {
			c.describe(t)
		}
	}()
	onNode2 := []string{"--set", `nodeSelector.kubernetes\.io/hostname=node2,dra.enabled=true`}
	c.install(t, onNode2...)
	defer c.uninstall(t)
	c.offers(t, 0, 8)
	c.claimTemplate(t, "one", 1)
	defer c.kubectl(t, "delete", "resourceclaimtemplates", "--all")
	byPlugin, byClaim := Pod{GPUs: 1}, Pod{Claims: []string{"one"}}
	c.measureSingles(t, "the device plugin", byPlugin)
	c.measureBurst(t, "the device plugin", byPlugin)

	c.helm(t, "upgrade", release, chart, "--reuse-values", "--set", "door=dra")
	c.rolledOut(t, plugin)
	c.offers(t, 0, 0)
	c.published(t, "node2", 8, 0)
	c.measureSingles(t, "a claim", byClaim)
	c.measureBurst(t, "a claim", byClaim)

	c.helm(t, "upgrade", release, chart, "--reuse-values", "--set", "dra.nodesReadClaims=true")
	c.measureBurst(t, "a claim that all nodes may read", byClaim)
}

// measureSingles logs after which time pods run that start one after the other.
func (c *Cluster) measureSingles(t testing.TB, by string, p Pod) {
	t.Helper()
	var each []time.Duration
	for i := range 7 {
		p.Name = fmt.Sprint("single-", i)
		began := time.Now()
		c.launch(t, p)
		each = append(each, time.Since(began))
		c.end(t, p.Name)
	}
	slices.Sort(each)
	t.Logf("a pod with a GPU by %s runs after %v (p50 of %d, %v to %v)", by, each[len(each)/2].Round(time.Millisecond),
		len(each), each[0].Round(time.Millisecond), each[len(each)-1].Round(time.Millisecond))
}

// measureBurst logs after which time many pods have ended that are created at once.
func (c *Cluster) measureBurst(t testing.TB, by string, p Pod) {
	t.Helper()
	const count = 64
	took := c.burst(t, p, count).Seconds()
	res, err := c.Nodes[1].Run(t.Context(), "sh", "-c", `for p in /proc/[0-9]*; do
read -r name <$p/comm; [ "$name" = gpu-cdi-plugin ] && grep RssAnon $p/status; done; true`)
	testenv.Must(t, err)
	t.Logf("%d pods with a GPU by %s have ended after %.1f s; memory of serve: %s", count, by, took,
		strings.Join(strings.Fields(res.Stdout), " "))
}

// burst creates pods at once, each of which lists its GPUs, and waits until all have succeeded. It returns how long that
// took.
func (c *Cluster) burst(t testing.TB, p Pod, count int) time.Duration {
	t.Helper()
	p.Labels = map[string]string{"burst": "1"}
	p.Command = []string{"nvidia-smi", "-L"}
	began := time.Now()
	var creating errgroup.Group
	creating.SetLimit(8)
	for i := range count {
		one := p
		one.Name = fmt.Sprint("burst-", i)
		creating.Go(func() error { return c.create(t.Context(), one) })
	}
	testenv.Must(t, creating.Wait())
	var reasons []string
	testenv.Must(t, kubenode.Wait(t.Context(), 2*patience, "all pods have ended", func() error {
		pods, err := c.pods(t.Context(), "burst=1")
		done := 0
		reasons = nil
		for _, one := range pods {
			switch one.Status.Phase {
			case "Failed":
				reasons = append(reasons, one.Metadata.Name+": "+one.Status.Reason+" "+one.Status.Message)
				done++
			case "Succeeded":
				done++
			}
		}
		if err == nil && done != count {
			err = fmt.Errorf("%d have", done)
		}
		return err
	}))
	took := time.Since(began)
	if len(reasons) > 0 {
		t.Errorf("%d pods failed: %v", len(reasons), reasons)
	}
	testenv.Must(t, c.client.do(t.Context(), http.MethodDelete, podsPath+"?labelSelector=burst=1", nil, nil))
	testenv.Must(t, kubenode.Wait(t.Context(), patience, "the pods are gone", func() error {
		pods, err := c.pods(t.Context(), "burst=1")
		if err == nil && len(pods) > 0 {
			err = fmt.Errorf("%d are left", len(pods))
		}
		return err
	}))
	return took
}
