package cdi

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
)

// upgraded is testDriver with another version.
func upgraded(version string) *driver.Driver {
	d := testDriver()
	d.Version = version
	for i := range d.Libraries {
		l := &d.Libraries[i]
		l.Path = strings.ReplaceAll(l.Path, testVersion, version)
		l.HostPath = strings.ReplaceAll(l.HostPath, testVersion, version)
		for j := range l.Links {
			l.Links[j].Target = strings.ReplaceAll(l.Links[j].Target, testVersion, version)
		}
	}
	return d
}

func TestDiff(t *testing.T) {
	for name, c := range map[string]struct {
		migs     int
		snapshot func(*gpu.Snapshot)
		driver   func() *driver.Driver
		options  Options
		change   func(written *specs.Spec)
		want     []string
	}{
		"nothing": {},
		"the driver was upgraded": {
			driver: func() *driver.Driver { return upgraded("585.10.02") },
			want:   []string{"driver: 580.126.09 -> 585.10.02"},
		},
		"the driver was upgraded and has another library": {
			driver: func() *driver.Driver {
				d := upgraded("585.10.02")
				const p = "/usr/lib64/libnew.so.585.10.02"
				d.Libraries = append(d.Libraries, driver.Library{Path: p, HostPath: p, Capabilities: driver.All})
				return d
			},
			want: []string{
				"driver: 580.126.09 -> 585.10.02",
				"all devices: mount /usr/lib64/libnew.so.585.10.02: new",
			},
		},
		"the last GPU is gone": {
			snapshot: func(s *gpu.Snapshot) { s.Devices = s.Devices[:1] },
			want: []string{
				"all devices: hook argument --dri=0000:02:00.0/card2: gone",
				"device 1 (GPU-1): gone",
				"device all: device node /dev/dri/card2: gone", "device all: device node /dev/nvidia5: gone",
			},
		},
		"the first GPU is gone, so that the second has another index": {
			snapshot: func(s *gpu.Snapshot) { s.Devices = s.Devices[1:]; s.Devices[0].Index = 0 },
			want: []string{
				"all devices: hook argument --dri=0000:01:00.0/card1,renderD128: gone",
				"device 0: was GPU-0, is GPU-1", "device 1 (GPU-1): gone", "device GPU-0: gone",
				"device all: device node /dev/dri/card1: gone", "device all: device node /dev/dri/renderD128: gone",
				"device all: device node /dev/nvidia4: gone",
			},
		},
		"a GPU has another minor number": {
			snapshot: func(s *gpu.Snapshot) { s.Devices[1].Minor = 4; s.Devices = s.Devices[1:] },
			change:   func(w *specs.Spec) { w.Devices = append(w.Devices[2:4:4], w.Devices[4]) },
			want: []string{
				"all devices: hook argument --dri=0000:01:00.0/card1,renderD128: gone",
				"device 1 (GPU-1): device node /dev/nvidia4: new", "device 1 (GPU-1): device node /dev/nvidia5: gone",
				"device all: device node /dev/dri/card1: gone", "device all: device node /dev/dri/renderD128: gone",
				"device all: device node /dev/nvidia5: gone",
			},
		},
		"MIG was enabled": {
			snapshot: func(s *gpu.Snapshot) { s.Devices[1] = twoGPUs(1).Devices[1] },
			want: []string{
				"all devices: hook argument --dri=0000:02:00.0/card2: gone",
				"device 1 (GPU-1): gone", "device 1:0 (MIG-0): new",
				"device all: device node /dev/dri/card2: gone",
				"device all: device node /dev/nvidia-caps/nvidia-cap30: new",
				"device all: device node /dev/nvidia-caps/nvidia-cap31: new",
			},
		},
		"a MIG device is another one": {
			migs:     1,
			snapshot: func(s *gpu.Snapshot) { s.Devices[1].MIG[0].UUID = "MIG-9" },
			want:     []string{"device 1:0: was MIG-0, is MIG-9", "device MIG-0: gone", "device MIG-9: new"},
		},
		"the options of mounts are in another order, and one is there twice": {
			change: func(w *specs.Spec) {
				for _, m := range w.ContainerEdits.Mounts {
					slices.Reverse(m.Options)
				}
				m := w.ContainerEdits.Mounts[0]
				m.Options = append(m.Options, m.Options[0])
			},
		},
		"the hook has moved": {
			options: Options{HookPath: "/opt/prestart-hook"},
			want:    []string{`all devices: hook 1: path "/usr/bin/prestart-hook" -> "/opt/prestart-hook"`},
		},
		"files moved, options and modes changed by hand": {
			change: func(w *specs.Spec) {
				w.ContainerEdits.Mounts[0].HostPath = "/elsewhere"
				w.ContainerEdits.Mounts[1].Options = []string{"rw"}
				w.ContainerEdits.Env = append(w.ContainerEdits.Env, "X=1")
				w.ContainerEdits.Hooks[0].Env = nil
				w.ContainerEdits.AdditionalGIDs = []uint32{44}
				w.Devices[0].ContainerEdits.DeviceNodes[0].FileMode = nil
				w.Devices[0].ContainerEdits.DeviceNodes[0].Major = 226
				w.Version = "0.7.0"
			},
			want: []string{
				"spec: cdiVersion 0.7.0 -> 0.5.0",
				"all devices: additional group 44: gone",
				"all devices: environment variable X: gone",
				`all devices: hook 1: env none -> ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]`,
				"all devices: mount /run/nvidia-persistenced/socket: " +
					`hostPath "/elsewhere" -> "/run/nvidia-persistenced/socket"`,
				`all devices: mount /usr/bin/nvidia-smi: options ["rw"] -> ["nodev","nosuid","rbind","ro","rprivate"]`,
				"device 0 (GPU-0): device node /dev/dri/card1: fileMode none -> 438, major 226 -> none",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			written := mustGenerate(t, twoGPUs(c.migs), testDriver(), Options{})
			if c.change != nil {
				written = clone(t, written)
				c.change(written)
			}
			s, d := twoGPUs(c.migs), testDriver()
			if c.snapshot != nil {
				c.snapshot(s)
			}
			if c.driver != nil {
				d = c.driver()
			}
			var got []string
			for _, difference := range Diff(written, mustGenerate(t, s, d, c.options)) {
				got = append(got, difference.String())
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("differences (-want +got):\n%s", diff)
			}
		})
	}
}

// Diff lists every change of one thing in a spec that an engine could notice.
func TestDiffListsEveryChange(t *testing.T) {
	for name, change := range map[string]func(*specs.Spec){
		"a kind":                  func(s *specs.Spec) { s.Kind = "x.y/z" },
		"an annotation":           func(s *specs.Spec) { s.Annotations = map[string]string{"a": "b"} },
		"a device annotation":     func(s *specs.Spec) { s.Devices[2].Annotations = map[string]string{"a": "b"} },
		"a device":                func(s *specs.Spec) { s.Devices = s.Devices[1:] },
		"a variable":              func(s *specs.Spec) { s.ContainerEdits.Env[0] += "x" },
		"a variable's value gone": func(s *specs.Spec) { s.ContainerEdits.Env[0] = "NVIDIA_VISIBLE_DEVICES=" },
		"a node": func(s *specs.Spec) {
			s.ContainerEdits.DeviceNodes = s.ContainerEdits.DeviceNodes[1:]
		},
		"permissions":    func(s *specs.Spec) { s.ContainerEdits.DeviceNodes[0].Permissions = "" },
		"a node's type":  func(s *specs.Spec) { s.ContainerEdits.DeviceNodes[0].Type = "c" },
		"a node's user":  func(s *specs.Spec) { s.ContainerEdits.DeviceNodes[0].UID = new(uint32(0)) },
		"a node's group": func(s *specs.Spec) { s.ContainerEdits.DeviceNodes[0].GID = new(uint32(0)) },
		"a mount's type": func(s *specs.Spec) { s.ContainerEdits.Mounts[0].Type = "bind" },
		"a hook":         func(s *specs.Spec) { s.ContainerEdits.Hooks = nil },
		"a second hook": func(s *specs.Spec) {
			s.ContainerEdits.Hooks = append(s.ContainerEdits.Hooks, s.ContainerEdits.Hooks[0])
		},
		"a hook's stage":   func(s *specs.Spec) { s.ContainerEdits.Hooks[0].HookName = "startContainer" },
		"a hook's timeout": func(s *specs.Spec) { s.ContainerEdits.Hooks[0].Timeout = nil },
		"a hook's name":    func(s *specs.Spec) { s.ContainerEdits.Hooks[0].Args[0] = "x" },
		"a hook's switch":  func(s *specs.Spec) { s.ContainerEdits.Hooks[0].Args = s.ContainerEdits.Hooks[0].Args[:3] },
		"the order of a hook's arguments": func(s *specs.Spec) {
			a := s.ContainerEdits.Hooks[0].Args
			a[len(a)-1], a[len(a)-2] = a[len(a)-2], a[len(a)-1]
		},
		"another hook's arguments": func(s *specs.Spec) { s.ContainerEdits.Hooks[0].Args = []string{"x", "y", ""} },
		"a network device": func(s *specs.Spec) {
			s.ContainerEdits.NetDevices = []*specs.LinuxNetDevice{{HostInterfaceName: "a", Name: "b"}}
		},
		"resource control": func(s *specs.Spec) { s.Devices[0].ContainerEdits.IntelRdt = &specs.IntelRdt{} },
	} {
		t.Run(name, func(t *testing.T) {
			a := mustGenerate(t, twoGPUs(0), testDriver(), Options{})
			b := clone(t, a)
			change(b)
			for _, d := range [][]Difference{Diff(a, b), Diff(b, a)} {
				if len(d) == 0 || d[0].Where == "" || d[0].What == "" {
					t.Errorf("differences %v", d)
				}
			}
		})
	}
}

func TestDiffIgnoresTheOrder(t *testing.T) {
	a := mustGenerate(t, twoGPUs(2), testDriver(), Options{})
	b := clone(t, a)
	swap := func(n int, f func(i, j int)) { rand.New(rand.NewPCG(5, 6)).Shuffle(n, f) }
	swap(len(b.Devices), func(i, j int) { b.Devices[i], b.Devices[j] = b.Devices[j], b.Devices[i] })
	m := b.ContainerEdits.Mounts
	swap(len(m), func(i, j int) { m[i], m[j] = m[j], m[i] })
	if diff := Diff(a, b); len(diff) > 0 {
		t.Errorf("differences %v", diff)
	}
}

func TestDiffIsDeterministic(t *testing.T) {
	a := mustGenerate(t, twoGPUs(2), testDriver(), Options{})
	b := mustGenerate(t, twoGPUs(0), upgraded("585.10.02"), Options{Capabilities: driver.Compute})
	first := fmt.Sprint(Diff(a, b))
	for range 20 {
		if again := fmt.Sprint(Diff(a, b)); again != first {
			t.Fatalf("another result:\n%s\n%s", first, again)
		}
	}
}
