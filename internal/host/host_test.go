package host

import (
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
)

func TestPaths(t *testing.T) {
	wd, err := os.Getwd()
	testenv.Must(t, err)
	for name, c := range map[string]struct {
		root, driver, dev string
		want              []string // Proc, Sys, Dev, Driver
	}{
		"the machine itself": {
			"", "", "",
			[]string{"/proc/driver", "/sys/bus/pci", "/dev/nvidia0", "/usr/bin/nvidia-smi"},
		},
		"a node in a directory": {
			"/n", "", "",
			[]string{"/n/proc/driver", "/n/sys/bus/pci", "/n/dev/nvidia0", "/n/usr/bin/nvidia-smi"},
		},
		"a driver container": {
			"/", "/run/nvidia/driver", "",
			[]string{"/proc/driver", "/sys/bus/pci", "/dev/nvidia0", "/run/nvidia/driver/usr/bin/nvidia-smi"},
		},
		"a driver container with its own nodes": {
			"", "/run/nvidia/driver", "/run/nvidia/driver",
			[]string{
				"/proc/driver", "/sys/bus/pci",
				"/run/nvidia/driver/dev/nvidia0", "/run/nvidia/driver/usr/bin/nvidia-smi",
			},
		},
		"each in another directory": {
			"/r", "/d/", "/v/.",
			[]string{"/r/proc/driver", "/r/sys/bus/pci", "/v/dev/nvidia0", "/d/usr/bin/nvidia-smi"},
		},
		"relative": {
			"node", "", "",
			[]string{
				wd + "/node/proc/driver", wd + "/node/sys/bus/pci", wd + "/node/dev/nvidia0",
				wd + "/node/usr/bin/nvidia-smi",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			h, err := New(c.root, c.driver, c.dev)
			testenv.Must(t, err)
			got := []string{h.Proc("driver"), h.Sys("bus", "pci"), h.Dev("nvidia0"), h.Driver("usr/bin", "nvidia-smi")}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("paths (-want +got):\n%s", diff)
			}
			for _, root := range []string{h.Root(), h.DriverRoot(), h.Dev()} {
				if !filepath.IsAbs(root) || filepath.Clean(root) != root {
					t.Errorf("root %q is not a clean absolute path", root)
				}
			}
		})
	}
}

func TestWithLibrary(t *testing.T) {
	for library, want := range map[string]string{
		"/usr/lib64/libnvidia-ml.so.1":                             "/",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1":              "/",
		"/n/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1":            "/n",
		"/n/usr/lib/aarch64-linux-gnu/nvidia/current/libcuda.so.1": "/n",
		"/n/usr/lib64/libnvidia-ml.so.1":                           "/n", // not /n/usr, which has lib64 too
		"/run/nvidia/driver/usr/local/nvidia/lib64/libcuda.so.1":   "/run/nvidia/driver",
		"/home/me/mock/libnvidia-ml.so.1":                          "/",
		"/libnvidia-ml.so.1":                                       "/",
	} {
		h, err := New("", "", "")
		testenv.Must(t, err)
		h = h.WithLibrary(library)
		if h.DriverRoot() != want || h.Libraries() != filepath.Dir(library) || h.Root() != "/" || h.Dev() != "/dev" {
			t.Errorf("the driver of %s is under %s with libraries in %s; want %s",
				library, h.DriverRoot(), h.Libraries(), want)
		}
	}
}
