package inject

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestPolicy(t *testing.T) {
	ours := &cdi.SpecFile{Path: "/run/cdi/ours.json", Spec: ownSpec("/usr/bin/prestart-hook")}
	theirs := &cdi.SpecFile{Path: "/run/cdi/theirs.json", Spec: &specs.Spec{Kind: "nvidia.com/gpu"}}
	for name, tc := range map[string]struct {
		policy string
		device string
		file   *cdi.SpecFile
		err    string // empty if the device is allowed
	}{
		"by default, a device of this project": {"", "nvidia.com/gpu=0", ours, ""},
		"by default, one of another program": {
			"", "nvidia.com/gpu=0", theirs,
			"/run/cdi/theirs.json was written by another program, and its kind nvidia.com/gpu is not allowed",
		},
		// cdi reports it.
		"by default, one that does not exist": {"", "nvidia.com/gpu=9", nil, ""},
		"another program's kind":              {"kinds: [nvidia.com/gpu]", "nvidia.com/gpu=0", theirs, ""},
		"one of several kinds":                {"kinds: a.b/c, nvidia.com/gpu", "nvidia.com/gpu=0", ours, ""},
		"another kind": {
			"kinds: [a.b/c]", "nvidia.com/gpu=0", ours, "kind nvidia.com/gpu is not allowed",
		},
		"a kind that begins like one": {
			"kinds: [nvidia.com/gp]", "nvidia.com/gpu=0", ours, "kind nvidia.com/gpu is not allowed",
		},
		"no kinds":       {"kinds: []", "nvidia.com/gpu=0", ours, "kind nvidia.com/gpu is not allowed"},
		"a null":         {"kinds:", "nvidia.com/gpu=0", ours, ""},
		"a device":       {"devices: [nvidia.com/gpu=0]", "nvidia.com/gpu=0", ours, ""},
		"another device": {"devices: [nvidia.com/gpu=1]", "nvidia.com/gpu=0", ours, "not among the devices"},
		"no devices":     {"devices: []", "nvidia.com/gpu=0", ours, "not among the devices"},
		"all of them": {
			"devices: [nvidia.com/gpu=0]", "nvidia.com/gpu=all", ours, "not among the devices",
		},
		"a device, but not its kind": {
			"devices: [nvidia.com/gpu=0]", "nvidia.com/gpu=0", theirs, "kind nvidia.com/gpu is not allowed",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := parsePolicy([]byte(tc.policy))
			if err != nil {
				t.Fatal(err)
			}
			_, err = p.check(&container{}, tc.device, tc.file)
			checkError(t, err, tc.err)
		})
	}
}

// ownSpec is a spec as this project writes it: it has the project's hook. Its nodes are the null device.
func ownSpec(hook string) *specs.Spec {
	work := hookargs.CreateContainer{DriverVersion: "580.1", Params: true}
	node := func(name string) specs.Device {
		return specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/nvidia" + name, HostPath: "/dev/null", Permissions: "rw"},
		}}}
	}
	return &specs.Spec{
		Version: "0.5.0", Kind: "nvidia.com/gpu", Devices: []specs.Device{node("0"), node("1")},
		ContainerEdits: specs.ContainerEdits{Hooks: []*specs.Hook{{
			HookName: "createContainer", Path: hook,
			Args: append([]string{"prestart-hook"}, work.Args()...), Env: []string{"PATH=/usr/bin"},
		}}},
	}
}

func TestPoliciesWithMistakes(t *testing.T) {
	for name, tc := range map[string]struct{ policy, want string }{
		"an unknown key":          {"kind: [a.b/c]", `unknown key kind`},
		"a key of another case":   {"Kinds: [a.b/c]", `unknown key Kinds`},
		"a key twice":             {"kinds: [a.b/c]\nkinds: [d.e/f]", "duplicate key kinds"},
		"a kind without a class":  {"kinds: [nvidia.com]", `kinds: "nvidia.com": want VENDOR/CLASS`},
		"a kind with a name":      {"kinds: [nvidia.com/gpu=0]", `kinds: "nvidia.com/gpu=0": want VENDOR/CLASS`},
		"a kind with traversal":   {"kinds: [../gpu]", `kinds: "../gpu": want VENDOR/CLASS`},
		"a pattern":               {`kinds: ["*"]`, `kinds: "*": want VENDOR/CLASS`},
		"a device without a kind": {"devices: ['0']", `devices: "0": want VENDOR/CLASS=NAME`},
		"a device of no kind":     {"kinds: [a.b/c]\ndevices: [d.e/f=0]", "devices: the kind of d.e/f=0 is not in kinds"},
		"a relative runtime":      {"runtime: runc", `runtime: "runc": want an absolute path`},
		"a relative log":          {"log: hook.log", `log: "hook.log": want an absolute path, or syslog`},
		"a kind in a rule":        {"rules: [{kinds: ['*']}]", `rules[0].kinds: "*": want VENDOR/CLASS`},
		"a device in a rule":      {"rules: [{}, {devices: ['0']}]", `rules[1].devices: "0": want VENDOR/CLASS=NAME`},
		"a kind that no container may ask for": {
			"kinds: [a.b/c]\nrules: [{kinds: [d.e/f]}]",
			"rules[0].kinds: d.e/f is not in the policy's own kinds: add it there, or remove it here",
		},
		"a device that no container may ask for": {
			"kinds: [a.b/c]\nrules: [{devices: [d.e/f=0]}]", "rules[0].devices: the kind of d.e/f=0 is not in kinds",
		},
		"an unknown condition": {"rules: [{annotation: {}}]", "unknown key rules[0].annotation"},
		"a wrong condition": {
			"rules: [{user-namespace: maybe}]", `rules[0].user-namespace: want true or false, got "maybe"`,
		},
		"an owner by name":       {"rules: [{bundle-owner: [root]}]", `rules[0].bundle-owner[0]: want a whole number`},
		"a negative owner":       {"rules: [{bundle-owner: [-1]}]", "rules[0].bundle-owner: -1 is not a user ID"},
		"a rule that is a text":  {"rules: [all]", "rules[0]: want keys and values"},
		"a list for the runtime": {"runtime: [/usr/bin/runc]", "runtime: want text, got a list"},
		"two documents":          {"kinds: []\n---\nkinds: []", "more than one YAML document"},
		"not YAML":               {"kinds: [", "not YAML"},
		"a list":                 {"- a", "want keys and values"},
		"not UTF-8":              {"kinds: [\"\xff\"]", "not YAML"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parsePolicy([]byte(tc.policy))
			checkError(t, err, tc.want)
		})
	}
}

// The policy must be root's, and is opened like any file that others could have made.
func TestReadPolicy(t *testing.T) {
	testenv.Root(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		make func(path string)
		err  string
	}{
		"a file":       {func(path string) { must(os.WriteFile(path, []byte("kinds: [a.b/c]"), 0o644)) }, ""},
		"no file":      {func(string) {}, ""},
		"no directory": {func(path string) { must(os.Remove(filepath.Dir(path))) }, ""},
		"another user's file": {
			func(path string) { must(os.WriteFile(path, nil, 0o644)); must(os.Chown(path, 1000, 0)) },
			"belongs to user 1000",
		},
		"a file that a group can write": {
			func(path string) { must(os.WriteFile(path, nil, 0o644)); must(os.Chmod(path, 0o664)) }, "group 0 can write",
		},
		"in a directory that others can write": {
			func(path string) { must(os.WriteFile(path, nil, 0o644)); must(os.Chmod(filepath.Dir(path), 0o777)) },
			"every user can write",
		},
		"a dangling link": {func(path string) { must(os.Symlink("none", path)) }, "no such file"},
		"a FIFO":          {func(path string) { must(unix.Mkfifo(path, 0o644)) }, "not a regular file"},
		"a large file":    {func(path string) { must(os.WriteFile(path, make([]byte, maxPolicy+1), 0o644)) }, "the limit is"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "etc/hook.yaml")
			must(os.Mkdir(filepath.Dir(path), 0o755))
			tc.make(path)
			p, err := readPolicy(path)
			checkError(t, err, tc.err)
			if err != nil && !strings.Contains(err.Error(), path) {
				t.Errorf("the error does not name the file: %v", err)
			}
			if (p == nil) != (err != nil) {
				t.Errorf("got the policy %v and the error %v", p, err)
			}
		})
	}
}

func FuzzPolicy(f *testing.F) {
	f.Add([]byte("kinds: [nvidia.com/gpu]\ndevices: nvidia.com/gpu=0\nruntime: /usr/bin/crun\n"))
	f.Add(
		[]byte("rules: [{annotations: {a: '*'}, user-namespace: true, bundle-owner: 0, allocated: true}]\nlog: syslog"),
	)
	f.Add([]byte("a: &a [*a]\nkinds: &b []\ndevices: *b"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := parsePolicy(data)
		if p == nil && err == nil {
			t.Fatal("neither a policy nor an error")
		}
		if err != nil {
			return
		}
		for _, name := range p.Devices {
			if checkName(name) != nil {
				t.Errorf("device %q", name)
			}
		}
		if p.Runtime != "" && !filepath.IsAbs(p.Runtime) {
			t.Errorf("runtime %q", p.Runtime)
		}
		// No rule allows what is outside the limits of all, or undoes that it must be allocated.
		const name = "nvidia.com/gpu=0"
		allocated, err := p.check(&container{}, name, nil)
		outside := p.Kinds != nil && !slices.Contains(p.Kinds, "nvidia.com/gpu") ||
			p.Devices != nil && !slices.Contains(p.Devices, name)
		if err == nil && (outside || p.Allocated && !allocated) {
			t.Errorf("%s allows it", data)
		}
	})
}
