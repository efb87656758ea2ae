package engine

import (
	"log"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

var images *Images

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "engine-test-")
	if err != nil {
		log.Print(err)
		return 1
	}
	defer os.RemoveAll(dir)
	images = NewImages(dir)
	code := m.Run()
	if err := images.Close(); err != nil {
		log.Print(err)
		return 1
	}
	return code
}

// inject injects devices with the CDI library, so that these tests do not depend on the product.
func inject(t testing.TB, bundle, cdiDir string, names []string) {
	t.Helper()
	cache, err := cdi.NewCache(cdi.WithSpecDirs(cdiDir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	err = (&image.Bundle{Dir: bundle}).Edit(func(s *specs.Spec) error {
		_, err := cache.InjectDevices(s, names...)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func engines() []Engine {
	var all []Engine
	for _, runtime := range []string{"runc", "crun"} {
		all = append(all, bare(runtime, V1), &Podman{Runtime: runtime, Cgroup: V1, Images: images})
	}
	return append(all, bare("runc", V2), &Podman{Runtime: "runc", Cgroup: V2, Images: images})
}

func bare(runtime string, c Cgroup) *Bare {
	return &Bare{Runtime: runtime, Cgroup: c, Images: images, Inject: inject}
}

// TestEngines checks the engines for the end-to-end tests: they run the images, and give access to the devices of a CDI
// spec alone.
func TestEngines(t *testing.T) {
	testenv.Root(t)
	specs := deviceSpec(t)
	for _, e := range engines() {
		for name, c := range map[string]struct {
			Container
			want []string
		}{
			"a dynamic program": {
				Container{Image: image.Glibc, Args: []string{image.Extra}},
				[]string{image.ExtraOutput},
			},
			"an image without a cache": {Container{
				Image: image.NoCache,
				Args:  []string{"sh", "-c", "cat /etc/ld.so.cache"},
			}, []string{"No such file"}},
			"a device of the request": {
				device("test.com/null=given", "echo yes >/dev/given && echo written"),
				[]string{"written"},
			},
			"a device without a driver": {
				device("test.com/null=driverless", ": <>/dev/driverless"),
				[]string{"No such device or address"},
			},
			"a device not in the request": {
				device("test.com/null=given", "mknod /dev/own c 195 7 && : <>/dev/own"),
				[]string{"Operation not permitted"},
			},
			"a read-only root": {
				Container{Image: image.Static, ReadOnly: true, Args: []string{"sh", "-c", ": >/usr/file"}},
				[]string{"Read-only file system"},
			},
		} {
			t.Run(e.String()+"/"+name, func(t *testing.T) {
				t.Parallel()
				c.CDIDir = specs
				res := e.Run(t, c.Container)
				for _, want := range c.want {
					if !strings.Contains(res.Stdout+res.Stderr, want) {
						t.Errorf("want %q, got %v", want, res)
					}
				}
			})
		}
	}
}

func device(name, script string) Container {
	return Container{Image: image.Static, Devices: []string{name}, Mknod: true, Args: []string{"sh", "-c", script}}
}

// deviceSpec writes a spec with the null device under another name, and a device without a driver.
func deviceSpec(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, dev := range map[string]uint64{"given": unix.Mkdev(1, 3), "driverless": unix.Mkdev(195, 6)} {
		path := filepath.Join(dir, name)
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(dev)); err != nil {
			t.Fatal(err)
		}
	}
	spec := strings.ReplaceAll(`{"cdiVersion": "0.5.0", "kind": "test.com/null", "devices": [
		{"name": "given", "containerEdits": {"deviceNodes": [{"path": "/dev/given", "hostPath": "DIR/given"}]}},
		{"name": "driverless", "containerEdits": {"deviceNodes": [{"path": "/dev/driverless", "hostPath": "DIR/driverless"}]}}
	]}`, "DIR", dir)
	if err := os.WriteFile(filepath.Join(dir, "test.json"), []byte(spec), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}
