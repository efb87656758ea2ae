package dist

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

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
		"a name that is no label":          {[]string{"--set", "config.map.A_B=x"}, `config.map has the name "A_B"`},
		"a relative directory":             {[]string{"--set", "kubeletRootDir=var/lib"}, "at '/kubeletRootDir'"},
		"a name that objects cannot have":  {[]string{"--set", "fullnameOverride=A_B"}, "at '/fullnameOverride'"},
		"a label that is no string":        {[]string{"--set", "podLabels.a=true"}, "at '/podLabels/a'"},
		"a node's label that is no string": {[]string{"--set", "nodeSelector.x=true"}, "at '/nodeSelector/x'"},
		"a label of the selector": {
			[]string{"--set", `podLabels.app\.kubernetes\.io/component=x`}, "podLabels has app.kubernetes.io/component",
		},
		"a label of all objects": {
			[]string{"--set", `serviceMonitor.labels.helm\.sh/chart=x`}, "serviceMonitor.labels has helm.sh/chart",
		},
		"a selector with a label of ours": {
			[]string{"--set", `selectorLabelsOverride.app\.kubernetes\.io/component=x`}, "invalid propertyName",
		},
		"an update without a pod more or less": {
			[]string{"--set", "updateStrategy.rollingUpdate.maxSurge=0"}, "one of them must be above 0",
		},
		"directories that the pods of MPS do not read": {
			[]string{"--set", "mps.enabled=true,config.map.a=driver-root: /x"}, "config.map.a has the key driver-root",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if r := template(t, 1, c.args...); !strings.Contains(r.Stderr, c.want) || r.Stdout != "" {
				t.Errorf("want an error with %q, got %v", c.want, r)
			}
		})
	}
}

// container has what tests read of a container.
type container struct {
	Name string
	Args []string
	Env  []struct{ Name string }
}

type volume struct {
	Name      string
	ConfigMap struct{ Name string } `yaml:"configMap"`
}

// object has what tests read of the objects of the chart.
type object struct {
	Kind     string
	Metadata struct{ Name string }
	Rules    []struct{ Resources, Verbs []string }
	Spec     struct {
		PolicyTypes    []string `yaml:"policyTypes"`
		UpdateStrategy struct {
			RollingUpdate map[string]any `yaml:"rollingUpdate"`
		} `yaml:"updateStrategy"`
		Template struct {
			Spec struct {
				InitContainers []container `yaml:"initContainers"`
				Containers     []container
				Volumes        []volume
			}
		}
	}
}

// daemonSets renders the chart and returns its DaemonSets by name.
func daemonSets(t *testing.T, args ...string) map[string]object {
	t.Helper()
	return objects(t, "DaemonSet", args...)
}

// objects renders the chart and returns its objects of a kind by name. A ClusterRole is a Role here.
func objects(t *testing.T, kind string, args ...string) map[string]object {
	t.Helper()
	found := map[string]object{}
	for in := yaml.NewDecoder(strings.NewReader(template(t, 0, args...).Stdout)); ; {
		var m object
		err := in.Decode(&m)
		if errors.Is(err, io.EOF) {
			return found
		}
		testenv.Must(t, err)
		if strings.TrimPrefix(m.Kind, "Cluster") == kind {
			found[m.Metadata.Name] = m
		}
	}
}

// TestSlowChartLetsTheAPIServerThrough has each combination of values that decide whether the pods call the API server.
// They have a token for it exactly then.
func TestSlowChartLetsTheAPIServerThrough(t *testing.T) {
	for _, reports := range []string{"", "events", "node-condition", "events,node-condition"} {
		for _, door := range []string{"", "plugin", "dra", "both"} {
			for _, dra := range []bool{false, true} {
				if !dra && (door == "dra" || door == "both") {
					continue // the chart refuses these
				}
				values := fmt.Sprintf("networkPolicy.enabled=true,door=%s,dra.enabled=%t", door, dra)
				if reports != "" {
					values += ",reportHealth={" + reports + "}"
				}
				policy := objects(t, "NetworkPolicy", "--set", values)["gpu-cdi-plugin"]
				calls := slices.ContainsFunc(daemonSets(t, "--set", values)["gpu-cdi-plugin"].Spec.Template.Spec.Volumes,
					func(v volume) bool { return v.Name == "api-access" })
				want := []string{"Ingress"} // everything may go out
				if !calls {
					want = append(want, "Egress")
				}
				if diff := cmp.Diff(want, policy.Spec.PolicyTypes); diff != "" {
					t.Errorf("%s: -want +got:\n%s", values, diff)
				}
			}
		}
	}
}

// TestSlowChartRightsAreDocumented compares the roles of the chart with the table of docs/kubernetes.md.
func TestSlowChartRightsAreDocumented(t *testing.T) {
	const everything = "everything"
	want := map[string][]string{"": nil, everything: nil}
	page, err := os.ReadFile("../../docs/kubernetes.md")
	testenv.Must(t, err)
	_, section, _ := strings.Cut(string(page), "\n## Rights in the API\n")
	section, _, _ = strings.Cut(section, "\n## ")
	value := ""
	for line := range strings.Lines(section) {
		cells := strings.Split(line, "|")
		if len(cells) != 7 || !strings.Contains(cells[3], "`") {
			continue // not a row of the table, or its head
		}
		if cell := strings.Trim(cells[1], " `"); cell != "" {
			value = cell
		}
		for verb := range strings.SplitSeq(cells[3], ",") {
			right := strings.ReplaceAll(cells[2]+" may "+verb+" "+cells[4], "`", "")
			for _, v := range []string{value, everything} {
				want[v] = append(want[v], strings.Join(strings.Fields(right), " "))
			}
		}
	}
	for v, rights := range want {
		args := []string{"--set", v}
		switch v {
		case everything:
			args = []string{"--values", "testdata/chart/everything.values.yaml", "--set", "nameOverride="}
		case "dra.nodesReadClaims=true":
			args = []string{"--set", "dra.enabled=true," + v}
			rights = append(rights, want["dra.enabled=true"]...)
		}
		slices.Sort(rights)
		if diff := cmp.Diff(rights, rightsOf(t, args...)); diff != "" {
			t.Errorf("values %q: -docs/kubernetes.md +chart:\n%s", v, diff)
		}
	}
}

// rightsOf renders the chart and returns who may do what.
func rightsOf(t *testing.T, args ...string) []string {
	t.Helper()
	who := map[string]string{"gpu-cdi-plugin": "serve", "gpu-cdi-plugin-node-claims": "all kubelets"}
	var rights []string
	for name, role := range objects(t, "Role", args...) {
		for _, rule := range role.Rules {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					rights = append(rights, who[name]+" may "+verb+" "+resource)
				}
			}
		}
	}
	slices.Sort(rights)
	return rights
}

func TestSlowChartDropsMaxSurgeBesideMaxUnavailable(t *testing.T) {
	for set, want := range map[string]map[string]any{
		"":    {"maxSurge": 1, "maxUnavailable": 0},
		"1":   {"maxUnavailable": 1},
		"10%": {"maxUnavailable": "10%"},
		"0%":  {"maxSurge": 1, "maxUnavailable": "0%"},
	} {
		var args []string
		if set != "" {
			args = []string{"--set", "updateStrategy.rollingUpdate.maxUnavailable=" + set}
		}
		got := daemonSets(t, args...)["gpu-cdi-plugin"].Spec.UpdateStrategy.RollingUpdate
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("maxUnavailable %q: -want +got:\n%s", set, diff)
		}
	}
}

func TestSlowChartPassesOddDirectoriesOn(t *testing.T) {
	for _, root := range []string{"/a: b", "/a #b", `/a"b`, "/run/nvidia/driver"} {
		sets := daemonSets(t, "--set", "mps.enabled=true", "--set-string", "nvidiaDriverRoot="+root)
		for _, name := range []string{"gpu-cdi-plugin", "gpu-cdi-plugin-mps"} {
			if args := sets[name].Spec.Template.Spec.Containers[0].Args; !slices.Contains(args, "--driver-root="+root) {
				t.Errorf("the arguments of %s are %q", name, args)
			}
		}
	}
}

// TestSlowChartChoosesTheDefaultConfiguration has the rules of NVIDIA's chart.
func TestSlowChartChoosesTheDefaultConfiguration(t *testing.T) {
	for name, c := range map[string]struct{ set, want string }{
		"the named one before others":   {"config.default=b,config.map.default=x,config.map.b=x", "gpu-cdi-plugin-b"},
		"the one with the name default": {"config.map.default=x,config.map.b=x", "gpu-cdi-plugin-default"},
		"the only one":                  {"config.map.b=x", "gpu-cdi-plugin-b"},
		"none of two":                   {"config.map.a=x,config.map.b=x", ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := ""
			for _, v := range daemonSets(t, "--set", c.set)["gpu-cdi-plugin"].Spec.Template.Spec.Volumes {
				got += v.ConfigMap.Name
			}
			if got != c.want {
				t.Errorf("nodes without the label have the configuration %q, want %q", got, c.want)
			}
		})
	}
}

// Before anything is removed, a serve that leaves has the arguments of the one that it follows.
func TestSlowChartLeavesFirst(t *testing.T) {
	values := []string{"--set", "dra.enabled=true,door=both,nvidiaDriverRoot=/driver,config.map.a=x,failOnInitError=true"}
	serve := daemonSets(t, values...)["gpu-cdi-plugin"].Spec.Template.Spec.Containers[0]
	for set, leave := range map[string]string{
		"cleanup=true": "unused", "cleanup=true,cleanupForce=true": "unprepared",
		"cleanup=true,cleanupForce=null": "unused", // an older release with --reuse-values
	} {
		spec := daemonSets(t, append(values, "--set", set)...)["gpu-cdi-plugin"].Spec.Template.Spec
		var names []string
		for _, c := range spec.InitContainers {
			names = append(names, c.Name)
		}
		if diff := cmp.Diff([]string{"leave", "remove-1-hook", "remove-2-specs", "remove-3-programs"}, names); diff != "" {
			t.Fatalf("%s: -want +got:\n%s", set, diff)
		}
		want := append([]string{"--leave=" + leave, "--fail-on-init-error=false"}, slices.DeleteFunc(slices.Clone(serve.Args),
			func(arg string) bool {
				return strings.HasPrefix(arg, "--listen=") || strings.HasPrefix(arg, "--fail-on-") || arg == "--take-over"
			})...)
		got := spec.InitContainers[0]
		slices.Sort(want)
		slices.Sort(got.Args)
		if diff := cmp.Diff(want, got.Args); diff != "" {
			t.Errorf("%s: arguments, -want +got:\n%s", set, diff)
		}
		if diff := cmp.Diff(serve.Env, got.Env); diff != "" || len(got.Env) == 0 {
			t.Errorf("%s: variables, -serve +leave:\n%s", set, diff)
		}
		if !slices.ContainsFunc(spec.Volumes, func(v volume) bool { return v.Name == "api-access" }) {
			t.Errorf("%s: there is no volume with the token", set)
		}
	}
}

func TestSlowChartNotesWaitForAllDaemonSets(t *testing.T) {
	r := helm(t, 0, "install", "gpus", chartDir, "--namespace", "kube-system", "--dry-run=client",
		"--set", "cleanup=true,config.map.a=x,config.map.b=x")
	const want = "rollout status daemonset -l app.kubernetes.io/instance=gpus,app.kubernetes.io/name=gpu-cdi-plugin\n"
	if !strings.Contains(r.Stdout, want) {
		t.Errorf("want %q in the notes, got %v", want, r)
	}
}

func TestSlowChartIsLinted(t *testing.T) {
	r := helm(t, 0, "lint", "--strict", chartDir, "--namespace", "kube-system")
	if strings.Contains(r.Stdout, "[WARNING]") {
		t.Errorf("helm lint: %v", r)
	}
}
