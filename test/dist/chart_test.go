package dist

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files of the chart, and deploy/gpu-cdi-plugin.yaml")

const chartDir = "../../deploy/chart"

// helm runs helm without the configuration of this host.
func helm(t *testing.T, code int, args ...string) proc.Result {
	t.Helper()
	home := t.TempDir()
	env := append(os.Environ(), "HELM_CONFIG_HOME="+home, "HELM_CACHE_HOME="+home, "HELM_DATA_HOME="+home)
	return proc.Must(t, code, proc.Cmd{Args: append([]string{shared.NodePeer(t, "helm")}, args...), Env: env})
}

// template renders the chart.
func template(t *testing.T, code int, args ...string) proc.Result {
	t.Helper()
	all := append([]string{"template", "gpu-cdi-plugin", chartDir, "--namespace", "kube-system"}, args...)
	return helm(t, code, all...)
}

const manifestHeader = "# The chart in deploy/chart with its default values, for kubectl apply; see make generate.\n"

// TestSlowChart renders the chart with values of several kinds of clusters.
func TestSlowChart(t *testing.T) {
	files, err := filepath.Glob("testdata/chart/*.values.yaml")
	testenv.Must(t, err)
	golden := map[string][]string{"../../deploy/gpu-cdi-plugin.yaml": nil}
	for _, f := range files {
		golden[strings.TrimSuffix(f, ".values.yaml")+".golden.yaml"] = []string{"--values", f}
	}
	for file, args := range golden {
		t.Run(filepath.Base(file), func(t *testing.T) {
			got := template(t, 0, args...).Stdout
			if args == nil {
				got = manifestHeader + got
			}
			if *update {
				testenv.Must(t, os.WriteFile(file, []byte(got), 0o644))
			}
			want, err := os.ReadFile(file)
			testenv.Must(t, err)
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("-golden +got; make generate updates it:\n%s", diff)
			}
		})
	}
}

func TestSlowChartRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"the namespace default": {[]string{"--namespace", "default"}, "install with --namespace"},
		"an unknown value":      {[]string{"--set", "migStrateg=single"}, "additional properties 'migStrateg' not allowed"},
		"an unknown strategy":   {[]string{"--set", "deviceListStrategy=volume-mounts"}, "at '/deviceListStrategy'"},
		"a MIG strategy that is none": {
			[]string{"--set", "migStrategy=all"}, "at '/migStrategy': value must be one of '', 'none', 'single', 'mixed'",
		},
		"a default that the map lacks": {
			[]string{"--set", "config.default=a"}, `config.default is "a", and config.map has no such configuration.`,
		},
		"a name that is no label": {[]string{"--set", "config.map.A_B=x"}, `config.map has the name "A_B"`},
		"a relative directory":    {[]string{"--set", "kubeletRootDir=var/lib"}, "at '/kubeletRootDir'"},
	} {
		t.Run(name, func(t *testing.T) {
			if r := template(t, 1, c.args...); !strings.Contains(r.Stderr, c.want) || r.Stdout != "" {
				t.Errorf("want an error with %q, got %v", c.want, r)
			}
		})
	}
}

func TestSlowChartIsLinted(t *testing.T) {
	r := helm(t, 0, "lint", "--strict", chartDir, "--namespace", "kube-system")
	if strings.Contains(r.Stdout, "[WARNING]") {
		t.Errorf("helm lint: %v", r)
	}
}
