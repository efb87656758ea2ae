package inject

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

// node is a host with a spec of this project and one of another program.
type node struct {
	Injector
	t   *testing.T
	dir string
}

func newNode(t *testing.T) *node {
	t.Helper()
	testenv.Root(t) // trust is for root's files
	dir := t.TempDir()
	n := &node{Injector{PolicyFile: dir + "/hook.yaml", CDIDirs: []string{dir + "/cdi"}}, t, dir}
	n.must(os.Mkdir(dir+"/cdi", 0o755))
	n.write("prestart-hook", "")
	n.must(cdi.WriteFile(dir+"/cdi/ours.json", ownSpec(dir+"/prestart-hook")))
	n.must(cdi.WriteFile(dir+"/cdi/theirs.json", &specs.Spec{
		Version: "0.5.0", Kind: "their.com/disk",
		Devices: []specs.Device{{Name: "all", ContainerEdits: specs.ContainerEdits{Env: []string{"DISK=all"}}}},
	}))
	return n
}

func (n *node) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) write(name, text string) {
	n.t.Helper()
	n.must(os.WriteFile(filepath.Join(n.dir, name), []byte(text), 0o644))
}

// config is a configuration with keys that no type of Go has, and with what an image says in its environment.
func config(annotations string) string {
	return fmt.Sprintf(`{
	"ociVersion": "1.0.2",
	"x-top": {"big": 9007199254740993, "html": "<&>"},
	"process": {"cwd": "/", "args": ["sh"], "env": ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all"], "x-process": [1.50, null]},
	"root": {"path": "rootfs"},
	"annotations": {%s},
	"hooks": {"createContainer": [{"path": "/bin/first", "x-hook": true}]},
	"linux": {"resources": {"devices": [{"allow": false, "access": "rwm"}]}, "namespaces": [{"type": "mount"}]}
}
`, annotations)
}

func TestConfigGolden(t *testing.T) {
	for _, name := range []string{"one", "two"} {
		annotations := map[string]string{
			"one": `"cdi.k8s.io/gpu": "nvidia.com/gpu=1"`,
			"two": `"cdi.k8s.io/a": "nvidia.com/gpu=1", "cdi.k8s.io/b": "their.com/disk=all,nvidia.com/gpu=0"`,
		}[name]
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.write("hook.yaml", "kinds: [nvidia.com/gpu, their.com/disk]")
			got, err := n.Config([]byte(config(annotations)))
			if err != nil {
				t.Fatal(err)
			}
			again, err := n.Config(got)
			if err != nil || again != nil {
				t.Errorf("the second time: %v\n%s", err, again)
			}
			got = bytes.ReplaceAll(got, []byte(n.dir), []byte("DIR"))
			golden := filepath.Join("testdata", name+".json")
			if *update {
				n.must(os.WriteFile(golden, got, 0o644))
			}
			want, err := os.ReadFile(golden)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%v; it is not %s, which -update writes:\n%s", err, golden, got)
			}
		})
	}
}

// attack is a container that must not get what it asks for.
type attack struct {
	annotations string
	change      func(n *node) // nil for none
	want        string        // of the error
}

var attacks = map[string]attack{
	"another program's kind": {
		`"cdi.k8s.io/a": "their.com/disk=all"`, nil,
		"device their.com/disk=all is not given: DIR/cdi/theirs.json was written by another program, and its kind " +
			"their.com/disk is not allowed in DIR/hook.yaml",
	},
	"another program's kind beside ours": {
		`"cdi.k8s.io/a": "nvidia.com/gpu=0,their.com/disk=all"`, nil, "device their.com/disk=all is not given",
	},
	"another program's spec of our kind": {
		`"cdi.k8s.io/a": "nvidia.com/gpu=9"`,
		func(n *node) {
			n.must(cdi.WriteFile(n.dir+"/cdi/more.json", &specs.Spec{
				Version: "0.5.0", Kind: "nvidia.com/gpu",
				Devices: []specs.Device{{Name: "9", ContainerEdits: specs.ContainerEdits{Env: []string{"A=b"}}}},
			}))
		},
		"DIR/cdi/more.json was written by another program",
	},
	"a device that is not allowed": {
		`"cdi.k8s.io/a": "nvidia.com/gpu=1"`,
		func(n *node) { n.write("hook.yaml", "devices: [nvidia.com/gpu=0]") },
		"device nvidia.com/gpu=1 is not given: it is not among the devices that are allowed in DIR/hook.yaml",
	},
	"a device that does not exist": {
		`"cdi.k8s.io/a": "nvidia.com/gpu=0", "cdi.k8s.io/b": "nvidia.com/gpu=7"`, nil,
		"device nvidia.com/gpu=7 does not exist; there are 0, 1",
	},
	"a large configuration": {
		`"cdi.k8s.io/a": "nvidia.com/gpu=0", "x": "` + strings.Repeat(
			"x",
			maxEdited,
		) + `"`, nil, "the limit is 4194304",
	},
	"a device whose node is gone": {
		`"cdi.k8s.io/a": "nvidia.com/gpu=0,nvidia.com/gpu=1"`,
		func(n *node) {
			spec := ownSpec("/usr/bin/prestart-hook")
			spec.Devices[1].ContainerEdits.DeviceNodes[0].HostPath = "/dev/not-there"
			n.must(cdi.WriteFile(n.dir+"/cdi/ours.json", spec))
		},
		"device nvidia.com/gpu=0 and 1 more cannot be given: the CDI specs do not fit this host",
	},
	"an annotation twice": {
		`"cdi.k8s.io/a": "nvidia.com/gpu=0", "cdi.k8s.io/a": "nvidia.com/gpu=1"`, nil, `the key "cdi.k8s.io/a" twice`,
	},
	"a policy with a mistake": {
		`"cdi.k8s.io/a": "nvidia.com/gpu=0"`,
		func(n *node) { n.write("hook.yaml", "device: []") },
		"device nvidia.com/gpu=0 is not given: policy DIR/hook.yaml: line 1: unknown key device",
	},
	"a spec that others can change": {
		`"cdi.k8s.io/a": "nvidia.com/gpu=0"`,
		func(n *node) { n.must(os.Chmod(n.dir+"/cdi/ours.json", 0o666)) },
		"devices of DIR/cdi/ours.json are not given: its hooks run as root, and others can change it",
	},
	"a hook that others can change": {
		`"cdi.k8s.io/a": "nvidia.com/gpu=0"`,
		func(n *node) { n.must(os.Chmod(n.dir+"/prestart-hook", 0o777)) },
		"its hook DIR/prestart-hook runs as root, and others can change it",
	},
}

func TestConfigRefuses(t *testing.T) {
	for name, a := range attacks {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			if a.change != nil {
				a.change(n)
			}
			got, err := n.Config([]byte(config(a.annotations)))
			checkError(t, err, strings.ReplaceAll(a.want, "DIR", n.dir))
			if got != nil {
				t.Errorf("got %s", got)
			}
		})
	}
}

// Without an annotation nothing of the node is read.
func TestConfigWithoutAnnotations(t *testing.T) {
	n := newNode(t)
	n.write("hook.yaml", "a mistake")
	for _, text := range []string{config(""), config(`"other": "nvidia.com/gpu=0"`), `{"process": {}, "process": {}}`} {
		if got, err := n.Config([]byte(text)); got != nil || err != nil {
			t.Errorf("%s became %s, %v", text, got, err)
		}
	}
}

// A bundle is a hostile directory: whatever is in it, only its own config.json changes, or nothing.
func TestHostileBundles(t *testing.T) {
	const asks = `"cdi.k8s.io/a": "nvidia.com/gpu=0"`
	for name, tc := range map[string]struct {
		make func(n *node, path string) // path is that of config.json, which exists
		want string                     // of the error; empty if config.json gets the device
	}{
		"a bundle": {func(*node, string) {}, ""},
		"another user's bundle": {func(n *node, path string) {
			n.must(os.Chown(filepath.Dir(path), 1000, 1000))
			n.must(os.Chown(path, 1000, 1000))
		}, ""},
		"a link": {func(n *node, path string) {
			n.must(os.Rename(path, n.dir+"/elsewhere"))
			n.must(os.Symlink("../elsewhere", path))
		}, "config.json is a symbolic link"},
		"a hard link": {func(n *node, path string) { n.must(os.Link(path, n.dir+"/elsewhere")) }, "2 names"},
		"root's file in a user's bundle": {
			func(n *node, path string) { n.must(os.Chown(filepath.Dir(path), 1000, 1000)) }, "belongs to user 0",
		},
		"a FIFO": {func(n *node, path string) {
			n.must(os.Remove(path))
			n.must(unix.Mkfifo(path, 0o666))
		}, "is a FIFO"},
		"a device": {func(n *node, path string) {
			n.must(os.Remove(path))
			n.must(unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))))
		}, "is a character device"},
		"a directory": {func(n *node, path string) {
			n.must(os.Remove(path))
			n.must(os.Mkdir(path, 0o755))
		}, "is a directory"},
		"a huge file": {func(n *node, path string) { n.must(os.Truncate(path, 1<<40)) }, "the limit is"},
		"nothing":     {func(n *node, path string) { n.must(os.Remove(path)) }, "no config.json"},
		"the bundle is another user's link": {func(n *node, path string) {
			bundle := filepath.Dir(path)
			n.must(os.Rename(bundle, n.dir+"/elsewhere"))
			n.must(os.Symlink("elsewhere", bundle))
			n.must(os.Lchown(bundle, 1000, 1000))
		}, "is not followed, since others can change it"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			bundle := n.dir + "/bundle"
			n.must(os.Mkdir(bundle, 0o755))
			n.write("bundle/config.json", config(asks))
			n.must(os.Chmod(bundle+"/config.json", 0o640))
			tc.make(n, bundle+"/config.json")
			before, _ := os.Lstat(bundle + "/config.json")
			elsewhere, _ := os.ReadFile(n.dir + "/elsewhere")
			checkError(t, n.Bundle(bundle), tc.want)
			after, _ := os.Lstat(bundle + "/config.json")
			if tc.want == "" {
				data, err := os.ReadFile(bundle + "/config.json")
				if err != nil || !bytes.Contains(data, []byte("/dev/nvidia0")) ||
					bytes.Contains(data, []byte("nvidia1")) {
					t.Errorf("%v\n%s", err, data)
				}
				if a, b := owner(before), owner(after); a != b || before.Mode() != after.Mode() {
					t.Errorf("%s and owner %d became %s and owner %d", before.Mode(), a, after.Mode(), b)
				}
			} else if before != nil && !os.SameFile(before, after) {
				t.Error("config.json was replaced")
			}
			if now, _ := os.ReadFile(n.dir + "/elsewhere"); !bytes.Equal(now, elsewhere) {
				t.Errorf("a file outside the bundle changed to %s", now)
			}
			if left, _ := filepath.Glob(bundle + "/.*"); len(left) > 0 {
				t.Errorf("left %q", left)
			}
		})
	}
}

func owner(info os.FileInfo) uint32 {
	return info.Sys().(*syscall.Stat_t).Uid
}

// config.json is opened once: what takes its place while devices are looked up is neither read nor replaced.
func TestConfigIsReadOnce(t *testing.T) {
	n := newNode(t)
	n.must(os.Mkdir(n.dir+"/bundle", 0o755))
	n.write("bundle/config.json", config(`"cdi.k8s.io/a": "nvidia.com/gpu=0"`))
	n.write("secret", "secret")
	_, err := cdi.EditBundle(n.dir+"/bundle", func(data []byte, _ uint32) ([]byte, error) {
		n.must(os.Remove(n.dir + "/bundle/config.json"))
		n.must(os.Symlink("../secret", n.dir+"/bundle/config.json"))
		return n.Config(data)
	})
	checkError(t, err, "config.json was replaced while it was read")
	if to, err := os.Readlink(n.dir + "/bundle/config.json"); err != nil || to != "../secret" {
		t.Errorf("config.json is a link to %q, %v", to, err)
	}
	if secret, err := os.ReadFile(n.dir + "/secret"); err != nil || string(secret) != "secret" {
		t.Errorf("%v\n%s", err, secret)
	}
}
