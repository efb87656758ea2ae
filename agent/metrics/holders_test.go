package metrics

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestHolders(t *testing.T) {
	const gpus, shared, migs = "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"
	holder := func(pod, container string, byResource map[string][]string) podresources.Holder {
		return podresources.Holder{Namespace: "ml", Pod: pod, Container: container, ByResource: byResource}
	}
	var holders []podresources.Holder
	m := New(BuildInfo{})
	m.AddHolders(func() []podresources.Holder { return holders })
	for _, c := range []struct {
		name    string
		holders []podresources.Holder
		want    []string
	}{
		{name: "no container"},
		{
			"GPUs, MIG devices and replicas",
			[]podresources.Holder{
				holder("train", "main", map[string][]string{gpus: {"GPU-a", "GPU-b"}, migs: {"MIG-c"}}),
				holder("infer", "one", map[string][]string{shared: {"GPU-d::0", "GPU-d::2", "GPU-e::1"}}),
				holder("infer", "two", map[string][]string{shared: {"GPU-d::1"}}),
			},
			[]string{
				`gpu_cdi_plugin_device_held{container="main",namespace="ml",pod="train",resource="nvidia.com/gpu",uuid="GPU-a"} 1`,
				`gpu_cdi_plugin_device_held{container="main",namespace="ml",pod="train",resource="nvidia.com/gpu",uuid="GPU-b"} 1`,
				`gpu_cdi_plugin_device_held{container="main",namespace="ml",pod="train",resource="nvidia.com/mig-1g.10gb",` +
					`uuid="MIG-c"} 1`,
				`gpu_cdi_plugin_device_held{container="one",namespace="ml",pod="infer",resource="nvidia.com/gpu.shared",` +
					`uuid="GPU-d"} 2`,
				`gpu_cdi_plugin_device_held{container="one",namespace="ml",pod="infer",resource="nvidia.com/gpu.shared",` +
					`uuid="GPU-e"} 1`,
				`gpu_cdi_plugin_device_held{container="two",namespace="ml",pod="infer",resource="nvidia.com/gpu.shared",` +
					`uuid="GPU-d"} 1`,
			},
		},
		{
			"hostile names",
			[]podresources.Holder{
				holder("a\"} 1\nevil{x=\"", "c\xff\\", map[string][]string{gpus: {"GPU-a"}}),
			},
			[]string{
				`gpu_cdi_plugin_device_held{container="c` + "\uFFFD" +
					`\\",namespace="ml",pod="a\"} 1\nevil{x=\"",resource="nvidia.com/gpu",uuid="GPU-a"} 1`,
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
