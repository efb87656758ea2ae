package cdi

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/test/lib/testenv"
)

const testHook = "/usr/bin/prestart-hook"

// twoGPUs is a snapshot of two GPUs, with MIG devices on the second if migs is not 0.
func twoGPUs(migs int) *gpu.Snapshot {
	s := &gpu.Snapshot{DriverVersion: testVersion, CUDAVersion: "13.0"}
	for i := range 2 {
		s.Devices = append(s.Devices, gpu.Device{
			Index: i, Minor: 4 + i, UUID: fmt.Sprintf("GPU-%d", i), PCIBusID: fmt.Sprintf("0000:0%d:00.0", i+1),
		})
	}
	for i := range migs {
		s.Devices[1].MIGEnabled = true
		s.Devices[1].MIG = append(s.Devices[1].MIG, gpu.MIGDevice{
			Index: i, UUID: fmt.Sprintf("MIG-%d", i), Profile: "1g.10gb",
			GPUInstanceCap: 30 + 2*i, ComputeInstanceCap: 31 + 2*i,
		})
	}
	return s
}

// testDriver is the driver of a host with twoGPUs' GPUs.
func testDriver() *driver.Driver {
	d := &driver.Driver{Version: testVersion, DRM: map[string][]driver.DeviceNode{
		"0000:01:00.0": {drmNode("card1", 0o660), drmNode("renderD128", 0o666)},
		"0000:02:00.0": {drmNode("card2", 0o660)},
	}}
	node := func(name string, use driver.Capabilities) driver.DeviceNode {
		return driver.DeviceNode{Path: "/dev/" + name, HostPath: "/dev/" + name, Mode: 0o666, Capabilities: use}
	}
	for _, n := range []string{
		"nvidia-caps/nvidia-cap30", "nvidia-caps/nvidia-cap31", "nvidia-caps/nvidia-cap32", "nvidia-caps/nvidia-cap33",
		"nvidia4", "nvidia5",
	} {
		d.Nodes = append(d.Nodes, node(n, driver.All))
	}
	d.Control = []driver.DeviceNode{
		node("nvidiactl", driver.All),
		node("nvidia-uvm", driver.UsesCUDA),
		node("nvidia-uvm-tools", driver.Compute),
		node("nvidia-modeset", driver.Graphics|driver.Display),
	}
	for name, c := range map[string]driver.Capabilities{
		"libcuda": driver.UsesCUDA, "libnvidia-ml": driver.Utility, "libnvcuvid": driver.Video,
	} {
		p := "/usr/lib64/" + name + ".so"
		d.Libraries = append(d.Libraries, driver.Library{
			Path: p + "." + testVersion, HostPath: "/driver" + p + "." + testVersion, SONAME: name + ".so.1",
			Links: []driver.Link{{Path: p + ".1", Target: name + ".so." + testVersion}}, Capabilities: c,
		})
	}
	slices.SortFunc(d.Libraries, func(a, b driver.Library) int { return strings.Compare(a.Path, b.Path) })
	for p, kind := range map[string]driver.Kind{
		"/run/nvidia-persistenced/socket": driver.KindSocket, "/usr/bin/nvidia-smi": driver.KindBinary,
	} {
		d.Files = append(d.Files, driver.File{Path: p, HostPath: p, Kind: kind, Capabilities: driver.Utility})
	}
	slices.SortFunc(d.Files, func(a, b driver.File) int { return strings.Compare(a.Path, b.Path) })
	return d
}

// Without hooks, mounts take the place of the hook's links and of the loader's cache.
func TestGenerateWithoutHooks(t *testing.T) {
	multiarch := "/usr/lib/" + host.MachineName() + "-linux-gnu/"
	for name, c := range map[string]struct {
		library driver.Library
		want    []string
	}{
		"in a directory that some loaders search": {
			driver.Library{
				Path: "/usr/lib64/libcuda.so.580", SONAME: "libcuda.so.1", Links: []driver.Link{
					{Path: "/usr/lib64/libcuda.so", Target: "libcuda.so.1"},
					{Path: "/usr/lib64/libcuda.so.1", Target: "libcuda.so.580"},
				},
			},
			[]string{
				multiarch + "libcuda.so", multiarch + "libcuda.so.1",
				"/usr/lib64/libcuda.so", "/usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so.580",
			},
		},
		"in a directory that no loader searches": {
			driver.Library{
				Path: "/opt/nvidia/libcuda.so.580", SONAME: "libcuda.so.1",
				Links: []driver.Link{{Path: "/opt/nvidia/libcuda.so.1", Target: "libcuda.so.580"}},
			},
			[]string{
				"/opt/nvidia/libcuda.so.1", "/opt/nvidia/libcuda.so.580",
				multiarch + "libcuda.so.1", "/usr/lib64/libcuda.so.1",
			},
		},
		"with a SONAME that is the file's name": {
			driver.Library{Path: "/usr/lib64/libglcore.so.580", SONAME: "libglcore.so.580"},
			[]string{multiarch + "libglcore.so.580", "/usr/lib64/libglcore.so.580"},
		},
		"with a link in another directory, where programs load it by path": {
			driver.Library{
				Path: "/usr/lib64/liballocator.so.580", SONAME: "liballocator.so.1", Links: []driver.Link{
					{Path: "/usr/lib64/gbm/nvidia-drm_gbm.so", Target: "../liballocator.so.1"},
					{Path: "/usr/lib64/liballocator.so.1", Target: "liballocator.so.580"},
				},
			},
			[]string{
				multiarch + "liballocator.so.1", "/usr/lib64/gbm/nvidia-drm_gbm.so",
				"/usr/lib64/liballocator.so.1", "/usr/lib64/liballocator.so.580",
			},
		},
		"a module that the X server loads by path": {
			driver.Library{
				Path:  "/usr/lib64/nvidia/xorg/libglx.so.580",
				Links: []driver.Link{{Path: "/usr/lib64/nvidia/xorg/libglx.so", Target: "libglx.so.580"}},
			},
			[]string{"/usr/lib64/nvidia/xorg/libglx.so", "/usr/lib64/nvidia/xorg/libglx.so.580"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := testDriver()
			c.library.HostPath, c.library.Capabilities = "/driver"+c.library.Path, driver.All
			d.Libraries, d.Files = []driver.Library{c.library}, nil
			spec, _, err := Generate(twoGPUs(0), d, Options{WithoutHooks: true})
			testenv.Must(t, err)
			var got []string
			for _, m := range spec.ContainerEdits.Mounts {
				if m.HostPath != c.library.HostPath || !slices.Equal(m.Options, fileOptions()) {
					t.Errorf("mount %+v is not of the library, or not read-only", m)
				}
				got = append(got, m.ContainerPath)
			}
			slices.Sort(c.want)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("mounts (-want +got):\n%s", diff)
			}
			if len(spec.ContainerEdits.Hooks) > 0 {
				t.Errorf("the spec has hooks: %v", spec.ContainerEdits.Hooks)
			}
		})
	}
}

func TestSpecsWithoutHooksAreOurs(t *testing.T) {
	generate := func() *specs.Spec {
		spec, _, err := Generate(twoGPUs(0), testDriver(), Options{WithoutHooks: true})
		testenv.Must(t, err)
		return spec
	}
	for name, c := range map[string]struct {
		change func(*specs.Spec)
		ours   bool
	}{
		"as it was made": {func(*specs.Spec) {}, true},
		"with a hook of another program": {func(s *specs.Spec) {
			s.ContainerEdits.Hooks = []*specs.Hook{{Path: "/usr/bin/nvidia-cdi-hook", Args: []string{"nvidia-cdi-hook"}}}
		}, false},
		"without our variable": {func(s *specs.Spec) { s.ContainerEdits.Env = nil }, false},
		"with each library in one place": {func(s *specs.Spec) {
			s.ContainerEdits.Mounts = slices.DeleteFunc(s.ContainerEdits.Mounts, func(m *specs.Mount) bool {
				return strings.HasPrefix(m.ContainerPath, "/usr/lib/")
			})
		}, false},
		"without mounts": {func(s *specs.Spec) { s.ContainerEdits.Mounts = nil }, false},
	} {
		t.Run(name, func(t *testing.T) {
			spec := generate()
			c.change(spec)
			if got := WrittenHere(spec); got != c.ours {
				t.Errorf("ours: %t", got)
			}
		})
	}
}

// If two libraries have a SONAME, the first one has the name, as in the loader's cache that the hook makes.
func TestTheFirstOfEqualSONAMEsIsMounted(t *testing.T) {
	d := testDriver()
	d.Libraries = []driver.Library{
		{Path: "/a/libx.so.2", HostPath: "/a/libx.so.2", SONAME: "libx.so", Capabilities: driver.All},
		{Path: "/b/libx.so.1", HostPath: "/b/libx.so.1", SONAME: "libx.so", Capabilities: driver.All},
	}
	spec, _, err := Generate(twoGPUs(0), d, Options{WithoutHooks: true})
	testenv.Must(t, err)
	i := slices.IndexFunc(spec.ContainerEdits.Mounts, func(m *specs.Mount) bool {
		return m.ContainerPath == "/usr/lib64/libx.so"
	})
	if i < 0 || spec.ContainerEdits.Mounts[i].HostPath != "/a/libx.so.2" {
		t.Errorf("mounts: %+v", spec.ContainerEdits.Mounts)
	}
}

func drmNode(name string, mode fs.FileMode) driver.DeviceNode {
	p := "/dev/dri/" + name
	return driver.DeviceNode{Path: p, HostPath: p, Mode: mode, Capabilities: driver.UsesDRM}
}

func mustGenerate(t testing.TB, s *gpu.Snapshot, d *driver.Driver, o Options) *specs.Spec {
	t.Helper()
	if o.HookPath == "" {
		o.HookPath = testHook
	}
	spec, _, err := Generate(s, d, o)
	testenv.Must(t, err)
	return spec
}

// nodesByDevice are the paths of the nodes of each device.
func nodesByDevice(spec *specs.Spec) map[string]string {
	m := map[string]string{}
	for _, d := range spec.Devices {
		m[d.Name] = nodePaths(d.ContainerEdits)
	}
	return m
}

func nodePaths(e specs.ContainerEdits) string {
	var paths []string
	for _, n := range e.DeviceNodes {
		paths = append(paths, strings.TrimPrefix(n.Path, "/dev/"))
	}
	return strings.Join(paths, " ")
}

func TestGenerateOffers(t *testing.T) {
	onlySecond := map[string]string{"1": "dri/card2 nvidia5", "GPU-1": "dri/card2 nvidia5", "all": "dri/card2 nvidia5"}
	for name, c := range map[string]struct {
		change func(*gpu.Snapshot, *driver.Driver)
		migs   int
		want   map[string]string
		notes  map[string]string // of devices that are left out
	}{
		"GPUs by index, UUID and all together": {want: map[string]string{
			"0": "dri/card1 dri/renderD128 nvidia4", "GPU-0": "dri/card1 dri/renderD128 nvidia4",
			"1": "dri/card2 nvidia5", "GPU-1": "dri/card2 nvidia5",
			"all": "dri/card1 dri/card2 dri/renderD128 nvidia4 nvidia5",
		}},
		"MIG devices in place of their GPU, without its DRM nodes": {migs: 2, want: map[string]string{
			"0": "dri/card1 dri/renderD128 nvidia4", "GPU-0": "dri/card1 dri/renderD128 nvidia4",
			"1:0":   "nvidia-caps/nvidia-cap30 nvidia-caps/nvidia-cap31 nvidia5",
			"MIG-0": "nvidia-caps/nvidia-cap30 nvidia-caps/nvidia-cap31 nvidia5",
			"1:1":   "nvidia-caps/nvidia-cap32 nvidia-caps/nvidia-cap33 nvidia5",
			"MIG-1": "nvidia-caps/nvidia-cap32 nvidia-caps/nvidia-cap33 nvidia5",
			"all": "dri/card1 dri/renderD128 nvidia-caps/nvidia-cap30 nvidia-caps/nvidia-cap31 " +
				"nvidia-caps/nvidia-cap32 nvidia-caps/nvidia-cap33 nvidia4 nvidia5",
		}},
		"DRM nodes for a MIG device with graphics": {
			migs: 1, change: func(s *gpu.Snapshot, _ *driver.Driver) {
				s.Devices = s.Devices[1:]
				s.Devices[0].MIG[0].Profile = "1g.24gb+me,gfx"
			},
			want: map[string]string{
				"1:0":   "dri/card2 nvidia-caps/nvidia-cap30 nvidia-caps/nvidia-cap31 nvidia5",
				"MIG-0": "dri/card2 nvidia-caps/nvidia-cap30 nvidia-caps/nvidia-cap31 nvidia5",
				"all":   "dri/card2 nvidia-caps/nvidia-cap30 nvidia-caps/nvidia-cap31 nvidia5",
			},
		},
		"the others when one cannot be read": {
			change: func(s *gpu.Snapshot, _ *driver.Driver) { s.Devices[0].Error = "GPU is lost" },
			want:   onlySecond,
			notes:  map[string]string{"GPU 0": "cannot be read: GPU is lost"},
		},
		"the others when one has no node": {
			change: func(s *gpu.Snapshot, _ *driver.Driver) { s.Devices[0].Minor = 9 },
			want:   onlySecond,
			notes:  map[string]string{"GPU 0": "no device node /dev/nvidia9"},
		},
		"the first of two with one UUID": {
			change: func(s *gpu.Snapshot, _ *driver.Driver) { s.Devices[1].UUID = "GPU-0" },
			want: map[string]string{
				"0": "dri/card1 dri/renderD128 nvidia4", "GPU-0": "dri/card1 dri/renderD128 nvidia4",
				"all": "dri/card1 dri/renderD128 nvidia4",
			},
			notes: map[string]string{"GPU 1": "its name GPU-0 is already used by GPU 0"},
		},
		"no GPU whose UUID cannot be a name": {
			change: func(s *gpu.Snapshot, _ *driver.Driver) { s.Devices[0].UUID = "GPU/../x" },
			want:   onlySecond,
			notes:  map[string]string{"GPU 0": `its name "GPU/../x" cannot be used`},
		},
		"no GPU without a UUID": {
			change: func(s *gpu.Snapshot, _ *driver.Driver) { s.Devices[0].UUID = "" },
			want:   onlySecond,
			notes:  map[string]string{"GPU 0": `its name "" cannot be used`},
		},
		"no GPU in MIG mode without MIG devices": {
			change: func(s *gpu.Snapshot, _ *driver.Driver) { s.Devices[0].MIGEnabled = true },
			want:   onlySecond,
			notes:  map[string]string{"GPU 0": "is in MIG mode and has no MIG device"},
		},
		"no MIG device whose nodes are unknown or missing": {
			migs: 2, change: func(s *gpu.Snapshot, _ *driver.Driver) {
				s.Devices[1].MIG[0].GPUInstanceCap = gpu.NoMinor
				s.Devices[1].MIG[1].ComputeInstanceCap = 99
			},
			want: map[string]string{
				"0": "dri/card1 dri/renderD128 nvidia4", "GPU-0": "dri/card1 dri/renderD128 nvidia4",
				"all": "dri/card1 dri/renderD128 nvidia4",
			},
			notes: map[string]string{
				"MIG device 1:0 (1g.10gb)": "has device nodes in /dev/nvidia-caps whose minor numbers are unknown",
				"MIG device 1:1 (1g.10gb)": "no device node /dev/nvidia-caps/nvidia-cap99",
			},
		},
		"the others when the node of one is no device": {
			change: func(s *gpu.Snapshot, d *driver.Driver) {
				s.Devices[0].Minor = 9
				d.Findings = append(d.Findings,
					driver.Finding{Name: "/dev/nvidia9", Kind: driver.KindNode, Note: "a file, not a character device"})
			},
			want:  onlySecond,
			notes: map[string]string{"GPU 0": "/dev/nvidia9 cannot be used: a file, not a character device"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, d := twoGPUs(c.migs), testDriver()
			if c.change != nil {
				c.change(s, d)
			}
			spec, findings, err := Generate(s, d, Options{HookPath: testHook})
			testenv.Must(t, err)
			if diff := cmp.Diff(c.want, nodesByDevice(spec)); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
			if spec.Version != "0.5.0" {
				t.Errorf("version %s; an index as a name needs 0.5.0, and nothing needs more", spec.Version)
			}
			for _, f := range findings {
				if note, out := c.notes[f.Name]; f.Used == out || !strings.Contains(f.Note, note) {
					t.Errorf("finding %+v, want left out: %v, with %q", f, out, note)
				}
			}
			if err := checkSpec(spec); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestGenerateCommonEdits(t *testing.T) {
	spec := mustGenerate(t, twoGPUs(0), testDriver(), Options{})
	e := spec.ContainerEdits
	if diff := cmp.Diff([]string{"NVIDIA_VISIBLE_DEVICES=void"}, e.Env); diff != "" {
		t.Errorf("environment (-want +got):\n%s", diff)
	}
	if got := nodePaths(e); got != "nvidia-modeset nvidia-uvm nvidia-uvm-tools nvidiactl" {
		t.Errorf("nodes %q", got)
	}
	mounts := map[string]string{}
	for _, m := range e.Mounts {
		mounts[m.ContainerPath] = m.HostPath + " " + strings.Join(m.Options, ",")
	}
	const file, socket = "ro,nosuid,nodev,rbind,rprivate", "nosuid,nodev,noexec,rbind,rprivate"
	want := map[string]string{
		"/run/nvidia-persistenced/socket":           "/run/nvidia-persistenced/socket " + socket,
		"/usr/bin/nvidia-smi":                       "/usr/bin/nvidia-smi " + file,
		"/usr/lib64/libcuda.so." + testVersion:      "/driver/usr/lib64/libcuda.so." + testVersion + " " + file,
		"/usr/lib64/libnvcuvid.so." + testVersion:   "/driver/usr/lib64/libnvcuvid.so." + testVersion + " " + file,
		"/usr/lib64/libnvidia-ml.so." + testVersion: "/driver/usr/lib64/libnvidia-ml.so." + testVersion + " " + file,
	}
	if diff := cmp.Diff(want, mounts); diff != "" {
		t.Errorf("mounts (-want +got):\n%s", diff)
	}
}

func TestGenerateWritesTheHooksArguments(t *testing.T) {
	spec := mustGenerate(t, twoGPUs(0), testDriver(), Options{})
	if len(spec.ContainerEdits.Hooks) != 1 {
		t.Fatalf("%d hooks, want one", len(spec.ContainerEdits.Hooks))
	}
	h := spec.ContainerEdits.Hooks[0]
	if h.HookName != "createContainer" || h.Path != testHook || h.Args[0] != "prestart-hook" || h.Timeout == nil {
		t.Errorf("hook %+v", h)
	}
	// Without an environment of its own a hook gets that of the image.
	if len(h.Env) == 0 || slices.ContainsFunc(h.Env, func(v string) bool { return !strings.HasPrefix(v, "PATH=") }) {
		t.Errorf("environment %q", h.Env)
	}
	got, err := hookargs.Parse(h.Args[1:])
	testenv.Must(t, err)
	lib := func(name string) hookargs.Library {
		return hookargs.Library{SONAME: name + ".so.1", Path: "/usr/lib64/" + name + ".so." + testVersion}
	}
	link := func(name string) hookargs.Link {
		return hookargs.Link{Path: "/usr/lib64/" + name + ".so.1", Target: name + ".so." + testVersion}
	}
	want := &hookargs.CreateContainer{
		DriverVersion: testVersion, CUDAVersion: "13.0", Params: true, EGLProfile: true,
		Libraries: []hookargs.Library{lib("libcuda"), lib("libnvcuvid"), lib("libnvidia-ml")},
		Links:     []hookargs.Link{link("libcuda"), link("libnvcuvid"), link("libnvidia-ml")},
		DRI: []hookargs.DRI{
			{PCIBusID: "0000:01:00.0", Nodes: []string{"card1", "renderD128"}},
			{PCIBusID: "0000:02:00.0", Nodes: []string{"card2"}},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("work (-want +got):\n%s", diff)
	}
}

func TestGenerateFiltersByCapability(t *testing.T) {
	for name, c := range map[string]struct {
		capabilities             driver.Capabilities
		device, control, mounts  string
		compat, profile, drmHook bool
	}{
		"all": {
			driver.All, "dri/card1 dri/renderD128 nvidia4", "nvidia-modeset nvidia-uvm nvidia-uvm-tools nvidiactl",
			"socket nvidia-smi libcuda libnvcuvid libnvidia-ml", true, true, true,
		},
		"compute": {driver.Compute, "nvidia4", "nvidia-uvm nvidia-uvm-tools nvidiactl", "libcuda", true, false, false},
		"utility": {driver.Utility, "nvidia4", "nvidiactl", "socket nvidia-smi libnvidia-ml", false, false, false},
		"video": {
			driver.Video, "dri/card1 dri/renderD128 nvidia4", "nvidia-uvm nvidiactl",
			"libcuda libnvcuvid", true, false, true,
		},
		"display": {
			driver.Display, "dri/card1 dri/renderD128 nvidia4", "nvidia-modeset nvidiactl", "", false, true, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			spec := mustGenerate(t, twoGPUs(0), testDriver(), Options{Capabilities: c.capabilities})
			var mounts []string
			for _, m := range spec.ContainerEdits.Mounts {
				name, _, _ := strings.Cut(path.Base(m.ContainerPath), ".so")
				mounts = append(mounts, name)
			}
			if got := nodesByDevice(spec)["0"]; got != c.device {
				t.Errorf("nodes of GPU 0: %q, want %q", got, c.device)
			}
			if got := nodePaths(spec.ContainerEdits); got != c.control {
				t.Errorf("control nodes: %q, want %q", got, c.control)
			}
			if got := strings.Join(mounts, " "); got != c.mounts {
				t.Errorf("mounts: %q, want %q", got, c.mounts)
			}
			work := parseHook(spec.ContainerEdits.Hooks[0].Args)
			if work.DriverVersion != "" != c.compat || work.EGLProfile != c.profile || len(work.DRI) > 0 != c.drmHook {
				t.Errorf("work of the hook: %+v", work)
			}
			if len(work.Libraries) != strings.Count(c.mounts, "lib") {
				t.Errorf("libraries for the loader: %v", work.Libraries)
			}
		})
	}
}

// A container lacks the host's groups, so its users may all open a node that is for a group on the host.
func TestGenerateOpensDRMNodesToAllUsers(t *testing.T) {
	d := testDriver()
	d.Nodes[0].Mode = 0o400 // the driver decides who may open the node of a MIG instance
	spec := mustGenerate(t, twoGPUs(1), d, Options{})
	all := devicesByName(spec)[AllDevices]
	for _, n := range append(all.ContainerEdits.DeviceNodes, spec.ContainerEdits.DeviceNodes...) {
		want := ""
		if n.Path == "/dev/dri/card1" {
			want = "0666"
		}
		got := ""
		if n.FileMode != nil {
			got = fmt.Sprintf("%#o", uint32(*n.FileMode))
		}
		if got != want {
			t.Errorf("mode of %s: %q, want %q", n.Path, got, want)
		}
		if n.Permissions != "rw" || n.HostPath != "" || n.Major != 0 || n.Minor != 0 || n.UID != nil || n.GID != nil {
			t.Errorf("node %+v", n)
		}
	}
}

func TestGenerateWritesHostPathsUnderAnotherRoot(t *testing.T) {
	d := testDriver()
	for _, nodes := range [][]driver.DeviceNode{d.Control, d.Nodes} {
		for i := range nodes {
			nodes[i].HostPath = "/elsewhere" + nodes[i].Path
		}
	}
	spec := mustGenerate(t, twoGPUs(0), d, Options{})
	all := devicesByName(spec)[AllDevices]
	for _, n := range append(spec.ContainerEdits.DeviceNodes, all.ContainerEdits.DeviceNodes...) {
		if strings.HasPrefix(n.Path, "/dev/dri/") {
			continue
		}
		if n.HostPath != "/elsewhere"+n.Path {
			t.Errorf("node %+v", n)
		}
	}
}

func TestGenerateRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		options Options
		change  func(*driver.Driver)
		want    string
	}{
		"a kind without a class":   {Options{Kind: "nvidia.com", HookPath: testHook}, nil, "want VENDOR/CLASS"},
		"a kind with a bad vendor": {Options{Kind: "-x/gpu", HookPath: testHook}, nil, "-x"},
		"no hook path":             {Options{}, nil, "not absolute"},
		"a relative hook path":     {Options{HookPath: "bin/prestart-hook"}, nil, "not absolute"},
		"a library the hook cannot read": {Options{HookPath: testHook}, func(d *driver.Driver) {
			d.Libraries[0].SONAME = "a,b"
		}, "write the arguments of the hook"},
		"a link the hook cannot read": {Options{HookPath: testHook}, func(d *driver.Driver) {
			d.Libraries[0].Links[0].Path = "/usr/../etc/passwd"
		}, "write the arguments of the hook"},
	} {
		t.Run(name, func(t *testing.T) {
			d := testDriver()
			if c.change != nil {
				c.change(d)
			}
			spec, _, err := Generate(twoGPUs(0), d, c.options)
			checkError(t, err, c.want)
			if spec != nil {
				t.Error("a spec beside the error")
			}
		})
	}
}

func TestGenerateWithoutADevice(t *testing.T) {
	s := twoGPUs(0)
	s.Devices[0].Error = "GPU is lost"
	s.Devices[1].MIGEnabled = true
	spec, findings, err := Generate(s, testDriver(), Options{HookPath: testHook})
	if err != nil || len(spec.Devices) > 0 {
		t.Errorf("spec %v, %v", spec, err)
	}
	want := []driver.Finding{
		{Name: "GPU 0", Kind: driver.KindDevice, UUID: s.Devices[0].UUID, Note: "cannot be read: GPU is lost"},
		{
			Name: "GPU 1", Kind: driver.KindDevice, UUID: s.Devices[1].UUID,
			Note: "is in MIG mode and has no MIG device",
		},
	}
	if diff := cmp.Diff(want, findings); diff != "" {
		t.Errorf("findings (-want +got):\n%s", diff)
	}
	spec, findings, err = Generate(&gpu.Snapshot{}, testDriver(), Options{HookPath: testHook})
	if err != nil || len(spec.Devices)+len(findings) > 0 {
		t.Errorf("spec of an empty node %v, %v, %v", spec, findings, err)
	}
}
