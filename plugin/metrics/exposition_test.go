package metrics

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTextFormat(t *testing.T) {
	for name, c := range map[string]struct {
		family *family
		fill   func(*family)
		want   string
	}{
		"nothing without a series": {
			counter("x_total", "Of x.", "a"), func(*family) {}, "",
		},
		"a value without labels": {
			gauge("x", "Of x."), func(f *family) { f.set(1.5e9) },
			"# HELP gpu_cdi_plugin_x Of x.\n# TYPE gpu_cdi_plugin_x gauge\ngpu_cdi_plugin_x 1.5e+09\n",
		},
		"series in the order of their labels": {
			counter("x_total", "Of x.", "a", "b"), func(f *family) { f.add(1, "2", "1"); f.begin("1", "9"); f.add(2, "2", "1") },
			"# HELP gpu_cdi_plugin_x_total Of x.\n# TYPE gpu_cdi_plugin_x_total counter\n" +
				`gpu_cdi_plugin_x_total{a="1",b="9"} 0` + "\n" + `gpu_cdi_plugin_x_total{a="2",b="1"} 3` + "\n",
		},
		"what would end a label, escaped": {
			gauge("x", "Of x.", "a"), func(f *family) { f.set(0, "\"\\\n{},=") },
			"# HELP gpu_cdi_plugin_x Of x.\n# TYPE gpu_cdi_plugin_x gauge\n" + `gpu_cdi_plugin_x{a="\"\\\n{},="} 0` + "\n",
		},
		"a histogram, whose buckets have what is at most their bound": {
			histogram("x_seconds", "Of x.", []float64{.001, 1}, "a"),
			func(f *family) { f.observe(.001, "1"); f.observe(.5, "1"); f.observe(2, "1") },
			"# HELP gpu_cdi_plugin_x_seconds Of x.\n# TYPE gpu_cdi_plugin_x_seconds histogram\n" +
				`gpu_cdi_plugin_x_seconds_bucket{a="1",le="0.001"} 1` + "\n" +
				`gpu_cdi_plugin_x_seconds_bucket{a="1",le="1"} 2` + "\n" +
				`gpu_cdi_plugin_x_seconds_bucket{a="1",le="+Inf"} 3` + "\n" +
				`gpu_cdi_plugin_x_seconds_sum{a="1"} 2.501` + "\n" +
				`gpu_cdi_plugin_x_seconds_count{a="1"} 3` + "\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.fill(c.family)
			var b bytes.Buffer
			c.family.write(&b)
			if diff := cmp.Diff(c.want, b.String()); diff != "" {
				t.Errorf("text (-want +got):\n%s", diff)
			}
		})
	}
}

// FuzzTextFormat checks that a label's value, whatever it is, stays within its quotes: one line, one closing quote.
func FuzzTextFormat(f *testing.F) {
	f.Add("nvidia.com/gpu")
	f.Add("a\"} 1\nforged 1")
	f.Fuzz(func(t *testing.T, value string) {
		x := gauge("x", "Of x.", "a")
		x.set(1, value)
		var b bytes.Buffer
		x.write(&b)
		lines := strings.SplitAfter(b.String(), "\n")
		quoted, ok := strings.CutPrefix(lines[2], `gpu_cdi_plugin_x{a="`)
		quoted, end := strings.CutSuffix(quoted, "\"} 1\n")
		if len(lines) != 4 || !ok || !end {
			t.Fatalf("%q", lines)
		}
		if got := strings.NewReplacer(`\\`, `\`, `\"`, `"`, `\n`, "\n").Replace(quoted); got != value {
			t.Errorf("%q reads as %q", value, got)
		}
	})
}

func TestProcessIsMeasured(t *testing.T) {
	body := expose(t, New(BuildInfo{}))
	for _, name := range []string{
		"process_start_time_seconds", "process_cpu_seconds_total", "process_virtual_memory_bytes", "process_resident_memory_bytes",
		"process_open_fds", "process_max_fds", "go_memstats_heap_alloc_bytes", "go_goroutines",
	} {
		if !strings.Contains(body, "\n# TYPE "+name+" ") || strings.Contains(body, "\n"+name+" 0\n") {
			t.Errorf("no value of %s", name)
		}
	}
}
