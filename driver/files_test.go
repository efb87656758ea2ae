package driver

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestDiscoverFindsFiles(t *testing.T) {
	t.Parallel()
	icd := "/vulkan/icd.d/nvidia_icd." + host.MachineName() + ".json"
	const firmware = "/lib/firmware/nvidia/" + testVersion
	for name, c := range map[string]struct {
		make func(*tree)
		want map[string]string // path in the container to path in the root
	}{
		"programs, in the PATH of images": {
			func(r *tree) {
				r.file("/usr/bin/nvidia-smi", "", 0o755)
				r.file("/usr/local/nvidia/bin/nvidia-debugdump", "", 0o755)
			},
			map[string]string{
				"/usr/bin/nvidia-smi":       "/usr/bin/nvidia-smi",
				"/usr/bin/nvidia-debugdump": "/usr/local/nvidia/bin/nvidia-debugdump",
			},
		},
		"a program that is a link, under the link's name": {
			func(r *tree) {
				r.file("/usr/lib/nvidia/current/nvidia-smi", "", 0o755)
				r.link("/usr/bin/nvidia-smi", "/etc/alternatives/nvidia-smi")
				r.link("/etc/alternatives/nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi")
			},
			map[string]string{"/usr/bin/nvidia-smi": "/usr/lib/nvidia/current/nvidia-smi"},
		},
		"the first program that can be executed": {
			func(r *tree) {
				r.file("/usr/local/bin/nvidia-smi", "", 0o644)
				testenv.Must(r.t, os.MkdirAll(r.dir+"/usr/sbin/nvidia-smi", 0o755))
				r.file("/usr/bin/nvidia-smi", "", 0o755)
			},
			map[string]string{"/usr/bin/nvidia-smi": "/usr/bin/nvidia-smi"},
		},
		"configuration where the container's libraries look for it": {
			func(r *tree) {
				r.file("/usr/share/vulkan/icd.d/nvidia_icd.json", "{}", 0o644)
				r.file("/usr/local/share/glvnd/egl_vendor.d/10_nvidia.json", "{}", 0o644)
				r.file("/vulkan/implicit_layer.d/nvidia_layers.json", "{}", 0o644)
			},
			map[string]string{
				"/etc/vulkan/icd.d/nvidia_icd.json":               "/usr/share/vulkan/icd.d/nvidia_icd.json",
				"/usr/share/glvnd/egl_vendor.d/10_nvidia.json":    "/usr/local/share/glvnd/egl_vendor.d/10_nvidia.json",
				"/etc/vulkan/implicit_layer.d/nvidia_layers.json": "/vulkan/implicit_layer.d/nvidia_layers.json",
			},
		},
		"the Vulkan driver's file for this machine": {
			func(r *tree) {
				r.file("/usr/share"+icd, "{}", 0o644)
				r.file("/usr/share/vulkan/icd.d/nvidia_icd.i686.json", "{}", 0o644)
			},
			map[string]string{"/etc" + icd: "/usr/share" + icd},
		},
		"sockets, and no other file with such a name": {
			func(r *tree) {
				r.socket("/run/nvidia-persistenced/socket")
				r.file("/run/nvidia-fabricmanager/socket", "", 0o644)
			},
			map[string]string{"/run/nvidia-persistenced/socket": "/run/nvidia-persistenced/socket"},
		},
		"firmware of the driver's version": {
			func(r *tree) {
				r.file(firmware+"/gsp_ga10x.bin", "", 0o644)
				r.file(firmware+"/notes.txt", "", 0o644)
				r.file("/lib/firmware/nvidia/575.57.08/gsp_tu10x.bin", "", 0o644)
			},
			map[string]string{firmware + "/gsp_ga10x.bin": firmware + "/gsp_ga10x.bin"},
		},
		"firmware of driver 615, by both its names": {
			func(r *tree) {
				r.file(firmware+"/ucodes_ga10x.bin", "", 0o644)
				r.file(firmware+"/ucode_gb20x.bin", "", 0o644)
			},
			map[string]string{
				firmware + "/ucodes_ga10x.bin": firmware + "/ucodes_ga10x.bin",
				firmware + "/ucode_gb20x.bin":  firmware + "/ucode_gb20x.bin",
			},
		},
		"firmware in the directory of the kernel's parameter": {
			func(r *tree) {
				r.file("/sys/module/firmware_class/parameters/path", "/var/lib/firmware\n", 0o644)
				r.file("/var"+firmware+"/gsp_tu10x.bin", "", 0o644)
			},
			map[string]string{"/var" + firmware + "/gsp_tu10x.bin": "/var" + firmware + "/gsp_tu10x.bin"},
		},
		"nothing, without an error": {func(*tree) {}, map[string]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newTree(t)
			r.core("/usr/lib64", testVersion)
			c.make(r)
			got := map[string]string{}
			for _, f := range r.discover(testVersion).Files {
				got[f.Path] = strings.TrimPrefix(f.HostPath, r.dir)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

// Every user can make a directory in /tmp. Containers get the one for MPS only if it belongs to root.
func TestDiscoverTakesOnlyAnMPSDirectoryOfRoot(t *testing.T) {
	testenv.Root(t)
	for name, c := range map[string]struct {
		make func(*tree)
		used bool
	}{
		"root's": {func(r *tree) { testenv.Must(r.t, os.MkdirAll(r.dir+"/tmp/nvidia-mps", 0o755)) }, true},
		"a user's": {func(r *tree) {
			testenv.Must(r.t, os.MkdirAll(r.dir+"/tmp/nvidia-mps", 0o755))
			testenv.Must(r.t, os.Chown(r.dir+"/tmp/nvidia-mps", 1000, 1000))
		}, false},
		"a link": {func(r *tree) {
			testenv.Must(r.t, os.MkdirAll(r.dir+"/root", 0o700))
			r.link("/tmp/nvidia-mps", "/root")
		}, false},
		"not a folder": {func(r *tree) { r.file("/tmp/nvidia-mps", "", 0o644) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTree(t)
			r.core("/usr/lib64", testVersion)
			c.make(r)
			d := r.discover(testVersion)
			if f := finding(t, d.Findings, mpsDir); f.Used != c.used || len(d.Files) == 1 != c.used {
				t.Errorf("%+v, files %v; want it used: %v", f, d.Files, c.used)
			}
		})
	}
}

func TestDiscoverFindsNodes(t *testing.T) {
	testenv.Root(t)
	r := newTree(t)
	r.core("/usr/lib64", testVersion)
	node := func(p string, mode uint32) {
		full := r.path(p)
		testenv.Must(r.t, unix.Mknod(full, unix.S_IFCHR|mode, int(unix.Mkdev(1, 3))))
		testenv.Must(r.t, os.Chmod(full, os.FileMode(mode)))
	}
	for _, p := range []string{
		"nvidiactl", "nvidia0", "nvidia12", "nvidia-caps/nvidia-cap30", "nvidia-caps/nvidia-capx",
	} {
		node("/dev/"+p, 0o666)
	}
	node("/dev/dri/card0", 0o660)
	node("/dev/dri/card1", 0o660)
	node("/dev/dri/renderD129", 0o660)
	r.file("/dev/nvidia-uvm", "", 0o666)
	r.link("/dev/nvidia5", "nvidia0")
	for p, vendor := range map[string]string{
		"0000:00:02.0/drm/card0": "0x8086", "0000:1b:00.0/drm/card1": vendorNVIDIA,
	} {
		testenv.Must(r.t, os.MkdirAll(filepath.Join(r.dir, "sys/bus/pci/devices", p), 0o755))
		r.file("/sys/bus/pci/devices/"+p[:12]+"/vendor", vendor+"\n", 0o644)
	}
	testenv.Must(r.t, os.MkdirAll(filepath.Join(r.dir, "sys/bus/pci/devices/0000:1b:00.0/drm/renderD129"), 0o755))
	testenv.Must(r.t, os.MkdirAll(filepath.Join(r.dir, "sys/bus/pci/devices/0000:1b:00.0/drm/renderD130"), 0o755))

	d := r.discover(testVersion)
	var got []string
	for _, n := range slices.Concat(d.Control, d.Nodes) {
		got = append(got, n.Path)
	}
	want := []string{"/dev/nvidiactl", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia0", "/dev/nvidia12"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	wantDRM := map[string][]DeviceNode{"0000:1b:00.0": {
		{"/dev/dri/card1", r.dir + "/dev/dri/card1", 0o660, UsesDRM},
		{"/dev/dri/renderD129", r.dir + "/dev/dri/renderD129", 0o660, UsesDRM},
	}}
	if diff := cmp.Diff(wantDRM, d.DRM); diff != "" {
		t.Errorf("DRM nodes (-want +got):\n%s", diff)
	}
	for p, want := range map[string]string{
		"/dev/nvidia5": "/dev/nvidia5 cannot be used: a symbolic link, not a character device",
		"/dev/nvidia6": "no device node /dev/nvidia6",
	} {
		if got := d.WhyNoNode(p); got != want {
			t.Errorf("WhyNoNode(%s) = %q, want %q", p, got, want)
		}
	}
	for name, note := range map[string]string{
		"/dev/nvidiactl": "", "/dev/nvidia-uvm": "not a character device", "/dev/nvidia-modeset": notFound,
		"/dev/dri/renderD130": notFound,
	} {
		if f := finding(t, d.Findings, name); !strings.Contains(f.Note, note) || f.Used != (note == "") {
			t.Errorf("finding for %s: %+v, want the note %q", name, f, note)
		}
	}
}

// The driver, the nodes and the rest of a host can have three roots.
func TestDiscoverKeepsRootsApart(t *testing.T) {
	testenv.Root(t)
	r := newTree(t)
	r.core("/run/nvidia/driver/usr/lib64", testVersion)
	testenv.Must(r.t, unix.Mknod(r.path("/devices/dev/nvidiactl"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	h, err := host.New(r.dir, r.dir+"/run/nvidia/driver", r.dir+"/devices")
	testenv.Must(r.t, err)
	d, err := Discover(h, testVersion)
	testenv.Must(r.t, err)
	l := d.Libraries[0]
	if l.Path != "/usr/lib64/libcuda.so."+testVersion || l.HostPath != r.dir+"/run/nvidia/driver"+l.Path {
		t.Errorf("library %+v", l)
	}
	if n := d.Control[0]; n.Path != "/dev/nvidiactl" || n.HostPath != r.dir+"/devices/dev/nvidiactl" {
		t.Errorf("node %+v", n)
	}
}

func TestExplainNotesWhatCapabilitiesLeaveOut(t *testing.T) {
	t.Parallel()
	r := newTree(t)
	r.core("/usr/lib64", testVersion)
	r.library("/usr/lib64/libnvcuvid.so." + testVersion)
	d := r.discover(testVersion)
	f := finding(t, d.Explain(Compute|Utility), "libnvcuvid.so.1")
	if f.Used || f.Note != "for video, left out for compute,utility" {
		t.Errorf("%+v", f)
	}
	for _, c := range []Capabilities{0, All, Video} {
		if f := finding(t, d.Explain(c), "libnvcuvid.so.1"); !f.Used || f.Note != "" {
			t.Errorf("with %s: %+v", c, f)
		}
	}
	if !finding(t, d.Findings, "libnvcuvid.so.1").Used {
		t.Error("Explain changed the driver")
	}
}
