package metrics

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestHolders(t *testing.T) {
	const gpus, shared, migs = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"
	holding := func(uuid, resource string, replicas int, pod, container string) ledger.Holding {
		return ledger.Holding{
			UUID: uuid, Resource: resource, Replicas: replicas, Namespace: "ml",
			Containers: []ledger.Container{{Pod: pod, Container: container}},
		}
	}
	ending := holding("GPU-a", gpus, 1, "old", "main")
	ending.State = ledger.Ending
	var holders []ledger.Holding
	m := New(BuildInfo{})
	m.AddHolders(func() []ledger.Holding { return holders })
	for _, c := range []struct {
		name    string
		holders []ledger.Holding
		want    []string
	}{
		{name: "no container"},
		{
			"GPUs, MIG devices and replicas",
			[]ledger.Holding{
				holding("GPU-a", gpus, 1, "train", "main"),
				holding("GPU-b", gpus, 1, "train", "main"),
				holding("MIG-c", migs, 1, "train", "main"),
				holding("GPU-d", shared, 2, "infer", "one"),
				holding("GPU-e", shared, 1, "infer", "one"),
				holding("GPU-d", shared, 1, "infer", "two"),
			},
			[]string{
				`gpu_cdi_plugin_device_held{container="main",dra_claim_name="",namespace="ml",pod="train",` +
					`resource="nvidia.com/gpu",uuid="GPU-a"} 1`,
				`gpu_cdi_plugin_device_held{container="main",dra_claim_name="",namespace="ml",pod="train",` +
					`resource="nvidia.com/gpu",uuid="GPU-b"} 1`,
				`gpu_cdi_plugin_device_held{container="main",dra_claim_name="",namespace="ml",pod="train",` +
					`resource="nvidia.com/mig-1g.10gb",uuid="MIG-c"} 1`,
				`gpu_cdi_plugin_device_held{container="one",dra_claim_name="",namespace="ml",pod="infer",` +
					`resource="nvidia.com/gpu.shared",uuid="GPU-d"} 2`,
				`gpu_cdi_plugin_device_held{container="one",dra_claim_name="",namespace="ml",pod="infer",` +
					`resource="nvidia.com/gpu.shared",uuid="GPU-e"} 1`,
				`gpu_cdi_plugin_device_held{container="two",dra_claim_name="",namespace="ml",pod="infer",` +
					`resource="nvidia.com/gpu.shared",uuid="GPU-d"} 1`,
			},
		},
		{
			"hostile names",
			[]ledger.Holding{holding("GPU-a", gpus, 1, "a\"} 1\nevil{x=\"", "c\xff\\")},
			[]string{
				`gpu_cdi_plugin_device_held{container="c` + "\uFFFD" +
					`\\",dra_claim_name="",namespace="ml",pod="a\"} 1\nevil{x=\"",resource="nvidia.com/gpu",uuid="GPU-a"} 1`,
			},
		},
		{
			"a claim of two containers, one that no container has yet, and containers that the kubelet does not list",
			[]ledger.Holding{
				{
					UUID: "GPU-a", Namespace: "ml", Claim: "one", ClaimUID: "1",
					Containers: []ledger.Container{{Pod: "train", Container: "a"}, {Pod: "train", Container: "b"}},
				},
				{UUID: "GPU-b", Namespace: "ml", Claim: "two", ClaimUID: "2"},
				{UUID: "GPU-c", Resource: gpus, Replicas: 1, State: ledger.Starting},
				ending,
			},
			[]string{
				`gpu_cdi_plugin_device_held{container="a",dra_claim_name="one",namespace="ml",pod="train",` +
					`resource="",uuid="GPU-a"} 1`,
				`gpu_cdi_plugin_device_held{container="b",dra_claim_name="one",namespace="ml",pod="train",` +
					`resource="",uuid="GPU-a"} 1`,
			},
		},
		{name: "the containers have ended"},
	} {
		holders = c.holders
		text := scrape(t, m)
		var got []string
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "gpu_cdi_plugin_device_held{") {
				got = append(got, strings.TrimSuffix(line, "\n"))
			}
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(text))
		testenv.Must(t, err)
		if n := len(families["gpu_cdi_plugin_device_held"].GetMetric()); n != len(c.want) {
			t.Errorf("%s: Prometheus reads %d series, want %d", c.name, n, len(c.want))
		}
	}
}
