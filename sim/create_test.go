package sim

import (
	"debug/elf"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/ldcache"
	"gpu-cdi-plugin/test/lib/testenv"
)

// makeNode makes a node; without PlainNodes the test needs root.
func makeNode(t *testing.T, machine string, opts Options) *Node {
	t.Helper()
	testenv.Command(t, "cc")
	if !opts.PlainNodes {
		testenv.Root(t)
	}
	n, err := Create(t.Context(), filepath.Join(t.TempDir(), "node"), load(t, machine), opts)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// listGPUs returns the lines of nvidia-smi -L on a node.
func listGPUs(t *testing.T, n *Node) []string {
	t.Helper()
	cmd := exec.Command(n.SMI(), "-L")
	cmd.Env = []string{"LD_LIBRARY_PATH=" + filepath.Dir(n.Library())}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("nvidia-smi -L: %v: %s", err, out)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// expected returns what the lines of nvidia-smi -L must contain by the snapshot: name and UUID of each device.
func expected(t *testing.T, n *Node) []string {
	t.Helper()
	s, err := n.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, d := range s.Devices {
		list = append(list, d.Name, d.UUID)
		for _, m := range d.MIG {
			list = append(list, m.Profile, m.UUID)
		}
	}
	return list
}

// checkList compares nvidia-smi -L with the snapshot.
func checkList(t *testing.T, n *Node) {
	t.Helper()
	lines, want := listGPUs(t, n), expected(t, n)
	if len(lines)*2 != len(want) {
		t.Fatalf("nvidia-smi lists %d devices, want %d:\n%s", len(lines), len(want)/2, strings.Join(lines, "\n"))
	}
	for i, line := range lines {
		if !strings.Contains(line, want[2*i]) || !strings.Contains(line, want[2*i+1]) {
			t.Errorf("line %d is %q, want %s", i, line, want[2*i:2*i+2])
		}
	}
}

func TestLibrarySeesTheMachine(t *testing.T) {
	for _, machine := range append(Machines(), "pcie-fabric-128") {
		t.Run(machine, func(t *testing.T) {
			t.Parallel()
			checkList(t, makeNode(t, machine, Options{PlainNodes: true}))
		})
	}
}

// tree lists a node's files: the type, and a link's target or a device node's numbers and owner.
func tree(t *testing.T, root string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		text := info.Mode().String()
		if st := info.Sys().(*syscall.Stat_t); info.Mode()&fs.ModeDevice != 0 {
			text += " " + strconv.Itoa(int(unix.Major(st.Rdev))) + ":" + strconv.Itoa(int(unix.Minor(st.Rdev))) +
				" " + strconv.Itoa(int(st.Uid)) + ":" + strconv.Itoa(int(st.Gid))
		}
		if info.Mode()&fs.ModeSymlink != 0 {
			target, _ := os.Readlink(path)
			text += " -> " + target
		}
		files[rel] = text
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestDeviceNodes(t *testing.T) {
	n := makeNode(t, "mig-h100", Options{})
	got := tree(t, n.Root())
	for path, want := range map[string]string{
		"dev/nvidia0":                             "Dcrw-rw-rw- 195:0 0:0",
		"dev/nvidia7":                             "Dcrw-rw-rw- 195:7 0:0",
		"dev/nvidiactl":                           "Dcrw-rw-rw- 195:255 0:0",
		"dev/nvidia-modeset":                      "Dcrw-rw-rw- 195:254 0:0",
		"dev/nvidia-uvm":                          "Dcrw-rw-rw- 511:0 0:0",
		"dev/nvidia-uvm-tools":                    "Dcrw-rw-rw- 511:1 0:0",
		"dev/nvidia-nvswitch3":                    "Dcrw-rw-rw- 508:3 0:0",
		"dev/nvidia-nvswitchctl":                  "Dcrw-rw-rw- 508:255 0:0",
		"dev/nvidia-caps/nvidia-cap1":             "Dcr-------- 510:1 0:0",
		"dev/nvidia-caps/nvidia-cap2":             "Dcr--r--r-- 510:2 0:0",
		"dev/nvidia-caps/nvidia-cap282":           "Dcr--r--r-- 510:282 0:0", // gpu2/gi1/access: index 1 has minor 2
		"dev/dri/card1":                           "Dcrw-rw---- 226:1 0:44",
		"dev/dri/renderD128":                      "Dcrw-rw---- 226:128 0:106",
		"dev/dri/by-path/pci-0000:43:00.0-card":   "Lrwxrwxrwx -> ../card2",
		"dev/dri/by-path/pci-0000:43:00.0-render": "Lrwxrwxrwx -> ../renderD129",
		"run/nvidia-persistenced/socket":          "Srw-rw-rw-",
		"run/nvidia-fabricmanager/socket":         "Srw-rw-rw-",
		"sys/bus/pci/devices/0000:1b:00.0": "Lrwxrwxrwx -> " +
			"../../../../sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:1b:00.0",
		"lib":                                      "Lrwxrwxrwx -> usr/lib",
		"usr/lib/x86_64-linux-gnu/libcuda.so":      "Lrwxrwxrwx -> libcuda.so.1",
		"usr/lib/x86_64-linux-gnu/libcuda.so.1":    "Lrwxrwxrwx -> libcuda.so.580.126.09",
		"usr/lib/x86_64-linux-gnu/libnvidia-ml.so": "Lrwxrwxrwx -> libnvidia-ml.so.1",
	} {
		path = strings.Replace(path, "x86_64", libArch(runtime.GOARCH), 1)
		if got[path] != want {
			t.Errorf("%s is %q, want %q", path, got[path], want)
		}
	}
}

func TestExtras(t *testing.T) {
	plain := tree(t, makeNode(t, "dgx-h100", Options{}).Root())
	all := tree(t, makeNode(t, "dgx-h100", Options{Extras: Extras()}).Root())
	for path, want := range map[string]string{
		"dev/nvidia-caps-imex-channels/channel0": "Dcrw-rw-rw- 509:0 0:0",
		"dev/nvidia-caps-imex-channels/channel1": "Dcrw-rw-rw- 509:1 0:0",
		"dev/nvidia-fs0":                         "Dcrw-rw-rw- 506:0 0:0",
		"dev/nvidia-fs15":                        "Dcrw-rw-rw- 506:15 0:0",
		"dev/gdrdrv":                             "Dcrw-rw-rw- 505:0 0:0",
		"dev/infiniband/uverbs0":                 "Dcrw-rw-rw- 231:192 0:0",
		"dev/infiniband/uverbs1":                 "Dcrw-rw-rw- 231:193 0:0",
		"dev/infiniband/rdma_cm":                 "Dcrw-rw-rw- 10:58 0:0",
		"etc/cufile.json":                        "-rw-r--r--",
	} {
		if got, ok := plain[path]; ok {
			t.Errorf("%s is %s without extras", path, got)
		}
		if got := all[path]; got != want {
			t.Errorf("%s is %q, want %q", path, got, want)
		}
	}
	_, err := Create(t.Context(), filepath.Join(t.TempDir(), "node"), must(LoadMachine("dgx-h100")),
		Options{Extras: []string{"gds", "rdma"}})
	if err == nil || err.Error() != `unknown extra "rdma"; known are gdrcopy, gds, imex, mofed` || !isInvalid(err) {
		t.Errorf("error %v", err)
	}
}

func TestSysfsAndProc(t *testing.T) {
	n := makeNode(t, "pcie-quad", Options{PlainNodes: true})
	for path, want := range map[string]string{
		"sys/bus/pci/devices/0000:a8:00.0/vendor":                  "0x10de\n",
		"sys/bus/pci/devices/0000:a8:00.0/device":                  "0x26b9\n",
		"sys/bus/pci/devices/0000:a8:00.0/subsystem_device":        "0x1851\n",
		"sys/bus/pci/devices/0000:a8:00.0/class":                   "0x030200\n",
		"sys/bus/pci/devices/0000:a8:00.0/numa_node":               "1\n",
		"sys/bus/pci/devices/0000:a8:00.0/local_cpulist":           "32-63,96-127\n",
		"sys/bus/pci/devices/0000:a8:00.0/drm/card3/dev":           "226:3\n",
		"sys/bus/pci/devices/0000:a8:00.0/drm/renderD130/dev":      "226:130\n",
		"sys/bus/pci/drivers/nvidia/0000:a8:00.0/driver/../uevent": "",
		"sys/class/drm/card3/dev":                                  "226:3\n",
		"sys/devices/system/node/node1/cpulist":                    "32-63,96-127\n",
		"sys/module/nvidia/version":                                "580.126.09\n",
	} {
		if want == "" {
			continue
		}
		got, err := os.ReadFile(filepath.Join(n.Root(), path))
		if err != nil || string(got) != want {
			t.Errorf("%s is %q, error %v, want %q", path, got, err, want)
		}
	}
	for path, part := range map[string]string{
		"proc/driver/nvidia/version":                                 "  580.126.09  ",
		"proc/driver/nvidia/params":                                  "\nModifyDeviceFiles: 1\n",
		"proc/driver/nvidia/gpus/0000:a8:00.0/information":           "Device Minor: \t 0\n",
		"proc/devices":                                               "\n195 nvidia\n",
		"proc/driver/nvidia-caps/mig-minors":                         "gpu0/gi1/ci0/access 13\n",
		"proc/driver/nvidia/capabilities/mig/monitor":                "DeviceFileMinor: 2\n",
		"usr/share/nvidia/nvidia-application-profiles-580.126.09-rc": "rules",
		"etc/OpenCL/vendors/nvidia.icd":                              "libnvidia-opencl.so.1",
	} {
		got, err := os.ReadFile(filepath.Join(n.Root(), path))
		if err != nil || !strings.Contains(string(got), part) {
			t.Errorf("%s has no %q, error %v", path, part, err)
		}
	}
}

// TestLibrariesAreFoundBySONAME checks that every library has a SONAME, and a file or link of that name.
func TestLibrariesAreFoundBySONAME(t *testing.T) {
	n := makeNode(t, "dgx-h100", Options{PlainNodes: true})
	dir := filepath.Dir(n.Library())
	files, err := filepath.Glob(filepath.Join(dir, "lib*.so*"))
	if err != nil || len(files) < 60 {
		t.Fatalf("%d files, error %v", len(files), err)
	}
	sonames := map[string]bool{}
	for _, file := range files {
		f, err := elf.Open(file)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		names, err := f.DynString(elf.DT_SONAME)
		if err != nil || len(names) != 1 {
			t.Fatalf("%s: SONAMEs %q, error %v", file, names, err)
		}
		sonames[names[0]] = true
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	for soname := range sonames {
		if _, err := os.Stat(filepath.Join(dir, soname)); err != nil {
			t.Errorf("no file has the SONAME %s: %v", soname, err)
		}
	}
	for _, want := range []string{
		"libnvidia-ml.so.1", "libcuda.so.1", "libGLX_nvidia.so.0", "libEGL_nvidia.so.0", "libGLESv2_nvidia.so.2",
		"libnvidia-eglcore.so.580.126.09", "libnvidia-egl-gbm.so.1", "libnvidia-nvvm.so.4", "libnvidia-nscq.so.2",
	} {
		if !sonames[want] {
			t.Errorf("no library has the SONAME %s", want)
		}
	}
}

func TestLoaderCache(t *testing.T) {
	for libDir, want := range map[string]string{
		"usr/lib/x86_64-linux-gnu": "/lib/x86_64-linux-gnu/libcuda.so.1", // where ldconfig finds it if /usr is merged
		"usr/lib64":                "/lib64/libcuda.so.1",
		"usr/local/nvidia/lib64":   "",
	} {
		n := makeNode(t, "workstation", Options{PlainNodes: true, LibDir: libDir})
		data, err := os.ReadFile(filepath.Join(n.Root(), "etc/ld.so.cache"))
		if want == "" {
			if !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: there is a loader cache, error %v", libDir, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		c, err := ldcache.Parse(data)
		if err != nil {
			t.Fatal(err)
		}
		flags, _ := ldcache.FlagsFor(runtime.GOARCH)
		if got, _ := c.Lookup("libcuda.so.1", flags); got != want {
			t.Errorf("%s: libcuda.so.1 is at %q, want %q", libDir, got, want)
		}
		for _, e := range c.Entries {
			if _, err := os.Stat(filepath.Join(n.Root(), e.Path)); err != nil {
				t.Errorf("%s: %v", libDir, err)
			}
		}
	}
}

func TestLibraryDirectories(t *testing.T) {
	n := makeNode(t, "workstation", Options{PlainNodes: true, LibDir: "/usr/local/nvidia/lib64/", Driver: "535.230.02"})
	if want := filepath.Join(n.Root(), "usr/local/nvidia/bin/nvidia-smi"); n.SMI() != want {
		t.Errorf("nvidia-smi is %s, want %s", n.SMI(), want)
	}
	checkList(t, n)
	if _, err := os.Stat(filepath.Join(n.Root(), "usr/lib/firmware/nvidia/535.230.02/gsp_ga10x.bin")); err != nil {
		t.Error(err)
	}
}

func TestCreateErrors(t *testing.T) {
	testenv.Command(t, "cc")
	m := load(t, "workstation")
	foreign := t.TempDir()
	if err := os.WriteFile(filepath.Join(foreign, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		dir  string
		opts Options
		want func(error) bool
	}{
		"a directory that is not a node": {foreign, Options{Force: true}, is(ErrNotEmpty)},
		"a file":                         {filepath.Join(foreign, "file"), Options{}, is(unix.ENOTDIR)},
		"a malformed version":            {"", Options{Driver: "580"}, isInvalid},
		"a library directory above":      {"", Options{LibDir: "usr/../../lib"}, isInvalid},
		"a library directory in /dev":    {"", Options{LibDir: "dev/lib"}, isInvalid},
		"a library directory with space": {"", Options{LibDir: "usr/my lib"}, isInvalid},
		"no compiler":                    {"", Options{Compiler: "no-such-compiler"}, is(ErrNoCompiler)},
		"a compiler that fails": {
			"",
			Options{Compiler: "false"},
			func(err error) bool { _, failed := errors.AsType[*exec.ExitError](err); return failed },
		},
	} {
		t.Run(name, func(t *testing.T) {
			parent := t.TempDir()
			if c.dir == "" {
				c.dir = filepath.Join(parent, "node")
			}
			c.opts.PlainNodes = true
			n, err := Create(t.Context(), c.dir, m, c.opts)
			if n != nil || !c.want(err) {
				t.Errorf("got %v and error %v", n, err)
			}
			if left, _ := os.ReadDir(parent); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func is(target error) func(error) bool {
	return func(err error) bool { return errors.Is(err, target) }
}

func isInvalid(err error) bool {
	_, ok := errors.AsType[*InvalidError](err)
	return ok
}

func TestCreateWithoutCAP_MKNOD(t *testing.T) {
	testenv.Command(t, "cc")
	m := load(t, "workstation")
	parent := t.TempDir()
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread without CAP_MKNOD ends with the goroutine
		if err := dropMknod(); err != nil {
			result <- err
			return
		}
		_, err := Create(t.Context(), filepath.Join(parent, "node"), m, Options{})
		result <- err
	}()
	err := <-result
	if !errors.Is(err, unix.EPERM) || !errors.Is(err, ErrNoDeviceNodes) {
		t.Errorf("the error is %v", err)
	}
	if left, _ := os.ReadDir(parent); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// dropMknod takes CAP_MKNOD from the calling thread.
func dropMknod() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	data[0].Effective &^= 1 << unix.CAP_MKNOD
	return unix.Capset(&header, &data[0])
}

func TestUpgradeInPlace(t *testing.T) {
	n := makeNode(t, "workstation", Options{PlainNodes: true})
	if err := n.Lose(0); err != nil {
		t.Fatal(err)
	}
	before := tree(t, n.Root())
	if _, err := Create(t.Context(), n.Root(), n.Machine(), Options{PlainNodes: true}); err == nil {
		t.Error("the node was replaced without Force")
	}
	if diff := cmp.Diff(before, tree(t, n.Root())); diff != "" {
		t.Errorf("the node has changed:\n%s", diff)
	}
	n, err := Create(t.Context(), n.Root(), n.Machine(), Options{PlainNodes: true, Driver: "590.44.01", Force: true})
	if err != nil {
		t.Fatal(err)
	}
	for path := range tree(t, n.Root()) {
		if strings.Contains(path, DefaultDriver) {
			t.Errorf("%s is of the old driver", path)
		}
	}
	if faults, err := n.Faults(); err != nil || len(faults) > 0 {
		t.Errorf("faults %v, error %v", faults, err)
	}
	if left, _ := os.ReadDir(filepath.Dir(n.Root())); len(left) != 1 {
		t.Errorf("files left beside the node: %v", left)
	}
	checkList(t, n)
}

func TestOpenErrors(t *testing.T) {
	n := makeNode(t, "workstation", Options{PlainNodes: true})
	for name, damage := range map[string]struct{ file, text string }{
		"a damaged machine file":       {machineFilePath, "gpus: 7"},
		"a damaged node file":          {nodeFile, "node machine"},
		"a node file without a driver": {nodeFile, "node machine=workstation libdir=usr/lib64 bindir=usr/bin"},
	} {
		path := filepath.Join(n.Root(), damage.file)
		whole := must(os.ReadFile(path))
		if err := os.WriteFile(path, []byte(damage.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := Open(n.Root()); err == nil || strings.Contains(err.Error(), "not a simulated node") {
			t.Errorf("%s: got %v, error %v", name, got, err)
		}
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(t.TempDir()); err == nil || !strings.Contains(err.Error(), "is not a simulated node") {
		t.Errorf("an empty directory: error %v", err)
	}
}
