package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestImages gives one GPU to a container of each kind of image with a C library. The loader finds the driver only
// through its cache.
func TestImages(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "pcie-quad", simtest.LibDir("usr/local/nvidia/lib64"))
	want := requests(t, n)["a UUID"]
	for _, e := range shared.Engines() {
		for name, c := range map[string]engine.Container{
			"a loader cache":             {Image: image.Glibc},
			"no loader cache":            {Image: image.NoCache},
			"libraries in /usr/lib64":    {Image: image.Lib64},
			"a cache of a thousand more": {Image: image.Many},
			"a root that is read-only":   {Image: image.Glibc, ReadOnly: true},
			"no shell and no /lib link":  {Image: image.Distroless},
		} {
			t.Run(name+"/"+e.String(), func(t *testing.T) {
				t.Parallel()
				c.Args = smiIn(c.Image)
				checkList(t, run(t, e, n, c, want.names...), want.want)
			})
		}
	}
}

// TestImagesWithoutTheHook gives a GPU to containers by a spec that has no hook. Their loaders find the driver in the
// directories that they search without a cache, also where the image has links in the libraries' place.
func TestImagesWithoutTheHook(t *testing.T) {
	t.Parallel()
	kinds := []image.Kind{image.Glibc, image.NoCache, image.Many, image.Lib64, image.Distroless}
	for layout, libraries := range map[string]string{
		"Debian": "usr/lib/x86_64-linux-gnu", "Fedora": "usr/lib64", "no distribution": "usr/local/nvidia/lib64",
	} {
		n := shared.Node(t, "pcie-quad", simtest.LibDir(libraries))
		n.Plugin(t, 0, "--no-hook", "cdi", "generate", "--file", n.Spec())
		want := requests(t, n)["a UUID"]
		for i, kind := range kinds {
			e := shared.Engines()[i]
			t.Run(fmt.Sprintf("the driver's directories of %s/%s/%s", layout, kind, e), func(t *testing.T) {
				t.Parallel()
				checkList(t, run(t, e, n, engine.Container{Image: kind, Args: smiIn(kind)}, want.names...), want.want)
			})
		}
	}
}

// TestMuslFindsTheLibraries has musl's loader load libraries of the driver. The hook adds their directories to its
// path; without the hook it finds them only by LD_LIBRARY_PATH.
func TestMuslFindsTheLibraries(t *testing.T) {
	t.Parallel()
	testenv.Command(t, "musl-gcc")
	with, without := shared.Node(t, "pcie-quad"), shared.Node(t, "pcie-quad")
	without.Plugin(t, 0, "--no-hook", "cdi", "generate", "--file", without.Spec())
	for name, c := range map[string]struct {
		node *suite.Node
		env  []string
		code int
		want string
	}{
		"with the hook": {
			with, nil, 0, "/usr/lib/x86_64-linux-gnu/libcuda.so.1\n/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1\n",
		},
		"without the hook": {without, nil, 1, "Error loading shared library libcuda.so.1: No such file or directory\n"},
		"LD_LIBRARY_PATH without the hook": {
			without, []string{"LD_LIBRARY_PATH=/usr/lib64"}, 0, "/usr/lib64/libcuda.so.1\n/usr/lib64/libnvidia-ml.so.1\n",
		},
	} {
		for _, e := range shared.Engines() {
			t.Run(name+"/"+e.String(), func(t *testing.T) {
				t.Parallel()
				args := []string{image.Loader, "libcuda.so.1", "libnvidia-ml.so.1"}
				res := run(t, e, c.node, engine.Container{Image: image.Musl, Args: args, Env: c.env}, "0")
				if res.Code != c.code || !strings.HasPrefix(res.Stdout, c.want) {
					t.Errorf("want %q and exit status %d, got %v", c.want, c.code, res)
				}
			})
		}
	}
}

// TestImagesNeedTheHook checks that in the tests above the hook matters: without it the loader does not find the
// driver.
func TestImagesNeedTheHook(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "pcie-quad", simtest.LibDir("usr/local/nvidia/lib64"))
	for _, e := range shared.Runtimes() {
		t.Run(e.String(), func(t *testing.T) {
			t.Parallel()
			c := engine.Container{Args: smi(), CDIDir: n.CDIDir, Devices: names("all")}
			bundle := e.Bundle(t, shared.Images.Copy(t, image.Glibc), c)
			testenv.Must(t, bundle.Edit(func(s *specs.Spec) error { s.Hooks = nil; return nil }))
			res := e.Start(t, bundle)
			if res.Code == 0 || !strings.Contains(res.Stdout+res.Stderr, "libnvidia-ml.so") {
				t.Errorf("want an error about libnvidia-ml.so, got %v", res)
			}
		})
	}
}

// TestCache checks the loader cache of a container with the C library's own ldconfig, and runs a program whose library
// only the image's own cache entries find.
func TestCache(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "dgx-h100", simtest.LibDir("usr/lib64"))
	for _, e := range shared.Engines() {
		for _, kind := range []image.Kind{image.Glibc, image.Many} {
			t.Run(fmt.Sprintf("%s/%s", kind, e), func(t *testing.T) {
				t.Parallel()
				c := engine.Container{Image: kind, Args: []string{"sh", "-c", image.Extra + " && ldconfig -p"}}
				res := run(t, e, n, c, "0")
				for _, want := range []string{
					image.ExtraOutput,
					"libcuda.so.1 (libc6,x86-64) => /usr/lib64/libcuda.so." + n.Driver(),
					"libnvidia-ml.so.1 (libc6,x86-64) => /usr/lib64/libnvidia-ml.so." + n.Driver(),
					"libextra.so.1 (libc6,x86-64) => /opt/extra/lib/libextra.so.1",
				} {
					if res.Code != 0 || !strings.Contains(res.Stdout, want) {
						t.Errorf("want %q from %q, got %v", want, c.Args, res)
					}
				}
			})
		}
	}
}

// TestNodesOnly gives GPUs to a container without a C library. It starts, and has only the device nodes of its GPUs.
func TestNodesOnly(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "dgx-h100")
	for _, e := range shared.Engines() {
		for _, kind := range []image.Kind{image.Static, image.Musl} {
			t.Run(fmt.Sprintf("%s/%s", kind, e), func(t *testing.T) {
				t.Parallel()
				script := `cd /dev && ls -d nvidia[0-9]* && (: <>nvidia6) 2>&1`
				res := run(t, e, n, engine.Container{Image: kind, Args: []string{"sh", "-c", script}}, "2", "6")
				if !strings.HasPrefix(res.Stdout, "nvidia2\nnvidia6\n") || !strings.Contains(res.Stdout, permitted) {
					t.Errorf("want the device nodes nvidia2 and nvidia6, and access to them, got %v", res)
				}
			})
		}
	}
}
