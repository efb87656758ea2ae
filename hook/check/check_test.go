package check

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/ldcache"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// container is a container's root that looks like one with a GPU: a simulated node, whose device nodes can be opened.
type testContainer struct {
	t    *testing.T
	node *sim.Node
}

func newContainer(t *testing.T) *testContainer {
	t.Helper()
	c := &testContainer{t, simtest.Node(t, "workstation")}
	for _, pattern := range []string{"dev/nvidia*", "dev/nvidia-caps/*"} {
		names, err := filepath.Glob(c.at(pattern))
		testenv.Must(t, err)
		for _, name := range names {
			if info, err := os.Lstat(name); err == nil && info.Mode().Type() == fs.ModeDevice|fs.ModeCharDevice {
				testenv.Must(t, os.Remove(name), unix.Mknod(name, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3)))) // like /dev/null
			}
		}
	}
	libraries, err := filepath.Glob(c.at(c.node.LibDir() + "/lib*.so.580.126.09"))
	testenv.Must(t, err)
	var mounts strings.Builder
	for i, file := range libraries {
		fmt.Fprintf(&mounts, "%d 1 8:1 / %s ro - ext4 /dev/sda1 rw\n", i+2, strings.TrimPrefix(file, c.node.Root()))
	}
	c.write("proc/self/mountinfo", "1 0 0:1 / / rw - overlay overlay rw\n"+mounts.String())
	return c
}

func (c *testContainer) at(name string) string { return filepath.Join(c.node.Root(), name) }

func (c *testContainer) write(name, text string) {
	c.t.Helper()
	testenv.Must(c.t, os.MkdirAll(filepath.Dir(c.at(name)), 0o755), os.WriteFile(c.at(name), []byte(text), 0o644))
}

func (c *testContainer) remove(patterns ...string) {
	c.t.Helper()
	for _, pattern := range patterns {
		names, err := filepath.Glob(c.at(pattern))
		testenv.Must(c.t, err)
		for _, name := range names {
			testenv.Must(c.t, os.RemoveAll(name))
		}
	}
}

// moveLibraries moves the two needed libraries into a directory that is not one of the loader's, and has the loader's
// cache name a directory.
func (c *testContainer) moveLibraries(dir, cached string) {
	c.t.Helper()
	var cache ldcache.Cache
	flags, _ := ldcache.FlagsFor(runtime.GOARCH)
	mounts := ""
	for _, name := range needed {
		file := strings.TrimSuffix(name, ".1") + ".580.126.09"
		data, err := os.ReadFile(c.at(c.node.LibDir() + "/" + file))
		testenv.Must(c.t, err)
		c.write(dir+"/"+file, string(data))
		cache.Prepend(ldcache.Entry{Name: name, Path: cached + "/" + file, Flags: flags})
		mounts += "2 1 8:1 / " + dir + "/" + file + " ro - ext4 /dev/sda1 rw\n"
	}
	c.remove(c.node.LibDir() + "/*")
	c.write("proc/self/mountinfo", mounts)
	c.write("etc/ld.so.cache", string(cache.Marshal()))
}

const descriptor = `{"version": 1, "uuid": %q, "resource": "nvidia.com/gpu", "index": "0"}`

func TestRead(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*testContainer)
		want   []string // parts of the problems, in their order
	}{
		"a container that has what it was given": {func(c *testContainer) {
			c.write("run/gpu/devices/GPU-a.json", fmt.Sprintf(descriptor, "GPU-a"))
		}, nil},
		"a container without a GPU": {func(c *testContainer) {
			c.remove("dev/*", "proc/self", c.node.LibDir()+"/*")
		}, []string{"it was given no GPU"}},
		"libraries without device nodes": {func(c *testContainer) {
			c.remove("dev/*")
		}, []string{"was given the driver's libraries"}},
		"a descriptor without device nodes": {func(c *testContainer) {
			c.remove("dev/*", "proc/self", c.node.LibDir()+"/*")
			c.write("run/gpu/devices/GPU-a.json", fmt.Sprintf(descriptor, "GPU-a"))
		}, []string{"was given 1 device (GPU-a)"}},
		"fewer GPUs than descriptors": {func(c *testContainer) {
			c.write("run/gpu/devices/GPU-a.json", fmt.Sprintf(descriptor, "GPU-a"))
			c.write("run/gpu/devices/GPU-b.json", fmt.Sprintf(descriptor, "GPU-b"))
		}, []string{"was given 2 GPUs, and has the device nodes of 1"}},
		"two MIG devices of one GPU": {func(c *testContainer) {
			for _, uuid := range []string{"MIG-a", "MIG-b"} {
				c.write("run/gpu/devices/"+uuid+".json", fmt.Sprintf(`{"uuid": %q, "parent": "GPU-a"}`, uuid))
			}
		}, nil},
		"device nodes without libraries": {func(c *testContainer) {
			c.remove("proc/self", c.node.LibDir()+"/*")
		}, []string{"the device nodes are here without the driver's libraries"}},
		"no node for unified memory": {func(c *testContainer) {
			c.remove("dev/nvidia-uvm")
		}, []string{"/dev/nvidia-uvm: the device node is missing"}},
		"a device node that nothing serves": {func(c *testContainer) {
			c.remove("dev/nvidia0")
			testenv.Must(c.t, unix.Mknod(c.at("dev/nvidia0"), unix.S_IFCHR|0o666, int(unix.Mkdev(195, 0))))
		}, []string{"/dev/nvidia0: no driver serves it"}},
		"a file in place of a device node": {func(c *testContainer) {
			c.remove("dev/nvidia0")
			c.write("dev/nvidia0", "")
		}, []string{"/dev/nvidia0: it is not a character device"}},
		"no hook has run": {func(c *testContainer) {
			c.remove("etc/ld.so.cache", c.node.LibDir()+"/lib*.so.?")
		}, []string{"the loader does not find"}},
		"libraries that only the cache has": {func(c *testContainer) {
			c.moveLibraries("/opt/gpu", "/opt/gpu")
		}, nil},
		"a cache from before the container was given its libraries": {func(c *testContainer) {
			c.moveLibraries("/opt/gpu", "/opt/old")
		}, []string{"the loader does not find 2 of 2 libraries, such as libcuda.so.1"}},
		"a damaged cache, and libraries in the default directories": {func(c *testContainer) {
			c.write("etc/ld.so.cache", "glibc-ld.so.cache1.1")
		}, nil},
		"an image's own library": {func(c *testContainer) {
			c.write("opt/libcuda.so.1", "")
			c.remove("etc/ld.so.cache", c.node.LibDir()+"/libcuda.so.1")
			testenv.Must(c.t, os.Symlink("/opt/libcuda.so.1", c.at(c.node.LibDir()+"/libcuda.so.1")))
		}, []string{"in place of the driver's"}},
		"a library of another version than the driver": {func(c *testContainer) {
			testenv.Must(c.t, c.node.SetKernelVersion("590.44.01"))
		}, []string{"libcuda has version 580.126.09, and the kernel's driver 590.44.01"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			container := newContainer(t)
			c.change(container)
			r, err := Read(container.node.Root())
			testenv.Must(t, err)
			if len(r.Problems) != len(c.want) {
				t.Fatalf("want %d problems, got %+v", len(c.want), r.Problems)
			}
			for i, p := range r.Problems {
				if text := p.Subject + ": " + p.Problem; !strings.Contains(text, c.want[i]) || p.Fix == "" {
					t.Errorf("want %q, got %+v", c.want[i], p)
				}
			}
		})
	}
}

func TestWhyNot(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"opened":                {nil, ""},
		"by the device cgroup":  {unix.EPERM, "device cgroup"},
		"by permissions":        {unix.EACCES, "permissions, or SELinux"},
		"no driver":             {unix.ENXIO, "the kernel module is not loaded, or the GPU is gone (ENXIO)"},
		"a GPU that is broken":  {unix.EIO, "cannot start the GPU"},
		"a driver that hangs":   {errHangs, "does not end"},
		"a path with its error": {&fs.PathError{Op: "open", Path: "/dev/nvidia0", Err: unix.EPERM}, "(EPERM)"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := whyNot(c.err); !strings.Contains(got, c.want) || (c.want == "") != (got == "") {
				t.Errorf("want %q, got %q", c.want, got)
			}
		})
	}
}
