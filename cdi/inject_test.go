package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/test/lib/testenv"
)

// plainConfig is a bundle's configuration with keys that runtime-spec's types lack, at every level.
const plainConfig = `{
	"ociVersion": "1.0.2",
	"x-top": {"big": 9007199254740993, "html": "<&>"},
	"process": {
		"user": {"uid": 0, "gid": 0, "x-user": 1},
		"args": ["sh"], "cwd": "/", "env": ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all"],
		"x-process": [1.50, null]
	},
	"root": {"path": "rootfs", "readonly": true},
	"mounts": [
		{"destination": "/proc", "type": "proc", "source": "proc", "x-mount": "kept"},
		{"destination": "/a/b/c", "type": "bind", "source": "/x", "x-mount": "kept too"}
	],
	"hooks": {"createContainer": [{"path": "/bin/first", "x-hook": true}]},
	"linux": {
		"resources": {"devices": [{"allow": false, "access": "rwm", "x-rule": 1}], "x-resources": {}},
		"namespaces": [{"type": "mount"}],
		"x-linux": "kept"
	}
}`

// gpuSpec has devices of nodes that every host has.
func gpuSpec(hook string) *specs.Spec {
	node := func(p string) specs.ContainerEdits {
		return specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/gpu" + p, HostPath: "/dev/" + p, Permissions: "rw"},
		}}
	}
	return &specs.Spec{
		Version: "0.5.0", Kind: DefaultKind,
		Devices: []specs.Device{
			{Name: "0", ContainerEdits: node("null")},
			{Name: "1", ContainerEdits: node("zero")},
			{Name: "gone", ContainerEdits: node("not-there")},
		},
		ContainerEdits: specs.ContainerEdits{
			Env:    []string{noInjection},
			Mounts: []*specs.Mount{{HostPath: "/driver/lib.so", ContainerPath: "/lib/lib.so", Options: fileOptions()}},
			Hooks: []*specs.Hook{
				{HookName: "createContainer", Path: hook, Args: []string{"x"}, Env: []string{hookEnv}},
			},
		},
	}
}

// bundle is a tree with a bundle in /bundle and a spec in /cdi.
func bundle(t testing.TB, config string) *tree {
	t.Helper()
	r := newTree(t)
	r.file("/bundle/config.json", config, 0o640)
	writeSpec(t, r.dir+"/cdi/gpu.json", gpuSpec(testHook))
	return r
}

func (r *tree) inject(names ...string) (bool, error) {
	for i, n := range names {
		if !strings.Contains(n, "=") {
			names[i] = DefaultKind + "=" + n
		}
	}
	return Inject(r.dir+"/bundle", names, Additions{}, r.dir+"/cdi")
}

func (r *tree) config() string {
	r.t.Helper()
	data, err := os.ReadFile(r.dir + "/bundle/config.json")
	testenv.Must(r.t, err)
	return string(data)
}

// decode reads a configuration as JSON.
func decode(t testing.TB, config string) map[string]any {
	t.Helper()
	v, err := decodeJSON([]byte(config))
	testenv.Must(t, err)
	return v.(map[string]any)
}

func TestInjectKeepsUnknownKeys(t *testing.T) {
	r := bundle(t, plainConfig)
	changed, err := r.inject("0")
	if err != nil || !changed {
		t.Fatalf("changed %v, %v", changed, err)
	}
	want := decode(t, plainConfig)
	object := func(keys ...string) map[string]any {
		o := want
		for _, k := range keys {
			o = o[k].(map[string]any)
		}
		return o
	}
	num := func(s string) json.Number { return json.Number(s) }
	object("process")["env"].([]any)[1] = noInjection
	mounts := object()["mounts"].([]any)
	object()["mounts"] = []any{mounts[0], map[string]any{
		"destination": "/lib/lib.so", "source": "/driver/lib.so",
		"options": []any{"ro", "nosuid", "nodev", "rbind", "rprivate"},
	}, mounts[1]}
	object("hooks")["createContainer"] = append(object("hooks")["createContainer"].([]any), map[string]any{
		"path": testHook, "args": []any{"x"}, "env": []any{hookEnv},
	})
	object("linux")["devices"] = []any{map[string]any{
		"path": "/dev/gpunull", "type": "c", "major": num("1"), "minor": num("3"), "fileMode": num("438"),
	}}
	object("linux", "resources")["devices"] = append(object("linux", "resources")["devices"].([]any), map[string]any{
		"allow": true, "type": "c", "major": num("1"), "minor": num("3"), "access": "rw",
	})
	if diff := cmp.Diff(want, decode(t, r.config())); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
}

// Additions come after the devices, and there need be no device.
func TestInjectWithAdditions(t *testing.T) {
	more := Additions{
		Edits: specs.ContainerEdits{
			Env:         []string{"A=1"},
			DeviceNodes: []*specs.DeviceNode{{Path: "/dev/other", HostPath: "/dev/full", Permissions: "r"}},
		},
		Annotations: map[string]string{"example.com/a": "b"},
	}
	for _, names := range [][]string{nil, {DefaultKind + "=0"}} {
		r := bundle(t, plainConfig)
		for _, want := range []bool{true, false} {
			if changed, err := Inject(r.dir+"/bundle", names, more, r.dir+"/cdi"); changed != want || err != nil {
				t.Fatalf("%v: changed %t, want %t, error %v", names, changed, want, err)
			}
		}
		var got oci.Spec
		testenv.Must(r.t, json.Unmarshal([]byte(r.config()), &got))
		if !slices.Contains(got.Process.Env, "A=1") || got.Annotations["example.com/a"] != "b" ||
			len(got.Linux.Devices) != len(names)+1 || got.Linux.Devices[len(names)].Path != "/dev/other" {
			t.Errorf("%v: %s", names, r.config())
		}
	}
}

// The edits are those that the library's own function injects.
func TestInjectAgreesWithTheLibrary(t *testing.T) {
	for _, names := range [][]string{{"0"}, {"1", "0"}} {
		r := bundle(t, plainConfig)
		var want, got oci.Spec
		testenv.Must(r.t, json.Unmarshal([]byte(plainConfig), &want))
		cache, err := cdilib.NewCache(cdilib.WithSpecDirs(r.dir+"/cdi"), cdilib.WithAutoRefresh(false))
		testenv.Must(r.t, err)
		if _, err := r.inject(names...); err != nil {
			t.Fatal(err)
		}
		if _, err := cache.InjectDevices(&want, names...); err != nil {
			t.Fatal(err)
		}
		testenv.Must(r.t, json.Unmarshal([]byte(r.config()), &got))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%v (-library +ours):\n%s", names, diff)
		}
	}
}

func TestInjectAgainChangesNothing(t *testing.T) {
	r := bundle(t, plainConfig)
	steps := []struct {
		names   []string
		changed bool
		hooks   int
		rules   int
	}{
		{[]string{"0"}, true, 2, 2},
		{[]string{"0"}, false, 2, 2},
		{[]string{"1", "0"}, true, 2, 3},
		{[]string{"0", "1", "0"}, false, 2, 3},
		{[]string{"0"}, false, 2, 3},
		{[]string{"1"}, false, 2, 3},
	}
	for i, s := range steps {
		before, info := r.config(), stat(t, r.dir+"/bundle/config.json")
		changed, err := r.inject(s.names...)
		testenv.Must(t, err)
		var config oci.Spec
		testenv.Must(r.t, json.Unmarshal([]byte(r.config()), &config))
		hooks, rules := len(config.Hooks.CreateContainer), len(config.Linux.Resources.Devices)
		if changed != s.changed || hooks != s.hooks || rules != s.rules {
			t.Errorf("step %d: changed %v, %d hooks, %d rules; want %+v", i, changed, hooks, rules, s)
		}
		if !changed && (r.config() != before || !os.SameFile(info, stat(t, r.dir+"/bundle/config.json"))) {
			t.Errorf("step %d: the file was written although nothing changed", i)
		}
	}
}

func stat(t testing.TB, path string) os.FileInfo {
	t.Helper()
	info, err := os.Stat(path)
	testenv.Must(t, err)
	return info
}

// A config.json that has a mount twice gets the other mounts of the spec too. Two device nodes of one device need one
// rule.
func TestInjectWhatIsThereTwice(t *testing.T) {
	const mount = `{"destination": "/lib/lib.so", "source": "/driver/lib.so",
		"options": ["ro", "nosuid", "nodev", "rbind", "rprivate"]}`
	r := bundle(t, `{"ociVersion": "1.0.2", "process": {"cwd": "/"}, "mounts": [`+mount+`,`+mount+`], "linux": {}}`)
	spec := gpuSpec(testHook)
	spec.ContainerEdits.Mounts = append(spec.ContainerEdits.Mounts,
		&specs.Mount{HostPath: "/driver/new.so", ContainerPath: "/lib/new.so", Options: fileOptions()})
	spec.Devices[1].ContainerEdits.DeviceNodes[0].HostPath = "/dev/null"
	writeSpec(t, r.dir+"/cdi/gpu.json", spec)
	if _, err := r.inject("0", "1"); err != nil {
		t.Fatal(err)
	}
	var config oci.Spec
	testenv.Must(t, json.Unmarshal([]byte(r.config()), &config))
	if !slices.ContainsFunc(config.Mounts, func(m oci.Mount) bool { return m.Destination == "/lib/new.so" }) {
		t.Errorf("mounts %+v", config.Mounts)
	}
	if rules := config.Linux.Resources.Devices; len(config.Linux.Devices) != 2 || len(rules) != 1 {
		t.Errorf("devices %+v, rules %+v", config.Linux.Devices, rules)
	}
}

// The last rule that matches counts, so an allowance must follow a denial that was added later.
func TestInjectAllowsAgainAfterADenial(t *testing.T) {
	r := bundle(t, `{"ociVersion": "1.0.2", "process": {"cwd": "/"}, "linux": {"resources": {"devices": [
		{"allow": true, "type": "c", "major": 1, "minor": 3, "access": "rw"}, {"allow": false, "access": "rwm"}]}}}`)
	if _, err := r.inject("0"); err != nil {
		t.Fatal(err)
	}
	var config oci.Spec
	testenv.Must(r.t, json.Unmarshal([]byte(r.config()), &config))
	rules := config.Linux.Resources.Devices
	if len(rules) != 3 || !rules[2].Allow || *rules[2].Minor != 3 {
		t.Errorf("rules %+v", rules)
	}
}

func TestInjectGivesTheNodesToTheContainersUser(t *testing.T) {
	r := bundle(t, `{"ociVersion": "1.0.2", "process": {"cwd": "/", "user": {"uid": 1000, "gid": 100}}}`)
	if _, err := r.inject("0"); err != nil {
		t.Fatal(err)
	}
	var config oci.Spec
	testenv.Must(r.t, json.Unmarshal([]byte(r.config()), &config))
	if d := config.Linux.Devices[0]; d.UID == nil || *d.UID != 1000 || d.GID == nil || *d.GID != 100 {
		t.Errorf("the node belongs to %v:%v, want the container's user", d.UID, d.GID)
	}
}

func TestInjectKeepsModeAndOwner(t *testing.T) {
	testenv.Root(t)
	r := bundle(t, plainConfig)
	testenv.Must(r.t, os.Chown(r.dir+"/bundle/config.json", 1000, 100))
	testenv.Must(r.t, os.Chown(r.dir+"/bundle", 1000, 1000))
	if _, err := r.inject("0"); err != nil {
		t.Fatal(err)
	}
	info := stat(t, r.dir+"/bundle/config.json")
	owner := info.Sys().(*syscall.Stat_t)
	if info.Mode() != 0o640 || owner.Uid != 1000 || owner.Gid != 100 {
		t.Errorf("mode %v, owner %d:%d", info.Mode(), owner.Uid, owner.Gid)
	}
}

func TestInjectRefusesAnotherOwnersFile(t *testing.T) {
	testenv.Root(t)
	for _, owner := range []struct{ file, bundle int }{{0, 1000}, {1000, 0}, {1000, 1001}} {
		r := bundle(t, plainConfig)
		testenv.Must(r.t, os.Chown(r.dir+"/bundle/config.json", owner.file, 0))
		testenv.Must(r.t, os.Chown(r.dir+"/bundle", owner.bundle, 0))
		changed, err := r.inject("0")
		want := fmt.Sprintf("config.json belongs to user %d, its bundle to user %d", owner.file, owner.bundle)
		checkError(t, err, want)
		if changed || r.config() != plainConfig {
			t.Errorf("%+v: the file has changed", owner)
		}
	}
}

// podman gives a bundle to the root of the container's user namespace, and config.json stays root's.
func TestInjectTakesTheBundleOfTheContainersRoot(t *testing.T) {
	testenv.Root(t)
	for _, c := range []struct {
		mappings, want string
	}{
		{`{"containerID": 0, "hostID": 1000, "size": 100}`, ""},
		{`{"containerID": 0, "hostID": 999, "size": 100}`, "belongs to user 0, its bundle to user 1000"},
		{`{"containerID": 1, "hostID": 1000, "size": 100}`, "belongs to user 0, its bundle to user 1000"},
	} {
		r := bundle(t, `{"process": {"cwd": "/"}, "linux": {"namespaces": [{"type": "user"}],
			"uidMappings": [`+c.mappings+`]}}`)
		testenv.Must(r.t, os.Chown(r.dir+"/bundle", 1000, 1000))
		changed, err := r.inject("0")
		if c.want != "" {
			checkError(t, err, c.want)
		} else if err != nil {
			t.Error(err)
		}
		if info := stat(t, r.dir+"/bundle/config.json"); changed != (c.want == "") || owner(info) != 0 {
			t.Errorf("%s: changed %v, owner %d", c.mappings, changed, owner(info))
		}
	}
}

func owner(info os.FileInfo) uint32 { return info.Sys().(*syscall.Stat_t).Uid }

// In a user namespace no runtime can make device nodes.
func TestInjectIntoAUserNamespace(t *testing.T) {
	const config = `{"process": {"cwd": "/"}, "mounts": [{"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}],
		"linux": {"namespaces": [{"type": "user"}]}}`
	r := bundle(t, config)
	if _, err := r.inject("0"); err != nil {
		t.Fatal(err)
	}
	var got oci.Spec
	testenv.Must(r.t, json.Unmarshal([]byte(r.config()), &got))
	want := []oci.Mount{
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
		{Destination: "/lib/lib.so", Source: "/driver/lib.so", Options: fileOptions()},
		{
			Destination: "/dev/gpunull", Source: "/dev/null", Type: "bind",
			Options: []string{"bind", "rw", "nosuid", "noexec", "rprivate"},
		},
	}
	if diff := cmp.Diff(want, got.Mounts); diff != "" {
		t.Errorf("mounts (-want +got):\n%s", diff)
	}
	if rules := got.Linux.Resources.Devices; len(got.Linux.Devices) != 0 || len(rules) != 1 || *rules[0].Minor != 3 {
		t.Errorf("nodes %+v, rules %+v", got.Linux.Devices, rules)
	}
	if changed, err := r.inject("0"); changed || err != nil {
		t.Errorf("again: changed %v, %v", changed, err)
	}
	after, err := Load(r.dir+"/cdi").EditConfig([]byte(config), []string{DefaultKind + "=0"}, true)
	got = oci.Spec{}
	testenv.Must(r.t, errors.Join(err, json.Unmarshal(after, &got)))
	if len(got.Linux.Devices) != 1 || len(got.Mounts) != 2 {
		t.Errorf("for who makes the nodes: %+v, mounts %+v", got.Linux.Devices, got.Mounts)
	}
}

// The next injection removes the temporary files of one that was killed, and no other file.
func TestInjectRemovesStaleTemporaryFiles(t *testing.T) {
	r := bundle(t, plainConfig)
	for name, age := range map[string]time.Duration{
		".config.json.old.tmp": 2 * time.Hour, ".config.json.new.tmp": 0, ".config.json.old": 2 * time.Hour,
		"config.json.old.tmp": 2 * time.Hour, ".other.json.old.tmp": 2 * time.Hour,
	} {
		r.file("/bundle/"+name, "x", 0o600)
		then := time.Now().Add(-age)
		testenv.Must(r.t, os.Chtimes(r.dir+"/bundle/"+name, then, then))
	}
	testenv.Must(r.t, os.Mkdir(r.dir+"/bundle/.config.json.dir.tmp", 0o755))
	if _, err := r.inject("0"); err != nil {
		t.Fatal(err)
	}
	list, err := os.ReadDir(r.dir + "/bundle")
	testenv.Must(r.t, err)
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	want := []string{
		".config.json.dir.tmp", ".config.json.new.tmp", ".config.json.old", ".other.json.old.tmp",
		"config.json", "config.json.old.tmp",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("the bundle's files (-want +got):\n%s", diff)
	}
}

// An error leaves config.json as it was, and no other file.
func TestInjectRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		make  func(*tree)
		names []string
		want  []string
		wraps error // nil if callers do not need to know
	}{
		"a device that does not exist": {
			nil, []string{"0", "9"}, []string{"device nvidia.com/gpu=9 does not exist; there are 0, 1, gone"}, nil,
		},
		"two devices that do not exist": {
			nil,
			[]string{"9", "0", "8", "9"},
			[]string{"devices nvidia.com/gpu=9, nvidia.com/gpu=8 do not exist; there are 0, 1, gone"},
			nil,
		},
		"a kind that does not exist": {
			nil, []string{"amd.com/gpu=0"}, []string{"amd.com/gpu=0 does not exist", "of the kind nvidia.com/gpu"}, nil,
		},
		"a device without any spec": {
			func(r *tree) { testenv.Must(r.t, os.RemoveAll(r.dir+"/cdi")) },
			[]string{"0"},
			[]string{"does not exist: there are no devices in", "/cdi"},
			ErrNothingOffered,
		},
		"a malformed name": {nil, []string{"nvidia.com=0"}, []string{"want VENDOR/CLASS=NAME"}, ErrBadName},
		"a device in conflict": {
			func(r *tree) { writeSpec(r.t, r.dir+"/cdi/old.yaml", gpuSpec(testHook)) },
			[]string{"0"},
			[]string{"gpu.json", "old.yaml", "both define it"},
			nil,
		},
		"a device whose node is gone": {nil, []string{"0", "gone"}, []string{"/dev/not-there"}, ErrStale},
		"a bundle without a config.json": {
			func(r *tree) { testenv.Must(r.t, os.Remove(r.dir+"/bundle/config.json")) },
			[]string{"0"},
			[]string{"config.json: no such file"},
			ErrNoConfig,
		},
		"a link": {
			func(r *tree) {
				testenv.Must(r.t, os.Rename(r.dir+"/bundle/config.json", r.dir+"/elsewhere.json"))
				r.link("/bundle/config.json", "../elsewhere.json")
			}, []string{"0"}, []string{"config.json is a symbolic link"}, nil,
		},
		"a file with two names": {
			func(r *tree) { testenv.Must(r.t, os.Link(r.dir+"/bundle/config.json", r.dir+"/elsewhere.json")) },
			[]string{"0"},
			[]string{"config.json has 2 names (hard links)"},
			nil,
		},
		"a bundle behind a link that others can change": {
			func(r *tree) {
				testenv.Must(r.t, os.Rename(r.dir+"/bundle", r.dir+"/real"))
				testenv.Must(r.t, os.Chmod(r.dir, 0o777))
				r.link("/bundle", "real")
			},
			[]string{"0"},
			[]string{"/bundle is not followed, since others can change it: every user can write to "},
			nil,
		},
		"a FIFO in place of the bundle": {
			func(r *tree) { testenv.Must(r.t, os.RemoveAll(r.dir+"/bundle")); r.fifo("/bundle") },
			[]string{"0"},
			[]string{"/bundle: not a directory"},
			nil,
		},
		"a FIFO": {
			func(r *tree) {
				testenv.Must(r.t, os.Remove(r.dir+"/bundle/config.json"))
				r.fifo("/bundle/config.json")
			},
			[]string{"0"},
			[]string{"is a FIFO"},
			nil,
		},
		"a directory": {
			func(r *tree) {
				testenv.Must(r.t, os.Remove(r.dir+"/bundle/config.json"))
				testenv.Must(r.t, os.Mkdir(r.dir+"/bundle/config.json", 0o755))
			},
			[]string{"0"},
			[]string{"is a directory"},
			nil,
		},
		"a file of 65 MiB": {
			func(r *tree) { testenv.Must(r.t, os.Truncate(r.dir+"/bundle/config.json", 65<<20)) },
			[]string{"0"},
			[]string{"the limit is 67108864"},
			nil,
		},
		"a list":     {overwrite(`[1]`), []string{"0"}, []string{"not an OCI configuration"}, nil},
		"nothing":    {overwrite(``), []string{"0"}, []string{"not JSON"}, nil},
		"half of it": {overwrite(plainConfig[:300]), []string{"0"}, []string{"not JSON"}, nil},
		"two objects": {
			overwrite(plainConfig + "{}"), []string{"0"}, []string{"more after the value"}, nil,
		},
		"a key in two spellings": {
			overwrite(`{"process": {"cwd": "/", "env": [], "ENV": ["A=b"]}}`),
			[]string{"0"},
			[]string{`["ENV" "env"]`},
			nil,
		},
		"a key twice": {
			overwrite(`{"process": {"cwd": "/"}, "process": {}}`),
			[]string{"0"},
			[]string{`the key "process" twice`},
			nil,
		},
		"not UTF-8": {
			overwrite("{\"process\": {\"cwd\": \"/\xff\"}}"), []string{"0"}, []string{"not UTF-8"}, nil,
		},
		"other JSON": {overwrite(`{"process": 7}`), []string{"0"}, []string{"not an OCI configuration"}, nil},
		"no process": {overwrite(`{"ociVersion": "1.0.2"}`), []string{"0"}, []string{"no process"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := bundle(t, plainConfig)
			if c.make != nil {
				c.make(r)
			}
			before := snapshot(t, r.dir)
			changed, err := r.inject(c.names...)
			checkError(t, err, c.want...)
			if changed || c.wraps != nil && !errors.Is(err, c.wraps) {
				t.Errorf("changed %v, error %v, want one that wraps %v", changed, err, c.wraps)
			}
			if diff := cmp.Diff(before, snapshot(t, r.dir)); diff != "" {
				t.Errorf("the error left traces:\n%s", diff)
			}
		})
	}
}

func overwrite(config string) func(*tree) {
	return func(r *tree) { r.file("/bundle/config.json", config, 0o640) }
}

// snapshot maps the files in a directory to their content, and large or special files to their type.
func snapshot(t testing.TB, dir string) map[string]string {
	t.Helper()
	m := map[string]string{}
	err := filepath.Walk(dir, func(p string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		m[p] = info.Mode().String()
		if info.Mode().IsRegular() && info.Size() < 1<<20 {
			data, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			m[p] += " " + string(data)
		}
		return nil
	})
	testenv.Must(t, err)
	return m
}

func TestMergeUsesTheFilesSpelling(t *testing.T) {
	original := decode(t, `{"MOUNTS": [{"Destination": "/a", "x": 1}], "other": 1}`)
	before := decode(t, `{"mounts": [{"destination": "/a"}]}`)
	after := decode(t, `{"mounts": [{"destination": "/a"}, {"destination": "/b"}]}`)
	want := decode(t, `{"MOUNTS": [{"Destination": "/a", "x": 1}, {"destination": "/b"}], "other": 1}`)
	got, err := mergeJSON(original, before, after)
	if diff := cmp.Diff(any(want), got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

func TestMergeRemovesKeys(t *testing.T) {
	original := decode(t, `{"a": 1, "b": {"c": 2, "x": 3}}`)
	got, err := mergeJSON(original, decode(t, `{"a": 1, "b": {"c": 2}}`), decode(t, `{"b": {}}`))
	if diff := cmp.Diff(any(decode(t, `{"b": {"x": 3}}`)), got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

func FuzzEditConfig(f *testing.F) {
	f.Add([]byte(plainConfig))
	f.Add([]byte(`{"process":{},"linux":{"devices":[{"path":"/dev/gpunull"}],"resources":null},"hooks":null,` +
		`"mounts":[null]}`))
	f.Add([]byte(`{"PROCESS":{"ENV":null,"env":["A"]},"Hooks":{"createcontainer":[]}}`))
	f.Add([]byte(`[`))
	spec := gpuSpec(testHook)
	f.Fuzz(func(t *testing.T, data []byte) {
		edits := func() *cdilib.ContainerEdits {
			s := clone(t, spec)
			e := (&cdilib.ContainerEdits{}).Append(&cdilib.ContainerEdits{ContainerEdits: &s.ContainerEdits})
			return e.Append(&cdilib.ContainerEdits{ContainerEdits: &s.Devices[0].ContainerEdits})
		}
		after, err := editConfig(data, edits(), nil, false)
		if err != nil {
			if after != nil {
				t.Fatalf("a configuration and error %v, want exactly one", err)
			}
			return
		}
		if after == nil {
			return // all of it was there
		}
		var config oci.Spec
		if err := json.Unmarshal(after, &config); err != nil {
			t.Fatalf("the result is not a configuration: %v\n%s", err, after)
		}
		if len(config.Hooks.CreateContainer) == 0 || len(config.Linux.Devices) == 0 || len(config.Mounts) == 0 {
			t.Errorf("the edits are missing:\n%s", after)
		}
		if again, err := editConfig(after, edits(), nil, false); err != nil || again != nil {
			t.Errorf("the same edits change it again, %v:\n%s\n%s", err, after, again)
		}
	})
}

// The files of a driver have its version in their names, so a container would have those of both drivers.
func TestInjectRefusesAnotherDriver(t *testing.T) {
	for name, with := range map[string]func(version string) specs.ContainerEdits{
		"known from our hook": func(version string) specs.ContainerEdits {
			args := (&hookargs.CreateContainer{DriverVersion: version}).Args()
			return specs.ContainerEdits{Hooks: []*specs.Hook{
				{
					HookName: "createContainer", Path: testHook,
					Args: append([]string{hookProgram}, args...), Env: []string{hookEnv},
				},
			}}
		},
		"known from a library": func(version string) specs.ContainerEdits {
			return specs.ContainerEdits{Mounts: []*specs.Mount{
				{
					HostPath: "/driver/libcuda.so", ContainerPath: "/usr/lib/libcuda.so." + version,
					Options: fileOptions(),
				},
			}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := bundle(t, plainConfig)
			put := func(version string) error {
				spec := gpuSpec(testHook)
				spec.ContainerEdits = with(version)
				writeSpec(t, r.dir+"/cdi/gpu.json", spec)
				_, err := r.inject("0")
				return err
			}
			testenv.Must(r.t, put("580.126.09"))
			before := r.config()
			testenv.Must(r.t, put("580.126.09"))
			err := put("585.10.02")
			checkError(t, err, "it has devices of driver 580.126.09, but the CDI specs are for 585.10.02")
			if r.config() != before {
				t.Error("the configuration has changed")
			}
		})
	}
}
