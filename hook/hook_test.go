package hook

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/ldcache"
	testimage "gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// write makes files below dir.
func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, data := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func hostAt(t *testing.T, dir string) host.Host {
	t.Helper()
	h, err := host.New(dir, "", "/")
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// newRoot makes an empty container's root: a mount point in a mount namespace of the test.
func newRoot(t *testing.T) string {
	t.Helper()
	testenv.Root(t)
	testenv.MountNamespace(t)
	root := t.TempDir()
	testenv.MountPoint(t, root)
	return root
}

func TestCreateContainerChangesOnlyAContainersRoot(t *testing.T) {
	root := newRoot(t)
	ordinary := t.TempDir()
	args := &hookargs.CreateContainer{Links: []hookargs.Link{{Path: "/link", Target: "target"}}}
	for name, tc := range map[string]struct {
		state State
		want  string
	}{
		"no bundle":             {State{ID: "x"}, "find the container's root"},
		"a root that is gone":   {State{ID: "x", Root: root + "/gone"}, "open the container's root"},
		"the host's root":       {State{ID: "x", Root: "/proc/self/root"}, "open the container's root"},
		"an ordinary directory": {State{ID: "x", Root: ordinary}, "nothing was changed: it is not a mount point"},
	} {
		warnings, err := CreateContainer(args, &tc.state, hostAt(t, t.TempDir()))
		if len(warnings) != 0 || err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: warnings %v, error %v, want %q", name, warnings, err, tc.want)
		}
	}
	if names, err := os.ReadDir(ordinary); len(names) != 0 {
		t.Errorf("the ordinary directory has %v, %v", names, err)
	}
	warnings, err := CreateContainer(args, &State{ID: "x", Root: root}, hostAt(t, t.TempDir()))
	if len(warnings) != 0 || err != nil {
		t.Errorf("a container's root: warnings %v, error %v", warnings, err)
	}
}

func makeNode(t *testing.T, path string, minor uint32) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(195, minor))); err != nil {
		t.Fatal(err)
	}
}

func TestDeviceLinksEGLProfileAndParams(t *testing.T) {
	hostDir, root := t.TempDir(), newRoot(t)
	const on = "Mobile: 0\nModifyDeviceFiles: 1\n"
	write(t, hostDir, map[string]string{"proc/driver/nvidia/params": on})
	write(t, root, map[string]string{"proc/driver/nvidia/params": on, "dev/nvidia7": "a file", "dev/nvidia-caps/x": ""})
	for name, minor := range map[string]uint32{
		"nvidia0": 2, "nvidia10": 10, "nvidiactl": 255, "nvidia-uvm": 0, "nvidia-uvm-tools": 1, "nvidia": 3,
		"dri/card1": 1, "dri/renderD129": 129,
	} {
		makeNode(t, filepath.Join(root, "dev", name), minor)
	}
	args := &hookargs.CreateContainer{
		Params: true, EGLProfile: true,
		DRI: []hookargs.DRI{
			{PCIBusID: "0000:1b:00.0", Nodes: []string{"card1", "renderD129"}},
			{PCIBusID: "0000:43:00.0", Nodes: []string{"card2"}},
		},
	}
	warnings, err := CreateContainer(args, &State{ID: "x", Root: root}, hostAt(t, hostDir))
	if len(warnings) != 0 || err != nil {
		t.Fatalf("warnings %v, error %v", warnings, err)
	}
	for name, want := range map[string]string{
		"proc/driver/nvidia/params": "Mobile: 0\nModifyDeviceFiles: 0\n",
		profilePath: `{"profiles":[{"name":"_container_","settings":["EGLVisibleDGPUDevices",0x404]}],` +
			`"rules":[{"pattern":[],"profile":"_container_"}]}`,
	} {
		if got, err := os.ReadFile(filepath.Join(root, name)); string(got) != want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, want)
		}
	}
	links, err := os.ReadDir(filepath.Join(root, "dev/dri/by-path"))
	if err != nil || len(links) != 2 {
		t.Errorf("by-path: %v, %v, want 2 links", links, err)
	}
	if got, err := os.Readlink(filepath.Join(root, "dev/dri/by-path/pci-0000:1b:00.0-render")); got != "../renderD129" {
		t.Errorf("by-path link: %q, %v", got, err)
	}
	before := testimage.Fingerprint(t, root)
	if warnings, err := CreateContainer(args, &State{ID: "x", Root: root}, hostAt(t, hostDir)); len(warnings) != 0 ||
		err != nil {
		t.Errorf("the second time: warnings %v, error %v", warnings, err)
	}
	if testimage.Fingerprint(t, root) != before {
		t.Error("the second run changed something")
	}
	if err := unix.Unmount(filepath.Join(root, "proc/driver/nvidia/params"), 0); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(root, "proc/driver/nvidia/params")); string(got) != on {
		t.Errorf("below the mount: %q, %v", got, err)
	}
}

// Files in a real /proc have the size 0. /proc/version stands for the driver's file.
func TestParamsAreMaskedInProc(t *testing.T) {
	hostDir, root := t.TempDir(), newRoot(t)
	write(t, hostDir, map[string]string{"proc/driver/nvidia/params": "ModifyDeviceFiles: 1\n"})
	write(t, root, map[string]string{"proc/driver/nvidia/params": ""})
	params := filepath.Join(root, "proc/driver/nvidia/params")
	if err := unix.Mount("/proc/version", params, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(params, unix.MNT_DETACH) }()
	args := &hookargs.CreateContainer{Params: true}
	for range 2 {
		warnings, err := CreateContainer(args, &State{ID: "x", Root: root}, hostAt(t, hostDir))
		if len(warnings) != 0 || err != nil {
			t.Fatalf("warnings %v, error %v", warnings, err)
		}
		if got, err := os.ReadFile(params); string(got) != "ModifyDeviceFiles: 0\n" {
			t.Errorf("the container sees %q, %v", got, err)
		}
	}
	if err := unix.Unmount(params, 0); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(params); strings.HasPrefix(string(got), "Modify") {
		t.Errorf("mounted twice: %q, %v", got, err)
	}
}

// Installing a package in the container runs ldconfig, which writes a new cache.
func TestLibrariesAreFoundAfterLdconfigInTheContainer(t *testing.T) {
	ldconfig := testenv.Command(t, "ldconfig")
	root := newRoot(t)
	write(t, root, map[string]string{
		"etc/ld.so.conf": "include /etc/ld.so.conf.d/*.conf\n", "etc/ld.so.conf.d/app.conf": "/opt/stubs\n",
	})
	for _, dir := range []string{"opt/stubs", "opt/driver", "opt/driver/vdpau"} {
		testimage.Library(t, filepath.Join(root, dir, "libcuda.so.580.1"), "libcuda.so.1")
	}
	a, err := archFor(goarch)
	if err != nil {
		t.Fatal(err)
	}
	write(t, root, map[string]string{
		a.glibcLoader: "loader", "usr/lib64/libc.so.6": "libc", "usr/lib64/libx.so.580.1": "driver",
	})
	args := &hookargs.CreateContainer{Libraries: []hookargs.Library{
		{SONAME: "libcuda.so.1", Path: "/opt/driver/libcuda.so.580.1"},
		{SONAME: "libother.so.1", Path: "/opt/driver/vdpau/libcuda.so.580.1"},
		{SONAME: "libx.so.1", Path: "/usr/lib64/libx.so.580.1"},
	}}
	for range 2 {
		warnings, err := CreateContainer(args, &State{ID: "x", Root: root}, hostAt(t, t.TempDir()))
		if len(warnings) != 0 || err != nil {
			t.Fatalf("warnings %v, error %v", warnings, err)
		}
		if out, err := exec.Command(ldconfig, "-r", root).CombinedOutput(); err != nil {
			t.Fatalf("ldconfig: %v\n%s", err, out)
		}
		checkCache(t, root, map[string]string{"libcuda.so.1": "/opt/driver/libcuda.so.1"})
		got, err := os.ReadFile(filepath.Join(root, configDir, configName))
		if string(got) != "/opt/driver\n" || err != nil {
			t.Errorf("configuration %q, %v, want only the directory that is not searched by default", got, err)
		}
	}
}

// newCompatRoot makes a container's root with the image's own user-mode driver of that version.
func newCompatRoot(t *testing.T, version, elf string) string {
	t.Helper()
	root := newRoot(t)
	a, err := archFor(goarch)
	if err != nil {
		t.Fatal(err)
	}
	dir := "usr/local/cuda-12.9/compat/"
	write(t, root, map[string]string{
		a.glibcLoader:                                  "loader",
		"drv/libcuda.so.570.1":                         "driver",
		"drv/libnvidia-ptxjitcompiler.so.570.1":        "driver",
		dir + "libcuda.so." + version:                  elf,
		dir + "libnvidia-ptxjitcompiler.so." + version: "compat",
		dir + "libc.so.6":                              "not part of a driver",
		dir + "libcuda-\n.so.6":                        "not a name",
	})
	for name, target := range map[string]string{
		"usr/local/cuda": "/etc/alternatives/cuda", "etc/alternatives/cuda": "/usr/local/cuda-12.9",
		dir + "libcuda.so.1": "libcuda.so." + version, dir + "libcuda.so": "libcuda.so.1",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// libraryWithNote compiles a library with a note in a section of that name, and returns the file's content.
func libraryWithNote(t *testing.T, section, owner, desc string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "library.so")
	quote := strings.NewReplacer(`"`, `\\\"`)
	testimage.Compile(t, file, `__asm__(".pushsection `+section+`, \"a\", %note\n.balign 4\n.long 2f-1f, 4f-3f, 1\n"
		"1: .asciz \"`+owner+`\"\n2: .balign 4\n3: .ascii \"`+quote.Replace(desc)+`\"\n4: .balign 4\n.popsection\n");`,
		"-shared", "-fPIC", "-nostdlib")
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestForwardCompatibility(t *testing.T) {
	const branches = `"CUDA Version":"12.9","Driver":[535,550,560,565,570,575],"Device":[1,2,7]`
	noted := libraryWithNote(t, ".note.cuda.fwd_compatibility", "NVIDIA Corporation", `{"Format":1,`+branches+`}`)
	format2 := libraryWithNote(t, ".note.cuda.fwd_compatibility", "NVIDIA Corporation", `{"Format":2,`+branches+`}`)
	notJSON := libraryWithNote(t, ".note.cuda.fwd_compatibility", "NVIDIA Corporation", "575")
	plain := libraryWithNote(t, ".note.gnu", "GNU", "")
	for name, tc := range map[string]struct {
		version, elf string
		driver       string
		setup        func(t *testing.T, root string)
		used         bool
		warning      string
	}{
		"newer, and the note admits the driver": {version: "575.57.08", elf: noted, driver: "570.1", used: true},
		"newer in the same branch":              {version: "570.2", elf: noted, driver: "570.1", used: true},
		"the note does not admit the driver":    {version: "575.57.08", elf: noted, driver: "545.1"},
		"the note has an unknown format":        {version: "575.57.08", elf: format2, driver: "570.1"},
		"the note is not JSON": {
			version: "575.57.08", elf: notJSON, driver: "570.1", warning: "libcuda.so.575.57.08 is not used",
		},
		"the same version":               {version: "570.1", elf: noted, driver: "570.1"},
		"older":                          {version: "565.9", elf: noted, driver: "570.1"},
		"older, though not as a decimal": {version: "570.9", elf: noted, driver: "570.10"},
		"no note, a newer branch":        {version: "575.57.08", elf: plain, driver: "570.1", used: true},
		"no note, the same branch":       {version: "570.2", elf: plain, driver: "570.1"},
		"not ELF": {
			version: "575.57.08", elf: strings.Repeat("x", 100), driver: "570.1", warning: "libcuda.so.575.57.08",
		},
		"empty": {
			version: "575.57.08", elf: "", driver: "570.1", warning: "not an ELF file",
		},
		"no driver version is known": {version: "575.57.08", elf: noted},
		"a file instead of the directory": {
			version: "575.57.08", elf: noted, driver: "570.1", warning: compatDir,
			setup: func(t *testing.T, root string) {
				if err := os.Remove(filepath.Join(root, "usr/local/cuda")); err != nil {
					t.Fatal(err)
				}
				write(t, root, map[string]string{compatDir: ""})
			},
		},
		"two versions": {
			version: "575.57.08", elf: noted, driver: "570.1", warning: "more than one",
			setup: func(t *testing.T, root string) {
				write(t, root, map[string]string{"usr/local/cuda-12.9/compat/libcuda.so.580.1": noted})
			},
		},
		"libcuda is a link": {
			version: "575.57.08", elf: noted, driver: "570.1",
			setup: func(t *testing.T, root string) {
				dir := filepath.Join(root, "usr/local/cuda-12.9/compat")
				if err := os.Rename(dir+"/libcuda.so.575.57.08", dir+"/elsewhere"); err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink("elsewhere", dir+"/libcuda.so.575.57.08"); err != nil {
					t.Fatal(err)
				}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := newCompatRoot(t, tc.version, tc.elf)
			if tc.setup != nil {
				tc.setup(t, root)
			}
			args := &hookargs.CreateContainer{DriverVersion: tc.driver, Libraries: []hookargs.Library{
				{SONAME: "libcuda.so.1", Path: "/drv/libcuda.so.570.1"},
				{SONAME: "libnvidia-ptxjitcompiler.so.1", Path: "/drv/libnvidia-ptxjitcompiler.so.570.1"},
			}}
			warnings, err := CreateContainer(args, &State{ID: "x", Root: root}, hostAt(t, t.TempDir()))
			if err != nil || (len(warnings) > 0) != (tc.warning != "") || len(warnings) > 0 &&
				!strings.Contains(warnings[0].Error(), tc.warning) {
				t.Fatalf("warnings %v, error %v, want a warning with %q", warnings, err, tc.warning)
			}
			want := map[string]string{
				"libcuda.so.1":                  "/drv/libcuda.so.570.1",
				"libnvidia-ptxjitcompiler.so.1": "/drv/libnvidia-ptxjitcompiler.so.570.1",
			}
			if tc.used {
				want["libcuda.so.1"] = compatDir + "/libcuda.so.1"
				want["libnvidia-ptxjitcompiler.so.1"] = compatDir + "/libnvidia-ptxjitcompiler.so." + tc.version
			}
			checkCache(t, root, want)
		})
	}
}

func checkCache(t *testing.T, root string, want map[string]string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, "etc/ld.so.cache"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := ldcache.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	flags, _ := ldcache.FlagsFor(goarch)
	for name, path := range want {
		if got, _ := c.Lookup(name, flags); got != path {
			t.Errorf("the loader finds %s at %q, want %q", name, got, path)
		}
	}
	for _, name := range []string{"libc.so.6", "libcuda-\n.so.6"} {
		if got, ok := c.Lookup(name, flags); ok {
			t.Errorf("the cache has %s", got)
		}
	}
}
