package config

import (
	"flag"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/configschema"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

// schema makes the JSON schema of the configuration file.
var schema = &configschema.Generator{
	Title: "Configuration of gpu-cdi-plugin", Keys: Keys, Bounds: bounds, Selector: reflect.TypeFor[resource.Selector](),
}

func bounds(path string) (minimum, maximum int) {
	switch {
	case path == "imex.channels":
		return 0, maxChannel
	case strings.HasPrefix(path, "allocation.weights."):
		return 0, allocator.MaxWeight
	case strings.HasSuffix(path, ".replicas"):
		return 2, 0
	case path == "health.xids[].xid":
		return 1, 0
	case path == "prestart.memory-tolerance-mib":
		return 0, maxToleranceMiB
	case path == "health.xids[].count":
		return 0, health.MaxCount
	}
	return 0, 0
}

// parsed is the configuration of a file, and the keys that the file has.
type parsed struct {
	Config Config
	Keys   []string
}

func parse(data []byte) (*parsed, error) {
	p := &parsed{Config: Default()}
	var err error
	if p.Keys, err = Keys.Parse(data, &p.Config); err != nil {
		return nil, err
	}
	return p, nil
}

// full has a value for every key.
const full = `
root: /host
driver-root: /run/nvidia/driver
driver-dirs: [/opt/nvidia]
dev-root: /host
nvml-library: /host/libnvidia-ml.so.1
cdi-dir: /etc/cdi
cdi-kind: example.com/gpu
hook-path: /opt/prestart-hook
no-hook: true
insecure-paths: true
log-level: debug
log-format: json
device-plugin-dir: /kubelet/device-plugins
pod-resources-socket: /data/kubelet/pod-resources/kubelet.sock
plugins-registry-dir: /kubelet/plugins_registry
registration: watcher
door: both
dra-gpus: [1, "*H200*"]
runtime-dir: /run/other
state-dir: /var/other
strategy: [cdi-cri, device-specs]
device-id-strategy: index
cdi-annotation-prefix: nvidia.cdi.k8s.io/
gpu-timeout: 1m30s
health:
  clean-for: 30s
  xids:
  - {xid: 48, action: reset, count: 2, within: 1h}
  - {xid: 74, action: service, count: 3, within: 10m}
report-health: [events, node-condition]
service-account-dir: /run/account
prestart:
  policy: clean
  strict: true
  programs: [dcgm]
  memory-tolerance-mib: 100
  exec: /opt/check
  exec-timeout: 3s
  resources:
  - {name: nvidia.com/gpu, policy: reset}
fail-on-init-error: true
take-over: true
leave: unprepared
listen: 127.0.0.1:9400
pod-metrics: true
node-labels: true
features-dir: /host/features.d
extras: [gds, nvswitch]
imex: {channels: [1, 7], required: true}
allocation:
  policy: numa
  shared-policy: pack
  weights:
    {system: 1, node: 2, host-bridge: 3, multiple-switches: 4, single-switch: 5, same-board: 6, nvlink: 7, nvswitch: 8}
resource: example.com/gpu
mig-strategy: mixed
mps: true
gpus:
  include: [0, "1:0", GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c]
  exclude: ["*T400*"]
resources:
  gpus: [{pattern: "*H100*", name: example.com/h100}]
  mig: [{pattern: 1g.*, name: example.com/small}]
sharing:
  time-slicing:
    rename-by-default: true
    fail-requests-greater-than-one: true
    resources:
      - {name: example.com/h100, devices: [0], replicas: 4, rename: example.com/quarter}
  mps:
    rename-by-default: true
    resources:
      - {name: example.com/h100, devices: [1], replicas: 2, rename: example.com/half}
`

func fullConfig() Config {
	return Config{
		Common: Common{
			Root: "/host", DriverRoot: "/run/nvidia/driver", DevRoot: "/host", NVMLLibrary: "/host/libnvidia-ml.so.1",
			DriverDirs: []string{"/opt/nvidia"},
			CDIDir:     "/etc/cdi", CDIKind: "example.com/gpu", HookPath: "/opt/prestart-hook", NoHook: true,
			InsecurePaths: true,
			LogLevel:      "debug", LogFormat: "json",
		},
		Plugin: Plugin{
			DevicePluginDir: "/kubelet/device-plugins", PluginsRegistryDir: "/kubelet/plugins_registry",
			PodResourcesSocket: "/data/kubelet/pod-resources/kubelet.sock",
			Registration:       RegisterWatcher, RuntimeDir: "/run/other", StateDir: "/var/other",
			Door: BothDoors, DRAGPUs: []resource.Selector{"1", "*H200*"},
			Strategy: []resource.Strategy{resource.CDICRI, resource.DeviceSpecs}, DeviceIDStrategy: ByIndex,
			CDIAnnotationPrefix: "nvidia.cdi.k8s.io/", GPUTimeout: configfile.Duration(90 * time.Second), FailOnInitError: true,
			ReportHealth: []HealthReport{ReportEvents, ReportCondition}, ServiceAccountDir: "/run/account",
			PreStart: PreStart{
				Policy: prepare.Clean, Strict: true, Programs: []string{"dcgm"},
				MemoryToleranceMiB: 100, Exec: "/opt/check", ExecTimeout: configfile.Duration(3 * time.Second),
				Resources: []PreStartRule{{Name: "nvidia.com/gpu", Policy: prepare.Reset}},
			},
			Health: Health{CleanFor: configfile.Duration(30 * time.Second), XIDs: []XIDRule{
				{XID: 48, Action: health.Reset, Count: 2, Within: configfile.Duration(time.Hour)},
				{XID: 74, Action: health.Service, Count: 3, Within: configfile.Duration(10 * time.Minute)},
			}},
			TakeOver: true, Leave: LeaveUnprepared,
			Listen:     "127.0.0.1:9400",
			PodMetrics: true, NodeLabels: true, FeaturesDir: "/host/features.d",
			Extras: []Extra{GDS, NVSwitch}, IMEX: IMEX{Channels: []int{1, 7}, Required: true},
			Allocation: Allocation{
				Policy: allocator.NUMA, SharedPolicy: allocator.Pack,
				Weights: allocator.Weights{
					System: 1, Node: 2, HostBridge: 3, MultipleSwitches: 4, SingleSwitch: 5, SameBoard: 6,
					NVLink: 7, NVSwitch: 8,
				},
			},
			Config: resource.Config{
				Resource: "example.com/gpu", MIGStrategy: resource.MIGMixed,
				GPUs: resource.Filter{
					Include: []resource.Selector{"0", "1:0", "GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c"},
					Exclude: []resource.Selector{"*T400*"},
				},
				Names: resource.Names{
					GPUs: []resource.NameRule{{Pattern: "*H100*", Name: "example.com/h100"}},
					MIG:  []resource.NameRule{{Pattern: "1g.*", Name: "example.com/small"}},
				},
				MPS: true,
				Sharing: resource.Sharing{
					TimeSlicing: resource.TimeSlicing{
						RenameByDefault: true, FailRequestsGreaterThanOne: true,
						Resources: []resource.SharingRule{{
							Name: "example.com/h100", Devices: []resource.Selector{"0"}, Replicas: 4,
							Rename: "example.com/quarter",
						}},
					},
					MPS: resource.MPS{RenameByDefault: true, Resources: []resource.SharingRule{{
						Name: "example.com/h100", Devices: []resource.Selector{"1"}, Replicas: 2,
						Rename: "example.com/half",
					}}},
				},
			},
		},
	}
}

func TestParseReadsEveryKey(t *testing.T) {
	f, err := parse([]byte(full))
	testenv.Must(t, err)
	if diff := cmp.Diff(fullConfig(), f.Config); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if err := f.Config.Validate(); err != nil {
		t.Error(err)
	}
	var zero []string
	for path := range leaves(reflect.ValueOf(f.Config), "") {
		if path.value.IsZero() {
			zero = append(zero, path.path)
		}
	}
	if len(zero) > 0 {
		t.Errorf("the test's file has no value for %q", zero)
	}
}

func TestOptionsSetTheConfiguration(t *testing.T) {
	c, want := Default(), fullConfig()
	set := map[string]string{}
	for _, o := range Keys.Options(&want) {
		set[o.Name()] = o.String()
	}
	if len(set) != 37 || set["strategy"] != "cdi-cri,device-specs" || set["gpu-timeout"] != "1m30s" {
		t.Errorf("options %q", set)
	}
	for _, o := range Keys.Options(&c) {
		if o.Usage() == "" {
			t.Errorf("%s has no usage", o.Name())
		}
		if err := o.Set(set[o.Name()]); err != nil {
			t.Error(err)
		}
	}
	want.IMEX, want.Allocation, want.GPUs, want.Names, want.Sharing = c.IMEX, c.Allocation, c.GPUs, c.Names, c.Sharing
	want.Health, want.PreStart = c.Health, c.PreStart
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestOptionsRefuseWrongValues(t *testing.T) {
	c := Default()
	got := map[string]string{}
	for _, o := range Keys.Options(&c) {
		if err := o.Set("wrong"); err != nil {
			got[o.Name()] = err.Error()
		}
	}
	want := map[string]string{
		"insecure-paths":     `want true or false, got "wrong"`,
		"log-level":          `unknown value "wrong"; known are debug, info, warn, error`,
		"log-format":         `unknown value "wrong"; known are text, json`,
		"registration":       `unknown value "wrong"; known are kubelet, watcher`,
		"door":               `unknown value "wrong"; known are plugin, dra, both`,
		"device-id-strategy": `unknown value "wrong"; known are uuid, index`,
		"gpu-timeout":        `"wrong" is not a duration of more than 0, such as 10s or 1m30s`,
		"fail-on-init-error": `want true or false, got "wrong"`,
		"take-over":          `want true or false, got "wrong"`,
		"leave":              `unknown value "wrong"; known are never, unused, unprepared`,
		"mig-strategy":       `unknown value "wrong"; known are none, single, mixed`,
		"mps":                `want true or false, got "wrong"`,
		"no-hook":            `want true or false, got "wrong"`,
		"pod-metrics":        `want true or false, got "wrong"`,
		"node-labels":        `want true or false, got "wrong"`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestParseReturnsTheKeysOfTheFile(t *testing.T) {
	for name, tt := range map[string]struct {
		file string
		want []string
	}{
		"an empty file":              {"", nil},
		"a comment alone":            {"# nothing\n", nil},
		"null is no value":           {"cdi-dir: ~\nlisten:\nstrategy: ~\nroot: &a ~\ndev-root: *a\n", nil},
		"an empty text is a value":   {"listen: ''\n", []string{"listen"}},
		"the default is a value too": {"cdi-dir: /var/run/cdi\n", []string{"cdi-dir"}},
		"JSON":                       {`{"strategy": ["envvar"], "gpus": {"include": [0]}}`, []string{"gpus", "strategy"}},
		"an alias has its value":     {"root: &a /x\ndev-root: *a\n", []string{"dev-root", "root"}},
		"a number is valid as text":  {"cdi-kind: 5\n", []string{"cdi-kind"}},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := parse([]byte(tt.file))
			testenv.Must(t, err)
			if diff := cmp.Diff(tt.want, f.Keys); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if err := f.Config.Validate(); tt.want == nil && (err != nil || !reflect.DeepEqual(f.Config, Default())) {
				t.Errorf("%v and %+v, want the default", err, f.Config)
			}
		})
	}
}

func TestParseReportsAllProblems(t *testing.T) {
	for name, tt := range map[string]struct {
		file string
		want []string
	}{
		"unknown keys, at every depth": {
			"cdi_dir: /x\ngpus: {only: [1]}\nsharing: {time-slicing: {resources: [{nam: x}]}}\n",
			[]string{
				"line 1: unknown key cdi_dir; did you mean cdi-dir?", "line 2: unknown key gpus.only",
				"line 3: unknown key sharing.time-slicing.resources[0].nam; did you mean name?",
				`sharing.time-slicing.resources[0].name: resource name "": want VENDOR/NAME, such as nvidia.com/gpu`,
				"sharing.time-slicing.resources[0].replicas: want 2 or more, got 0",
			},
		},
		"keys of earlier versions": {
			"prestart: {kill-orphans: true}\ndialect: kubelet-1.36\nsharing: {mps: {shared-memory-mib: 64}}\n",
			[]string{
				"line 1: prestart.kill-orphans: " + gone["prestart.kill-orphans"], "line 2: dialect: " + gone["dialect"],
				"line 3: sharing.mps.shared-memory-mib: " + gone["sharing.mps.shared-memory-mib"],
			},
		},
		"values of the wrong kind, and wrong values beside them": {
			"gpu-timeout: 0\nstrategy: {cdi-cri: 1}\ngpus: [0]\nroot: [a]\nmig-strategy: some\n" +
				"sharing: {time-slicing: {rename-by-default: often}}\n",
			[]string{
				`line 1: gpu-timeout: want a duration of more than 0, such as 10s or 1m30s, got "0"`,
				"line 2: strategy: want a list, got keys and values", "line 3: gpus: want keys and values, got a list",
				"line 4: root: want text, got a list",
				`line 6: sharing.time-slicing.rename-by-default: want true or false, got "often"`,
				`mig-strategy: unknown value "some"; known are none, single, mixed`,
			},
		},
		"values of the wrong kind below": {
			"sharing: {time-slicing: {resources: [{name: a.b/c, replicas: two}]}}\nroot: [a]\n",
			[]string{
				`line 1: sharing.time-slicing.resources[0].replicas: want a whole number, got "two"`,
				"line 2: root: want text, got a list",
			},
		},
		"a wrong value whose key begins like that of a value of the wrong kind": {
			"mps: x\nresource: [a]\nresources: {mig: [{pattern: a, name: b}]}\n",
			[]string{
				`line 1: mps: want true or false, got "x"`, "line 2: resource: want text, got a list",
				`resources.mig[0].name: resource name "b": want VENDOR/NAME, such as nvidia.com/gpu`,
			},
		},
		"a key twice":    {"root: /a\nroot: /b\n", []string{"line 2: duplicate key root, first in line 1"}},
		"two documents":  {"root: /a\n---\nroot: /b\n", []string{"more than one YAML document"}},
		"no YAML":        {"root: [\n", []string{"yaml: line 1: did not find expected node content"}},
		"no mapping":     {"only text\n", []string{`line 1: want keys and values, got "only text"`}},
		"a file too big": {"#" + strings.Repeat("x", configfile.MaxFile), []string{"larger than 1048576 bytes"}},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := parse([]byte(tt.file))
			if err == nil {
				t.Fatalf("no error, and %+v", f)
			}
			if diff := cmp.Diff(tt.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestValidateReportsAllProblems(t *testing.T) {
	c := Config{Common: Common{CDIKind: "gpu", LogLevel: "loud"}, Plugin: Plugin{
		Strategy: []resource.Strategy{"cdi", resource.CDICRI, resource.CDICRI}, Listen: ":9400", StateDir: "state",
		PreStart: PreStart{
			Programs: []string{"Xorg", "/bin/x"}, Resources: []PreStartRule{{"a.b/c", "none"}, {"a.b/c", "check"}},
		},
		Health: Health{CleanFor: configfile.Duration(time.Hour + 1)}, ReportHealth: []HealthReport{"condition"},
		Extras: []Extra{"rdma", GDS, GDS}, IMEX: IMEX{Channels: []int{3, -1, maxChannel + 1, 3}},
		Allocation: Allocation{Policy: "best", Weights: allocator.Weights{Node: -1, NVLink: allocator.MaxWeight + 1}},
		Config:     resource.Config{Resource: "gpu"},
	}}
	want := []string{
		"root is empty",
		"cdi-dir is empty",
		`cdi-kind "gpu": want VENDOR/CLASS, such as nvidia.com/gpu: invalid vendor. empty name`,
		`log-level: unknown value "loud"; known are debug, info, warn, error`,
		`log-format: unknown value ""; known are text, json`,
		"device-plugin-dir is empty",
		"plugins-registry-dir is empty",
		`registration: unknown value ""; known are kubelet, watcher`,
		`door: unknown value ""; known are plugin, dra, both`,
		`leave: unknown value ""; known are never, unused, unprepared`,
		`runtime-dir "": want an absolute path, the same as on the host`,
		`state-dir "state": want an absolute path, the same as on the host`,
		`strategy: unknown value "cdi"; known are cdi-cri, cdi-annotations, device-specs, envvar`,
		"strategy: duplicate value cdi-cri",
		`device-id-strategy: unknown value ""; known are uuid, index`,
		`cdi-annotation-prefix "": want a domain and a slash, such as cdi.k8s.io/, and at most 31 characters after it`,
		"gpu-timeout 0s: want 1s to 1h0m0s",
		"health.clean-for 1h0m0.000000001s: want more than 0 and at most 1h0m0s",
		`report-health: unknown value "condition"; known are events, node-condition`,
		"service-account-dir is empty",
		`prestart.policy: unknown value ""; known are none, check, clean, reset`,
		"prestart.exec-timeout 0s: want more than 0 and at most 1h0m0s",
		`prestart.programs[1] "/bin/x": want the name of an executable without its directory`,
		"prestart.resources[1].name a.b/c: another entry has the same name",
		`listen ":9400": want a host; use 0.0.0.0:9400 or [::]:9400 for all addresses of the node`,
		`features-dir "": want an absolute path, the same as on the host`,
		`extras: unknown value "rdma"; known are gds, gdrcopy, mofed, nvswitch`,
		"extras: duplicate value gds",
		"imex.channels: want numbers from 0 to 1048575, got -1",
		"imex.channels: want numbers from 0 to 1048575, got 1048576",
		"imex.channels: duplicate channel 3",
		`allocation.policy: unknown value "best"; known are topology, partition, numa, spread, pack`,
		`allocation.shared-policy: unknown value ""; known are topology, partition, numa, spread, pack`,
		"allocation.weights.node: want a number from 0 to 10000, got -1",
		"allocation.weights.nvlink: want a number from 0 to 10000, got 10001",
		`resource: resource name "gpu": want VENDOR/NAME, such as nvidia.com/gpu`,
		`mig-strategy: unknown value ""; known are none, single, mixed`,
	}
	err := c.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestRulesForXIDs(t *testing.T) {
	c := Default()
	c.Health.XIDs = []XIDRule{
		{XID: 0, Action: health.Reset},
		{XID: 48, Action: "panic"},
		{XID: 48, Action: health.None, Count: -1},
		{XID: 74, Action: health.Reset, Count: 3},
		{XID: 79, Action: health.Reset, Within: 1},
	}
	want := []string{
		"health.xids[0].xid 0: want a code of 1 or more",
		`health.xids[1].action: unknown value "panic"; known are none, application, probe, reset, reboot, service`,
		"health.xids[2].xid 48: another rule has the same XID",
		"health.xids[2].count -1: want 1 to 1000",
		"health.xids[3]: want count (more than 1) and within together",
		"health.xids[4]: want count (more than 1) and within together",
	}
	if diff := cmp.Diff(strings.Join(want, "\n"), fmt.Sprint(c.Validate())); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestRequiredNeedsChannels(t *testing.T) {
	c := Default()
	c.IMEX.Required = true
	if err := c.Validate(); err == nil || err.Error() != "imex.required: want a channel in imex.channels" {
		t.Errorf("error %v", err)
	}
	c.IMEX.Channels = []int{0}
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}

// Policy reset cannot reset replicas, so with strict no container would get one.
func TestDoors(t *testing.T) {
	for name, c := range map[string]struct {
		door     Door
		gpus     []resource.Selector
		strategy resource.Strategy
		want     string
	}{
		"claims":                 {door: DRADoor, strategy: resource.CDICRI},
		"both":                   {door: BothDoors, gpus: []resource.Selector{"0", "*H100*"}, strategy: resource.CDICRI},
		"the plugin without CDI": {door: PluginDoor, strategy: resource.Envvar},
		"claims without CDI": {
			door: DRADoor, strategy: resource.Envvar,
			want: "strategy: want cdi-cri with door dra, since containers with a claim get their devices by CDI",
		},
		"both without GPUs for DRA": {
			door: BothDoors, strategy: resource.CDICRI,
			want: "dra-gpus is empty: name the GPUs that DRA offers, or use another door",
		},
		"GPUs for DRA without both": {
			door: DRADoor, gpus: []resource.Selector{"0"}, strategy: resource.CDICRI,
			want: "dra-gpus: it is used with door both only",
		},
		"a UUID that is none": {
			door: BothDoors, gpus: []resource.Selector{"0", "GPU-1"}, strategy: resource.CDICRI,
			want: `dra-gpus[1]: "GPU-1" is not GPU- or MIG- followed by a UUID`,
		},
		"another door": {
			door: "nri", strategy: resource.CDICRI, want: `door: unknown value "nri"; known are plugin, dra, both`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			all := Default()
			all.Door, all.DRAGPUs, all.Strategy = c.door, c.gpus, []resource.Strategy{c.strategy}
			got := ""
			if err := all.Validate(); err != nil {
				got = err.Error()
			}
			if got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestStrictResetOfReplicas(t *testing.T) {
	const gpu, other = "a.b/gpu", "a.b/other.shared" // the names of the replicas
	for name, tt := range map[string]struct {
		policy  prepare.Policy
		strict  bool
		rules   []PreStartRule
		refused []string
	}{
		"all resources":              {prepare.Reset, true, nil, []string{gpu, other}},
		"one resource":               {prepare.Reset, true, []PreStartRule{{gpu, prepare.Clean}}, []string{other}},
		"one resource of its own":    {prepare.Check, true, []PreStartRule{{other, prepare.Reset}}, []string{other}},
		"the name without replicas":  {prepare.Check, true, []PreStartRule{{"a.b/other", prepare.Reset}}, nil},
		"no resource without strict": {prepare.Reset, false, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			c := Default()
			c.PreStart.Policy, c.PreStart.Strict, c.PreStart.Resources = tt.policy, tt.strict, tt.rules
			c.MPS = true
			c.Sharing.TimeSlicing.Resources = []resource.SharingRule{{Name: gpu, Replicas: 2}}
			c.Sharing.MPS.Resources = []resource.SharingRule{{Name: "a.b/other", Replicas: 2}}
			c.Sharing.MPS.RenameByDefault = true
			want := ""
			for _, name := range tt.refused {
				want += "prestart.strict: every replica of " + name + " would be refused, since the resource has policy " +
					"reset and a replica cannot be reset: give it another policy in prestart.resources\n"
			}
			got := ""
			if err := c.Validate(); err != nil {
				got = err.Error() + "\n"
			}
			if got != want {
				t.Errorf("%q, want %q", got, want)
			}
		})
	}
}

func TestListen(t *testing.T) {
	for address, ok := range map[string]bool{
		"": true, "127.0.0.1:9400": true, "[::1]:0": true, "localhost:65535": true, "0.0.0.0:9400": true,
		"127.0.0.1": false, "9400": false, ":9400": false, "localhost:65536": false, "localhost:http": false,
		"::1:80": false,
	} {
		if err := checkListen(address); (err == nil) != ok {
			t.Errorf("%q: %v", address, err)
		}
	}
}

func TestTheDefaultIsValidAndItsDocumentRoundTrips(t *testing.T) {
	c := Default()
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	doc, err := Keys.Document(&c)
	testenv.Must(t, err)
	f, err := parse(doc)
	if err != nil {
		t.Fatalf("%v\n%s", err, doc)
	}
	again, err := Keys.Document(&f.Config)
	testenv.Must(t, err)
	if diff := cmp.Diff(string(doc), string(again)); diff != "" {
		t.Errorf("-once +again\n%s", diff)
	}
}

// Examples must be valid without their comment signs.
func TestExamplesAreValid(t *testing.T) {
	for path, example := range Keys.Examples {
		indent, text := "\n", ""
		for name := range strings.SplitSeq(path, ".") {
			text += indent + name + ":"
			indent += "  "
		}
		text += indent + strings.ReplaceAll(example, "\n", indent)
		f, err := parse([]byte(text))
		if err == nil {
			f.Config.MPS = true // documented as needed for sharing.mps
			err = f.Config.Validate()
		}
		if err != nil {
			t.Errorf("%s: %v\n%s", path, err, text)
		}
	}
}

type leaf struct {
	path  string
	value reflect.Value
}

// leaves yields all values in a configuration that are not structs.
func leaves(v reflect.Value, path string) func(func(leaf) bool) {
	return func(yield func(leaf) bool) {
		var walk func(reflect.Value, string) bool
		walk = func(v reflect.Value, path string) bool {
			switch {
			case v.Kind() == reflect.Struct:
				for field, value := range v.Fields() {
					if !walk(value, path+"."+field.Name) {
						return false
					}
				}
				return true
			case v.Kind() == reflect.Slice && v.Len() > 0:
				for i := range v.Len() {
					if !walk(v.Index(i), path+"[]") {
						return false
					}
				}
				return true
			}
			return yield(leaf{path, v})
		}
		walk(v, path)
	}
}

func TestEveryKeyIsDocumentedInTheOrderOfTheStruct(t *testing.T) {
	schema.Documented(t, reflect.TypeFor[Config]())
}

func TestThePublishedSchemaIsThisOne(t *testing.T) {
	schema.Published(t, Default(), "../../specs/config.schema.json", *update)
}

func TestAnnotationPrefixes(t *testing.T) {
	for prefix, valid := range map[string]bool{
		"cdi.k8s.io/": true, "nvidia.cdi.k8s.io/": true, "example.com/gpu.": true, "a/" + strings.Repeat("x", 31): true,
		"": false, "cdi.k8s.io": false, "/": false, "/x": false, "A.b/": false, "a.b/-x": false,
		"a b/": false, "a/b/": false,
		"a/" + strings.Repeat("x", 32): false, "a.b/x\n": false, "-a/": false, strings.Repeat("a", 253) + "/": false,
	} {
		c := Default()
		c.CDIAnnotationPrefix = prefix
		if err := c.Validate(); (err == nil) != valid {
			t.Errorf("%q: %v", prefix, err)
		}
	}
}

func TestTheSchemaAndTheProgramAgree(t *testing.T) {
	validate := schema.Compile(t, Default())
	document, err := Keys.Document(new(fullConfig()))
	testenv.Must(t, err)
	defaults, err := Keys.Document(new(Default()))
	testenv.Must(t, err)
	for name, tt := range map[string]struct {
		file string
		ok   bool
	}{
		"every key":                   {full, true},
		"the document":                {string(document), true},
		"the default":                 {string(defaults), true},
		"nothing":                     {"{}", true},
		"an unknown key":              {"cdi_dir: /x", false},
		"an unknown key below":        {"gpus: {only: []}", false},
		"an unknown value":            {"mig-strategy: some", false},
		"an unknown strategy":         {"strategy: [cdi]", false},
		"no strategy":                 {"strategy: []", false},
		"an extra twice":              {"extras: [gds, gds]", false},
		"an unknown extra":            {"extras: [imex]", false},
		"channels":                    {"imex: {channels: [0, 5]}", true},
		"a negative channel":          {"imex: {channels: [-1]}", false},
		"a channel twice":             {"imex: {channels: [1, 1]}", false},
		"a text for a channel":        {"imex: {channels: [all]}", false},
		"no driver needed":            {"fail-on-init-error: false", true},
		"a time":                      {"gpu-timeout: 1m30s", true},
		"a time without a unit":       {"gpu-timeout: 10", false},
		"a text for a time":           {"gpu-timeout: soon", false},
		"a strategy twice":            {"strategy: [envvar, envvar]", false},
		"a text for a list":           {"strategy: envvar", true},
		"a list with commas":          {"strategy: 'envvar, cdi-cri'\nextras: gds,nvswitch", true},
		"an unknown one among commas": {"strategy: envvar,cdi", false},
		"an unknown extra as text":    {"extras: imex", false},
		"no strategy as text":         {"strategy: ''", false},
		"no extra as text":            {"extras: ''", true},
		"a channel":                   {"imex: {channels: 5}", true},
		"channels with commas":        {"imex: {channels: '0, 5'}", true},
		"a channel that is too large": {"imex: {channels: 1048576}", false},
		"selectors with commas": {
			"gpus: {include: 0, exclude: 'GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c,1:0'}", true,
		},
		"a text for rules":             {"resources: {gpus: x}", false},
		"a number for rules":           {"sharing: {time-slicing: {resources: 3}}", false},
		"a rule without a name":        {"resources: {gpus: [{pattern: x}]}", false},
		"a rule without replicas":      {"sharing: {time-slicing: {resources: [{name: a.b/c}]}}", false},
		"one replica":                  {"sharing: {time-slicing: {resources: [{name: a.b/c, replicas: 1}]}}", false},
		"a text for the replicas":      {"sharing: {time-slicing: {resources: [{name: a.b/c, replicas: x}]}}", false},
		"a rule that is for all":       {"sharing: {time-slicing: {resources: [{name: a.b/c, replicas: 2}]}}", true},
		"MPS":                          {"mps: true\nsharing: {mps: {resources: [{name: a.b/c, replicas: 2}]}}", true},
		"a text for MPS":               {"mps: some", false},
		"a fraction":                   {"prestart: {memory-tolerance-mib: 1.5}", false},
		"a fraction in a list":         {"imex: {channels: [1, 2.5]}", false},
		"a whole number with a point":  {"prestart: {memory-tolerance-mib: 64.0}", true},
		"an MPS rule without replicas": {"mps: true\nsharing: {mps: {resources: [{name: a.b/c}]}}", false},
		"a rule for an XID":            {"health: {xids: [{xid: 48, action: reset}]}", true},
		"a rule with a threshold": {
			"health: {xids: [{xid: 74, action: reset, count: 3, within: 10m}]}", true,
		},
		"an unknown action":            {"health: {xids: [{xid: 48, action: panic}]}", false},
		"a rule without an action":     {"health: {xids: [{xid: 48}]}", false},
		"a rule without an XID":        {"health: {xids: [{action: reset}]}", false},
		"too many events":              {"health: {xids: [{xid: 74, action: reset, count: 1001, within: 10m}]}", false},
		"a policy for all devices":     {"prestart: {policy: clean}", true},
		"an unknown policy for them":   {"prestart: {policy: wash}", false},
		"a policy for a resource":      {"prestart: {resources: [{name: nvidia.com/gpu, policy: reset}]}", true},
		"too much tolerance":           {"prestart: {memory-tolerance-mib: 1048577}", false},
		"some weights":                 {"allocation: {weights: {nvlink: 0, system: 10000}}", true},
		"a weight that is too large":   {"allocation: {weights: {nvlink: 10001}}", false},
		"a negative weight":            {"allocation: {weights: {nvlink: -1}}", false},
		"an unknown weight":            {"allocation: {weights: {pcie: 1}}", false},
		"an unknown policy":            {"allocation: {policy: best}", false},
		"an unknown policy for shares": {"allocation: {shared-policy: best}", false},
		"a selector that is no scalar": {"gpus: {include: [[0]]}", false},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := parse([]byte(tt.file))
			if err == nil {
				err = f.Config.Validate()
			}
			if (err == nil) != tt.ok {
				t.Errorf("the program returns %v", err)
			}
			if err := validate(t, tt.file); (err == nil) != tt.ok {
				t.Errorf("the schema returns %v", err)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(full))
	f.Add([]byte("cdi_dir: 1\nroot: [a]\n"))
	f.Add([]byte("root: &a x\ndev-root: *a\n--- {}\n"))
	f.Add([]byte("<<: {root: /x}\ngpus: ~\n"))
	f.Add([]byte(""))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := parse(data)
		if (file == nil) == (err == nil) {
			t.Fatalf("got %v and error %v, want exactly one", file, err)
		}
		if file != nil {
			_ = file.Config.Validate()
		}
	})
}
