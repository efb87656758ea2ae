package live

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// configs are a config.json, and the same after a change.
func configs(t testing.TB, change func(*oci.Spec)) (before, after []byte) {
	t.Helper()
	before, err := os.ReadFile("testdata/config.json")
	if err != nil {
		t.Fatal(err)
	}
	var config oci.Spec
	if err := json.Unmarshal(before, &config); err != nil {
		t.Fatal(err)
	}
	change(&config)
	if after, err = json.Marshal(&config); err != nil {
		t.Fatal(err)
	}
	return before, after
}

// describe formats a plan as lines.
func describe(p *plan) []string {
	lines := []string{"root " + p.root}
	for _, r := range p.rules {
		lines = append(lines, "rule "+r.String())
	}
	for _, n := range p.nodes {
		lines = append(
			lines,
			fmt.Sprintf("node %s mode %o device %#x of %d:%d", n.path, n.mode, n.device, n.uid, n.gid),
		)
	}
	for _, m := range p.mounts {
		lines = append(lines, fmt.Sprintf("mount %s at %s recursive %v attributes %#x propagation %#x deep %v",
			m.source, m.target, m.recursive, m.attributes, m.propagation, m.deep))
	}
	for _, w := range p.work {
		lines = append(lines, "work "+strings.Join(w.Args(), " "))
	}
	for _, v := range p.variables {
		lines = append(lines, "no variable "+v)
	}
	return lines
}

func device(path, kind string, major, minor int64) oci.LinuxDevice {
	return oci.LinuxDevice{Path: path, Type: kind, Major: major, Minor: minor}
}

func bind(options ...string) oci.Mount {
	return oci.Mount{Source: "/host/lib", Destination: "/lib/x", Options: options}
}

func ours(args ...string) oci.Hook {
	return oci.Hook{Path: "/usr/bin/prestart-hook", Args: append([]string{"prestart-hook"}, args...)}
}

func TestPlan(t *testing.T) {
	rule := func(kind, access string) oci.LinuxDeviceCgroup {
		return oci.LinuxDeviceCgroup{
			Allow:  true,
			Type:   kind,
			Major:  new(int64(195)),
			Minor:  new(int64(3)),
			Access: access,
		}
	}
	mount := func(rest string) []string { return []string{"mount /host/lib at /lib/x " + rest} }
	for name, tc := range map[string]struct {
		change func(*oci.Spec)
		want   []string // after the line of the root
	}{
		"nothing": {func(*oci.Spec) {}, nil},
		"device nodes": {func(c *oci.Spec) {
			gpu := device("/dev/nvidia3", "c", 195, 3)
			gpu.FileMode, gpu.UID, gpu.GID = new(os.FileMode(0o640)), new(uint32(1)), new(uint32(2))
			c.Linux.Devices = append(c.Linux.Devices, gpu, device("/dev/disk", "b", 8, 300))
		}, []string{
			"node /dev/nvidia3 mode 20640 device 0xc303 of 1:2",
			"node /dev/disk mode 60666 device 0x10082c of 0:0",
		}},
		"another node of the same path": {
			func(c *oci.Spec) { c.Linux.Devices = []oci.LinuxDevice{device("/dev/old", "u", 1, 5)} },
			[]string{"node /dev/old mode 20666 device 0x105 of 0:0"},
		},
		"device rules": {func(c *oci.Spec) {
			r := &c.Linux.Resources.Devices
			*r = append(*r, rule("c", "rw"), rule("b", "rwm"), rule("c", ""))
		}, []string{"rule c 195:3 rw", "rule b 195:3 rwm"}},
		"a mount with all options": {
			func(c *oci.Spec) {
				c.Mounts = append(c.Mounts, bind("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate", "ridmap"))
			},
			mount("recursive true attributes 0xf propagation 0x40000 deep true"),
		},
		"a mount without options": {func(c *oci.Spec) {
			m := bind("rw")
			m.Type = "bind"
			c.Mounts = append(c.Mounts, m)
		}, mount("recursive false attributes 0x0 propagation 0x80000 deep true")},
		"a mount of one file": {
			func(c *oci.Spec) { c.Mounts = append(c.Mounts, bind("bind", "private")) },
			mount("recursive false attributes 0x0 propagation 0x40000 deep false"),
		},
		"the project's hook, twice": {func(c *oci.Spec) {
			c.Hooks.CreateContainer = append(c.Hooks.CreateContainer, ours("create-container", "--mask-params"),
				ours("create-container", "--link=/a::b"))
		}, []string{"work create-container --mask-params", "work create-container --link=/a::b"}},
		"variables": {
			func(c *oci.Spec) { c.Process.Env = append(c.Process.Env, "NVIDIA_VISIBLE_DEVICES=void", "A=b=c") },
			[]string{"no variable NVIDIA_VISIBLE_DEVICES", "no variable A"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := makePlan(configs(t, tc.change))
			if err != nil {
				t.Fatal(err)
			}
			if diff := gocmp.Diff(append([]string{"root rootfs"}, tc.want...), describe(p)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// podman writes no device rules where there is a user namespace, and other programs no Linux part at all.
func TestPlanOfASmallConfig(t *testing.T) {
	before := `{"root": {"path": "/root"}, "process": {"cwd": "/"}}`
	after := `{"root": {"path": "/root"}, "process": {"cwd": "/"}, "linux": {
		"devices": [{"path": "/dev/zero", "type": "c", "major": 1, "minor": 5}],
		"resources": {"devices": [{"allow": true, "type": "c", "major": 1, "minor": 5, "access": "rw"}]}}}`
	p, err := makePlan([]byte(before), []byte(after))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"root /root", "rule c 1:5 rw", "node /dev/zero mode 20666 device 0x105 of 0:0"}
	if diff := gocmp.Diff(want, describe(p)); diff != "" {
		t.Error(diff)
	}
}

// Kubernetes can add tens of thousands of service variables. Comparing each with all others takes minutes.
func TestPlanOfALargeConfig(t *testing.T) {
	many := func(config *oci.Spec) {
		for i := range 20_000 {
			config.Process.Env = append(config.Process.Env, fmt.Sprintf("SERVICE_%d_PORT=tcp://10.0.0.1:%d", i, i))
			config.Mounts = append(config.Mounts, oci.Mount{
				Destination: fmt.Sprintf("/volumes/%d", i), Source: fmt.Sprintf("/host/%d", i), Type: "bind",
				Options: []string{"bind"},
			})
		}
	}
	_, before := configs(t, many)
	_, after := configs(t, func(config *oci.Spec) {
		many(config)
		config.Process.Env = append(config.Process.Env, "A=b")
		config.Linux.Devices = append(config.Linux.Devices, device("/dev/nvidia0", "c", 195, 0))
	})
	p, err := makePlan(before, after)
	if err != nil || len(p.nodes) != 1 || len(p.mounts) != 0 || len(p.variables) != 1 {
		t.Errorf("%d nodes, %d mounts, variables %v, error %v", len(p.nodes), len(p.mounts), p.variables, err)
	}
}

func TestPlanRefuses(t *testing.T) {
	const not = ": it cannot be added to a container that already exists"
	addMount := func(m oci.Mount) func(*oci.Spec) {
		return func(c *oci.Spec) { c.Mounts = append(c.Mounts, m) }
	}
	for name, tc := range map[string]struct {
		change func(*oci.Spec)
		want   string
	}{
		"a FIFO": {
			func(c *oci.Spec) { c.Linux.Devices = append(c.Linux.Devices, device("/dev/x", "p", 0, 0)) },
			`device node /dev/x of type "p"` + not,
		},
		"a node outside the root": {
			func(c *oci.Spec) { c.Linux.Devices = append(c.Linux.Devices, device("/dev/../../x", "c", 1, 3)) },
			`device node "/dev/../../x": want a clean absolute path`,
		},
		"a rule for all devices": {func(c *oci.Spec) {
			c.Linux.Resources.Devices = append(c.Linux.Resources.Devices, oci.LinuxDeviceCgroup{Allow: true, Access: "rw"})
		}, "a device rule other than one that allows one device" + not},
		"a rule less": {
			func(c *oci.Spec) { c.Linux.Resources.Devices = nil }, "a change of device rules" + not,
		},
		"another rule in place of one": {
			func(c *oci.Spec) { c.Linux.Resources.Devices[0].Allow = true }, "a change of device rules" + not,
		},
		"a shared mount": {addMount(bind("rbind", "rshared")), `mount /lib/x with the option "rshared"` + not},
		"a tmpfs": {
			addMount(oci.Mount{Source: "tmpfs", Destination: "/t", Type: "tmpfs"}), `mount /t of the type "tmpfs"` + not,
		},
		"a mount above another": {
			addMount(oci.Mount{Source: "/x", Destination: "/data/", Type: "bind"}),
			"mount /data, which would hide that at /data/volume" + not,
		},
		"a mount over the root": {
			addMount(oci.Mount{Source: "/x", Destination: "/", Type: "bind"}), `mount "/": want a clean absolute path`,
		},
		"a relative source": {
			addMount(oci.Mount{Source: "x", Destination: "/t", Type: "bind"}), `source of mount /t "x": want`,
		},
		"another program's hook": {func(c *oci.Spec) {
			c.Hooks.CreateContainer = append(c.Hooks.CreateContainer, oci.Hook{
				Path: "/usr/bin/nvidia-cdi-hook", Args: []string{"nvidia-cdi-hook", "create-container"},
			})
		}, "hook /usr/bin/nvidia-cdi-hook of the createContainer stage" + not},
		"another version's hook": {func(c *oci.Spec) {
			c.Hooks.CreateContainer = append(c.Hooks.CreateContainer, ours("create-container", "--new"))
		}, `hook /usr/bin/prestart-hook of the createContainer stage: argument "--new"`},
		"the project's hook in another stage": {func(c *oci.Spec) {
			c.Hooks.StartContainer = append(c.Hooks.StartContainer, ours("create-container"))
		}, "hook /usr/bin/prestart-hook of the startContainer stage" + not},
		"an additional group": {
			func(c *oci.Spec) { c.Process.User.AdditionalGids = []uint32{10, 44} },
			"additional group 44 of the process" + not,
		},
		"a network device": {
			func(c *oci.Spec) { c.Linux.NetDevices = map[string]oci.LinuxNetDevice{"eth0": {}} }, "a network device" + not,
		},
		"a class of RDT": {
			func(c *oci.Spec) { c.Linux.IntelRdt = &oci.LinuxIntelRdt{ClosID: "x"} }, "a class of Intel RDT" + not,
		},
		"anything else": {
			func(c *oci.Spec) { c.Hostname = "x" }, "a change of the container other than devices, mounts and hooks" + not,
		},
		"no root": {func(*oci.Spec) {}, "config.json has no root.path"},
	} {
		t.Run(name, func(t *testing.T) {
			before, after := configs(t, tc.change)
			if name == "no root" {
				before = []byte("{}")
			}
			p, err := makePlan(before, after)
			if p != nil || err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, %v, want an error with %q", p, err, tc.want)
			}
		})
	}
}

func TestRootPath(t *testing.T) {
	for path, want := range map[string]string{
		"rootfs": "/bundle/rootfs", "/abs": "/abs", "../other": "", "": "",
	} {
		if got, err := rootPath(path, "/bundle"); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: got %q, %v, want %q", path, got, err, want)
		}
	}
	if got, err := rootPath("rootfs", "bundle"); err == nil {
		t.Errorf("in a relative bundle: %q", got)
	}
}

func FuzzPlan(f *testing.F) {
	for _, change := range []func(*oci.Spec){
		func(*oci.Spec) {},
		func(c *oci.Spec) { c.Mounts = append(c.Mounts, bind("ro", "rbind")) },
		func(c *oci.Spec) { c.Linux.Devices = append(c.Linux.Devices, device("/dev/x", "c", 1, 3)) },
	} {
		before, after := configs(f, change)
		f.Add(before, after)
	}
	f.Fuzz(func(t *testing.T, before, after []byte) {
		p, err := makePlan(before, after)
		if (p == nil) == (err == nil) {
			t.Errorf("a plan %v and an error %v", p, err)
		}
	})
}
