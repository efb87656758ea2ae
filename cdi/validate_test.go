package cdi

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestValidate(t *testing.T) {
	r := newTree(t)
	r.file("/lib.so", "", 0o644)
	r.file("/hook", "", 0o755)
	r.file("/not-a-hook", "", 0o644)
	hook := &specs.Hook{HookName: "createContainer", Path: r.dir + "/hook", Env: []string{"PATH=/bin"}}
	for name, c := range map[string]struct {
		edits specs.ContainerEdits
		want  []string
	}{
		"a valid spec": {edits: specs.ContainerEdits{
			DeviceNodes: []*specs.DeviceNode{{Path: "/dev/null"}, {Path: "/dev/x", HostPath: "/dev/zero"}},
			Mounts:      []*specs.Mount{{HostPath: r.dir + "/lib.so", ContainerPath: "/lib.so"}},
			Hooks:       []*specs.Hook{hook},
		}},
		"a tmpfs, which has no file": {edits: specs.ContainerEdits{
			Mounts: []*specs.Mount{{HostPath: "tmpfs", ContainerPath: "/t", Type: "tmpfs"}},
		}},
		"a mount without its file": {
			specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: r.dir + "/gone.so", ContainerPath: "/lib.so"}}},
			[]string{"mount /lib.so: stat " + r.dir + "/gone.so: no such file or directory"},
		},
		"a node that does not exist": {
			specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia77"}}},
			[]string{"device node: lstat /dev/nvidia77: no such file or directory"},
		},
		"a node that is a file": {
			specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/x", HostPath: r.dir + "/lib.so"}}},
			[]string{"device node: " + r.dir + "/lib.so is a regular file"},
		},
		"other numbers than the node's": {
			specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/null", Major: 511, Minor: 0}}},
			[]string{"device node /dev/null is 1:3, and 511:0 in the spec"},
		},
		"the node's numbers": {edits: specs.ContainerEdits{
			DeviceNodes: []*specs.DeviceNode{{Path: "/dev/null", Major: 1, Minor: 3}},
		}},
		"a hook that does not exist": {
			specs.ContainerEdits{
				Hooks: []*specs.Hook{{HookName: "createContainer", Path: "/gone/hook", Env: hook.Env}},
			},
			[]string{"hook: stat /gone/hook: no such file or directory"},
		},
		"a hook that cannot be executed": {
			specs.ContainerEdits{
				Hooks: []*specs.Hook{{HookName: "createContainer", Path: r.dir + "/not-a-hook", Env: hook.Env}},
			},
			[]string{"hook: " + r.dir + "/not-a-hook is not executable"},
		},
		"a hook that is a directory": {
			specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "createContainer", Path: r.dir, Env: hook.Env}}},
			[]string{"hook: " + r.dir + " is a directory"},
		},
		"a hook with the image's environment": {
			specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "createContainer", Path: r.dir + "/hook"}}},
			[]string{"hook " + r.dir + "/hook has no environment of its own, so it would run with the container's"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, where := range []string{"all devices", "device 1"} {
				spec := specWith(DefaultKind, "1")
				if where == "all devices" {
					spec.ContainerEdits = c.edits
				} else {
					spec.Devices[0].ContainerEdits = c.edits
				}
				var want, got []string
				for _, w := range c.want {
					want = append(want, where+": "+w)
				}
				for _, p := range validate(spec) {
					got = append(got, p.String())
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("problems (-want +got):\n%s", diff)
				}
			}
		})
	}
}

func TestValidateReportsAProblemOnce(t *testing.T) {
	spec := specWith(DefaultKind, "0", "GPU-a", "all")
	for i := range spec.Devices {
		spec.Devices[i].ContainerEdits.DeviceNodes = []*specs.DeviceNode{{Path: "/dev/nvidia77"}}
	}
	if got := validate(spec); len(got) != 1 || got[0].Where != "device 0" {
		t.Errorf("problems %v", got)
	}
}

func TestValidateFile(t *testing.T) {
	for name, c := range map[string]struct {
		file    string
		content string
		mode    os.FileMode
		want    []string
	}{
		"a sound file":         {"x.json", "", 0o644, nil},
		"one for root alone":   {"x.json", "", 0o600, []string{"mode 0600"}},
		"another extension":    {"x.yml", "", 0o644, []string{"only .json and .yaml"}},
		"text":                 {"x.json", "hello", 0o644, []string{"x.json"}},
		"a version too low":    {"x.json", "0.3.0", 0o644, []string{"at least v0.5.0"}},
		"all of that together": {"x.yml", "0.3.0", 0o600, []string{"only .json", "mode 0600", "at least v0.5.0"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTree(t)
			spec := specWith(DefaultKind, "0")
			data, err := Marshal(spec, JSON)
			testenv.Must(r.t, err)
			switch c.content {
			case "":
			case "0.3.0":
				data = []byte(strings.Replace(string(data), "0.5.0", "0.3.0", 1))
			default:
				data = []byte(c.content)
			}
			r.file("/"+c.file, string(data), c.mode)
			problems, err := ValidateFile(r.dir + "/" + c.file)
			testenv.Must(r.t, err)
			if len(problems) != len(c.want) {
				t.Fatalf("problems %v, want %q", problems, c.want)
			}
			for i, p := range problems {
				if !strings.Contains(p.String(), c.want[i]) {
					t.Errorf("problem %q, want %q", p, c.want[i])
				}
			}
		})
	}
	if _, err := ValidateFile(t.TempDir() + "/none.json"); err == nil {
		t.Error("no error about a file that is not there")
	}
}

func TestValidateFindsMissingFiles(t *testing.T) {
	testenv.Root(t)
	r := newTree(t)
	r.file("/hook", "", 0o755)
	r.file("/libcuda.so", "", 0o644)
	d := &driver.Driver{
		Libraries: []driver.Library{{Path: "/usr/lib64/libcuda.so", HostPath: r.dir + "/libcuda.so"}},
		Control: []driver.DeviceNode{
			{Path: "/dev/nvidiactl", HostPath: "/dev/null", Mode: 0o666, Capabilities: driver.All},
			{Path: "/dev/nvidia-uvm", HostPath: "/dev/zero", Mode: 0o666, Capabilities: driver.UsesCUDA},
		},
		Nodes: []driver.DeviceNode{
			{Path: "/dev/nvidia4", HostPath: "/dev/null", Mode: 0o666, Capabilities: driver.All},
			{Path: "/dev/nvidia5", HostPath: "/dev/zero", Mode: 0o666, Capabilities: driver.All},
		},
	}
	spec := mustGenerate(t, twoGPUs(0), d, Options{HookPath: r.dir + "/hook"})
	if problems := validate(spec); len(problems) > 0 {
		t.Fatalf("a new spec has problems: %v", problems)
	}
	testenv.Must(r.t, os.Remove(d.Libraries[0].HostPath))
	testenv.Must(r.t, os.Remove(r.dir+"/hook"))
	if problems := validate(spec); len(problems) != 2 {
		t.Errorf("problems %v, want one for the library and one for the hook", problems)
	}
}

// A spec may be made before the kernel module of nvidia-uvm is loaded.
func TestValidateFindsMissingNodesOfCUDA(t *testing.T) {
	t.Parallel()
	const library = "/usr/lib/libcuda.so.580.126.09"
	for name, c := range map[string]struct {
		mount string
		nodes []string
		want  []string
	}{
		"all nodes":     {library, []string{"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"}, nil},
		"no nvidia-uvm": {library, []string{"/dev/nvidia0", "/dev/nvidiactl"}, []string{"/dev/nvidia-uvm"}},
		"only a GPU":    {library, []string{"/dev/nvidia0"}, []string{"/dev/nvidiactl", "/dev/nvidia-uvm"}},
		"no libcuda":    {"/usr/lib/libnvidia-ml.so.580.126.09", []string{"/dev/nvidia0"}, nil},
		"a GPU of WSL":  {library, []string{"/dev/dxg"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			spec := specWith(DefaultKind, "0")
			spec.ContainerEdits.Mounts = []*specs.Mount{{HostPath: "/dev/null", ContainerPath: c.mount}}
			for _, n := range c.nodes {
				node := &specs.DeviceNode{Path: n, HostPath: "/dev/null"}
				spec.Devices[0].ContainerEdits.DeviceNodes = append(spec.Devices[0].ContainerEdits.DeviceNodes, node)
			}
			var want []Problem
			for _, n := range c.want {
				want = append(want,
					Problem{commonWhere, "libcuda without the device node " + n + ": CUDA does not start in containers"})
			}
			if diff := cmp.Diff(want, validate(spec)); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestValidateCountsTheMissingFilesOfADriver(t *testing.T) {
	t.Parallel()
	mount := func(name string) *specs.Mount {
		return &specs.Mount{
			HostPath:      "/gone/" + name + ".so." + testVersion,
			ContainerPath: "/lib/" + name + ".so." + testVersion,
		}
	}
	spec := specWith(DefaultKind, "0", "1")
	for i := range spec.Devices { // a file in several devices counts once
		spec.Devices[i].ContainerEdits.Mounts = []*specs.Mount{mount("libnvidia-ml")}
	}
	spec.ContainerEdits.Mounts = []*specs.Mount{mount("libnvidia-ml")}
	want := []Problem{{"driver", "/gone/libnvidia-ml.so." + testVersion + " is gone"}}
	if diff := cmp.Diff(want, validate(spec)); diff != "" {
		t.Errorf("with one file (-want +got):\n%s", diff)
	}
	spec.ContainerEdits.Mounts = append(spec.ContainerEdits.Mounts, mount("libnvcuvid"))
	want = []Problem{{"driver", "2 files of driver " + testVersion + " are gone"}}
	if diff := cmp.Diff(want, validate(spec)); diff != "" {
		t.Errorf("with two files (-want +got):\n%s", diff)
	}
}

func TestValidateDevices(t *testing.T) {
	t.Parallel()
	node := &gpu.Snapshot{Devices: []gpu.Device{
		{Index: 0, UUID: "GPU-whole"},
		{Index: 1, UUID: "GPU-split", MIGEnabled: true, MIG: []gpu.MIGDevice{{UUID: "MIG-part"}}},
		{Index: 2, UUID: "GPU-broken", Error: "it is lost"},
	}}
	for name, c := range map[string]struct {
		device string
		want   []Problem
	}{
		"a GPU of the node":        {"GPU-whole", nil},
		"a MIG device of the node": {"MIG-part", nil},
		"an index":                 {"7", nil},
		"a GPU that is gone":       {"GPU-gone", []Problem{{"device GPU-gone", "the driver has no such device"}}},
		"a MIG device that is gone": {
			"MIG-gone", []Problem{{"device MIG-gone", "the driver has no such device"}},
		},
		"a GPU that is in MIG mode now": {"GPU-split", []Problem{
			{"device GPU-split", "the GPU is in MIG mode: only its MIG devices can be used"},
		}},
		"a GPU that cannot be read": {"GPU-broken", []Problem{
			{"device GPU-broken", "the GPU cannot be read: it is lost"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			spec := &specs.Spec{Devices: []specs.Device{{Name: c.device}}}
			if diff := cmp.Diff(c.want, ValidateDevices(spec, node)); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
			if got, want := NamesGPUs(spec), c.device != "7"; got != want {
				t.Errorf("NamesGPUs = %t, want %t", got, want)
			}
		})
	}
}
