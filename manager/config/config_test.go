package config

import (
	"flag"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/configschema"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

var schema = &configschema.Generator{
	Title: "Configuration of device-manager", Keys: Keys, Bounds: func(path string) (minimum, maximum int) {
		if path == "max-pods" {
			return 1, maxNumber
		}
		return 0, maxNumber
	},
}

// full has a value for every key.
const full = `
root: /host
cdi-dir: /etc/cdi
api-socket: /manager/api.sock
insecure-paths: true
log-level: debug
log-format: json
plugin: plugin --dir "/manager/sockets"
socket-dir: /manager/sockets
plugins-registry-dir: /manager/registry
state-dir: /manager/state
pod-resources-socket: /manager/pod-resources.sock
api-group: devices
lease-group: users
device-info: /plugin/devices
topology-policy: restricted
topology-scope: pod
seed: "7"
system-reserved: [cpu=500m, memory=1Gi]
kube-reserved: [cpu=100m]
eviction-hard: [memory.available<5%]
max-pods: 250
pods-per-core: 10
`

func fullConfig() Config {
	return Config{
		Common: Common{
			Root: "/host", CDIDir: "/etc/cdi", APISocket: "/manager/api.sock", InsecurePaths: true,
			LogLevel: "debug", LogFormat: "json",
		},
		Serve: Serve{
			Plugin:    `plugin --dir "/manager/sockets"`,
			SocketDir: "/manager/sockets", PluginsRegistryDir: "/manager/registry", StateDir: "/manager/state",
			PodResourcesSocket: "/manager/pod-resources.sock", APIGroup: "devices",
			LeaseGroup: "users", DeviceInfo: "/plugin/devices", TopologyPolicy: "restricted",
			TopologyScope: "pod", Seed: "7", SystemReserved: []string{"cpu=500m", "memory=1Gi"},
			KubeReserved: []string{"cpu=100m"}, EvictionHard: []string{"memory.available<5%"},
			MaxPods: 250, PodsPerCore: 10,
		},
	}
}

func TestParseReadsEveryKey(t *testing.T) {
	c := Default()
	if _, err := Keys.Parse([]byte(full), &c); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(fullConfig(), c); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
}

func TestTheDefaultIsValidAndItsDocumentIsTheDefault(t *testing.T) {
	want, got := Default(), Default()
	if err := want.Validate(); err != nil {
		t.Error(err)
	}
	document, err := Keys.Document(&want)
	testenv.Must(t, err)
	if _, err := Keys.Parse(document, &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestValidateReportsAllProblems(t *testing.T) {
	c := Config{Serve: Serve{SocketDir: "sockets", PodResourcesSocket: "sockets/pods.sock", Seed: "-1", PodsPerCore: -1}}
	want := []string{
		"root is empty",
		"cdi-dir is empty",
		"api-socket is empty",
		`log-level: unknown value ""; known are debug, info, warn, error`,
		`log-format: unknown value ""; known are text, json`,
		`socket-dir "sockets": want an absolute path, the same as on the host`,
		"plugins-registry-dir is empty",
		`state-dir "": want an absolute path, the same as on the host`,
		`device-info "": want an absolute path, the same as on the host`,
		`pod-resources-socket "sockets/pods.sock": want another directory than socket-dir, whose sockets are removed`,
		`topology-policy: unknown value ""; known are none, best-effort, restricted, single-numa-node`,
		`topology-scope: unknown value ""; known are container, pod`,
		`seed "-1": want a whole number`,
		"max-pods 0: want 1 to 2147483647",
		"pods-per-core -1: want 0 to 2147483647",
	}
	err := c.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestPathsOfSocketsHaveTheLengthThatTheKernelAllows(t *testing.T) {
	name := func(size int) string { return "/" + strings.Repeat("x", size-1) }
	for what, c := range map[string]struct {
		change func(*Config)
		want   string // of the error; empty means none
	}{
		"as long as possible": {func(c *Config) { c.APISocket, c.PodResourcesSocket = name(95), "/d"+name(105) }, ""},
		"96 bytes for the API, whose socket of leases has a longer name": {
			func(c *Config) { c.APISocket = name(96) }, `api-socket "` + name(96) + `": it has 96 bytes; at most 95`,
		},
		"108 bytes for PodResources": {
			func(c *Config) { c.PodResourcesSocket = name(108) }, "it has 108 bytes; at most 107",
		},
		"a directory of 94 bytes": {func(c *Config) { c.SocketDir = name(94) }, ""},
		"a directory of 95 bytes": {func(c *Config) { c.SocketDir = name(95) }, "it has 95 bytes; at most 94"},
	} {
		t.Run(what, func(t *testing.T) {
			config := Default()
			c.change(&config)
			err := config.Validate()
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestEveryKeyIsDocumentedInTheOrderOfTheStruct(t *testing.T) {
	schema.Documented(t, reflect.TypeFor[Config]())
}

func TestThePublishedSchemaIsThisOne(t *testing.T) {
	schema.Published(t, Default(), "../../specs/device-manager.schema.json", *update)
}

func TestTheSchemaAndTheProgramAgree(t *testing.T) {
	validate := schema.Compile(t, Default())
	for name, tt := range map[string]struct {
		file string
		ok   bool
	}{
		"every key":               {full, true},
		"nothing":                 {"{}", true},
		"an unknown key":          {"socket_dir: /x", false},
		"a key of gpu-cdi-plugin": {"cdi-kind: nvidia.com/gpu", false},
		"an unknown policy":       {"topology-policy: some", false},
		"a text for a list":       {"system-reserved: cpu=1", true},
		"a number for a path":     {"state-dir: [a]", false},
		"a number of pods":        {"max-pods: 2147483647", true},
		"no pod":                  {"max-pods: 0", false},
		"too many pods":           {"pods-per-core: 2147483648", false},
		"half a pod":              {"pods-per-core: 0.5", false},
	} {
		t.Run(name, func(t *testing.T) {
			c := Default()
			_, err := Keys.Parse([]byte(tt.file), &c)
			if err == nil {
				err = c.Validate()
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
