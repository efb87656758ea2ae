package cluster

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

// BenchmarkDoors measures how fast pods start by each door, on a node with eight GPUs: one after the other, and 64 at
// once, each of which ends after it has seen its GPU. It reports the times, and the anonymous memory of serve after
// that.
func BenchmarkDoors(b *testing.B) {
	c := start(b)
	defer func() {
		if b.Failed() {
			c.describe(b)
		}
	}()
	c.install(b, "--set", `nodeSelector.kubernetes\.io/hostname=node2,dra.enabled=true`)
	defer c.uninstall(b)
	c.offers(b, 0, 8)
	c.claimTemplate(b, "one", 1)
	defer c.kubectl(b, "delete", "resourceclaimtemplates", "--all")
	byPlugin, byClaim := Pod{GPUs: 1}, Pod{Claims: []string{"one"}}
	b.Run("plugin", func(b *testing.B) { c.measure(b, byPlugin) })

	c.helm(b, "upgrade", release, chart, "--reuse-values", "--set", "door=dra")
	c.rolledOut(b, plugin)
	c.offers(b, 0, 0)
	c.published(b, "node2", 8, 0)
	b.Run("claims", func(b *testing.B) { c.measure(b, byClaim) })
	c.helm(b, "upgrade", release, chart, "--reuse-values", "--set", "dra.nodesReadClaims=true")
	b.Run("claims-that-nodes-read", func(b *testing.B) { c.measure(b, byClaim) })
}

// measure measures pods like this one.
func (c *Cluster) measure(b *testing.B, p Pod) {
	var each []time.Duration
	var bursts time.Duration
	for b.Loop() {
		for i := range 7 {
			p.Name = fmt.Sprint("single-", i)
			began := time.Now()
			c.launch(b, p)
			each = append(each, time.Since(began))
			c.end(b, p.Name)
		}
		bursts += c.burst(b, p, 64)
	}
	slices.Sort(each)
	b.ReportMetric(each[len(each)/2].Seconds(), "s/pod")
	b.ReportMetric(bursts.Seconds()/float64(b.N), "s/64pods")
	b.ReportMetric(c.memory(b), "MB")
}

// memory returns the anonymous memory of serve on node2, in MB.
func (c *Cluster) memory(b *testing.B) float64 {
	b.Helper()
	res, err := c.Nodes[1].Run(b.Context(), "sh", "-c", `for p in /proc/[0-9]*; do
read -r name <$p/comm; [ "$name" = gpu-cdi-plugin ] && cat $p/status; done; true`)
	testenv.Must(b, err)
	_, after, _ := strings.Cut(res.Stdout, "RssAnon:")
	fields := strings.Fields(after)
	if len(fields) == 0 {
		b.Fatalf("no process of serve: %q", res.Stdout)
	}
	kB, err := strconv.Atoi(fields[0])
	testenv.Must(b, err)
	return float64(kB) * 1024 / 1e6
}

// burst creates pods at once, each of which lists its GPUs, and waits until all have succeeded. It returns how long
// that took.
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
