package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	testimage "gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// liveBundle is a container that gets its devices by the hook of the createRuntime stage.
type liveBundle struct {
	t   *testing.T
	dir string
	// root is the container's root, an image with glibc.
	root     string
	readonly bool
	firstID  int    // of a user namespace, as that of bundle
	shared   string // the kind of a namespace of the host in which the container is, or empty
	plainDev bool   // no tmpfs at /dev
	stage    string // createRuntime if empty
	// annotation is what the container asks for, test.com/gpu=0 if empty.
	annotation string
	// edits are more of the spec's, in the form of JSON.
	edits map[string]any
	// setup are shell commands that run before the engine, in its mount namespace.
	setup string
	// more is more of the container's script.
	more string
	// twoSteps creates and starts the container, in place of running it.
	twoSteps bool
	// mounts are more of the container's.
	mounts []map[string]any
}

func newLiveBundle(t *testing.T) *liveBundle {
	t.Helper()
	b := &liveBundle{t: t, dir: t.TempDir()}
	b.root = filepath.Join(b.dir, "rootfs")
	testimage.GlibcRoot(t, b.root)
	testimage.CopyFile(t, testenv.Command(t, "busybox"), filepath.Join(b.root, "bin/busybox"))
	testimage.Library(t, filepath.Join(b.dir, "libcuda.so.580.1"), "libcuda.so.1")
	// The numbers of GPUs have no driver: the device cgroup answers EPERM, and otherwise the kernel ENXIO.
	for name, device := range map[string]uint64{
		"nvidia0": unix.Mkdev(195, 0), "nvidia1": unix.Mkdev(195, 1), "zero": unix.Mkdev(1, 5),
	} {
		testenv.Must(t, unix.Mknod(filepath.Join(b.dir, name), unix.S_IFCHR|0o666, int(device)))
	}
	// Only root can change what the hook trusts.
	for dir := b.dir; dir != "/tmp" && dir != "/"; dir = filepath.Dir(dir) {
		testenv.Must(t, os.Chmod(dir, 0o755))
	}
	return b
}

// tries prints the library that the loader finds, whether the device works that was given, and the errors of opening a
// GPU that was given and one that was not.
const tries = `/bin/loader libcuda.so.1; b() { /bin/busybox "$@"; }
b head -c 1 /dev/dri/zero | b wc -c
(: <>/dev/nvidia0) 2>&1 | b sed 's/.*: //'
b mknod /dev/own c 195 1 2>&1 | b sed 's/.*: //'
b test -e /dev/own && (: <>/dev/own) 2>&1 | b sed 's/.*: //'
b rm -f /dev/own`

const triesOutput = "/opt/driver/libcuda.so.580.1\n1\nNo such device or address\nOperation not permitted"

func (b *liveBundle) spec() map[string]any {
	node := func(path, from string) map[string]any {
		return map[string]any{"path": path, "hostPath": filepath.Join(b.dir, from), "permissions": "rw"}
	}
	edits := map[string]any{
		"env": []string{"NVIDIA_VISIBLE_DEVICES=void"},
		"mounts": []any{map[string]any{
			"hostPath": b.dir + "/libcuda.so.580.1", "containerPath": "/opt/driver/libcuda.so.580.1",
			"options": []string{"ro", "nosuid", "nodev", "rbind", "rprivate"},
		}},
		"hooks": []any{map[string]any{
			"hookName": "createContainer", "path": hookBinary(b.t), "env": []string{"PATH=/bin"},
			"args": []string{
				"prestart-hook", "create-container", "--libraries=/opt/driver:libcuda.so.1=libcuda.so.580.1", "--mask-params",
			},
		}},
	}
	maps.Copy(edits, b.edits)
	return map[string]any{
		"cdiVersion": "0.7.0", "kind": "test.com/gpu", "containerEdits": edits,
		"devices": []any{
			map[string]any{"name": "0", "containerEdits": map[string]any{
				"deviceNodes": []any{node("/dev/nvidia0", "nvidia0"), node("/dev/dri/zero", "zero")},
			}},
			map[string]any{
				"name":           "1",
				"containerEdits": map[string]any{"deviceNodes": []any{node("/dev/nvidia1", "nvidia1")}},
			},
		},
	}
}

func (b *liveBundle) write(name string, content any) {
	b.t.Helper()
	data, err := json.Marshal(content)
	if err == nil {
		err = os.WriteFile(filepath.Join(b.dir, name), data, 0o644)
	}
	testenv.Must(b.t, err)
}

func (b *liveBundle) config() map[string]any {
	var namespaces []map[string]string
	for _, kind := range []string{"mount", "ipc", "uts", "pid", "network"} {
		if kind != b.shared {
			namespaces = append(namespaces, map[string]string{"type": kind})
		}
	}
	linux := map[string]any{"resources": map[string]any{
		"devices": []any{map[string]any{"allow": false, "access": "rwm"}},
	}}
	if b.firstID != 0 {
		ids := []map[string]int{{"containerID": 0, "hostID": b.firstID, "size": 1000}}
		linux["uidMappings"], linux["gidMappings"] = ids, ids
		namespaces = append(namespaces, map[string]string{"type": "user"})
	}
	linux["namespaces"] = namespaces
	caps := []string{"CAP_MKNOD"}
	mounts := []map[string]any{{"destination": "/proc", "type": "proc", "source": "proc"}}
	if !b.plainDev {
		mounts = append(mounts, map[string]any{
			"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755"},
		})
	}
	return map[string]any{
		"ociVersion": "1.0.2",
		"process": map[string]any{
			"args": []string{"/bin/busybox", "sh", "-c", tries + b.more}, "cwd": "/", "env": []string{"PATH=/bin"},
			"user":         map[string]int{"uid": 0, "gid": 0},
			"capabilities": map[string]any{"bounding": caps, "effective": caps, "permitted": caps},
		},
		"root":   map[string]any{"path": "rootfs", "readonly": b.readonly},
		"mounts": append(mounts, b.mounts...),
		"hooks": map[string]any{cmp.Or(b.stage, "createRuntime"): []any{map[string]any{
			"path": hookBinary(b.t), "args": []string{"prestart-hook", "create-runtime"}, "env": []string{"PATH=/bin"},
		}}},
		"linux": linux,
		"annotations": map[string]string{
			"run.oci.hooks.stderr": filepath.Join(b.dir, "hook-stderr"),
			"cdi.k8s.io/gpu":       cmp.Or(b.annotation, "test.com/gpu=0"),
		},
	}
}

// run runs the bundle. It fails the test if the host's mounts are others afterwards.
func (b *liveBundle) run(e engine) (stdout, stderr string, err error) {
	b.t.Helper()
	b.write("config.json", b.config())
	b.write("spec.json", b.spec())
	_ = os.Remove(filepath.Join(b.dir, "hook-stderr"))
	// The policy is that of /etc, which has no such directory on a machine for tests.
	setup := fmt.Sprintf(`mkdir /run/cdi; cp %s/spec.json /run/cdi
mkdir -p /run/etc/gpu-cdi-plugin; echo 'kinds: [test.com/gpu]' > /run/etc/gpu-cdi-plugin/hook.yaml
mount -n -t overlay -o lowerdir=/run/etc:/etc overlay /etc
%s
`, b.dir, b.setup)
	run := `"$0" "$@"`
	if b.twoSteps {
		run = `shift; { "$0" create "$@" && "$0" start "$3" &&
	while "$0" state "$3" | grep -q '"running"'; do sleep 0.05; done; "$0" delete "$3"; }`
	}
	// Mounts of other tests come and go.
	command := fmt.Sprintf(`mounts() { grep -v -e /tmp/ /proc/self/mountinfo; grep -F %s /proc/self/mountinfo || true; }
mounts >/run/before
%s && rc=0 || rc=$?
mounts >/run/after
cmp /run/before /run/after || diff /run/before /run/after >&2
exit $rc`, b.dir, run)
	stdout, stderr, err = e.runBy(b.t, b.dir, setup, command)
	if strings.Contains(stdout+stderr, "/run/before") {
		b.t.Errorf("the mounts of the host have changed: %s%s", stdout, stderr)
	}
	return stdout, stderr, err
}

func TestLive(t *testing.T) {
	for name, change := range map[string]func(*liveBundle){
		"a container":                                func(*liveBundle) {},
		"a read-only root":                           func(b *liveBundle) { b.readonly = true },
		"a user namespace":                           func(b *liveBundle) { b.useUsers() },
		"a user namespace and read-only":             func(b *liveBundle) { b.readonly = true; b.useUsers() },
		"created, then started":                      func(b *liveBundle) { b.twoSteps = true },
		"created, then started, in a user namespace": func(b *liveBundle) { b.twoSteps = true; b.useUsers() },
		"the prestart stage":                         func(b *liveBundle) { b.stage = "prestart" },
		"the PID namespace of the host":              func(b *liveBundle) { b.shared = "pid" },
		"the network namespace of the host":          func(b *liveBundle) { b.shared = "network" },
		"mounts of the host are shared":              func(b *liveBundle) { b.setup = "mount -n --make-rshared /" },
		"mounts of the host are slaves":              func(b *liveBundle) { b.setup = "mount -n --make-rslave /" },
		"a mount in a shared mount":                  func(b *liveBundle) { b.useNestedMounts() },
		"a tmpfs of the container's own":             func(b *liveBundle) { b.useTmpfs() },
		"an image with links and a cache":            func(b *liveBundle) { b.useLinks() },
		"no tmpfs at /dev":                           func(b *liveBundle) { b.usePlainDev() },
	} {
		for _, e := range engines(t) {
			t.Run(name+", "+e.name, func(t *testing.T) {
				t.Parallel()
				b := newLiveBundle(t)
				change(b)
				out, stderr, err := b.run(e)
				if out != triesOutput || err != nil {
					t.Fatalf("got %q, want %q; %v: %s", out, triesOutput, err, stderr)
				}
				before := testimage.Digest(t, b.root)
				if out2, stderr, err := b.run(e); err != nil || out2 != out {
					t.Errorf("the second time: %q, %v: %s", out2, err, stderr)
				}
				if !maps.Equal(testimage.Digest(t, b.root), before) {
					t.Error("the second start changed the root")
				}
			})
		}
	}
}

func (b *liveBundle) useUsers() {
	b.t.Helper()
	b.firstID = 100000
	chown(b.t, b.root, b.firstID)
}

// useNestedMounts has a mount whose mount point is in another one's directory, which is shared on the host.
func (b *liveBundle) useNestedMounts() {
	b.t.Helper()
	if err := errors.Join(os.Mkdir(b.dir+"/drivers", 0o755),
		os.WriteFile(b.dir+"/drivers/libcuda.so.580.1", nil, 0o644)); err != nil {
		b.t.Fatal(err)
	}
	b.setup = "mount -n --make-rshared /"
	b.edits = map[string]any{"mounts": []any{
		map[string]any{"hostPath": b.dir + "/drivers", "containerPath": "/opt/driver", "options": []string{"rbind"}},
		map[string]any{
			"hostPath": b.dir + "/libcuda.so.580.1", "containerPath": "/opt/driver/libcuda.so.580.1",
			"options": []string{"ro", "bind"},
		},
	}}
}

// useTmpfs mounts a tmpfs where the driver's files go, as engines do with /run.
func (b *liveBundle) useTmpfs() {
	b.mounts = append(b.mounts, map[string]any{"destination": "/opt", "type": "tmpfs", "source": "tmpfs"})
}

// useLinks makes links of the image where the driver's files go, and a cache.
func (b *liveBundle) useLinks() {
	b.t.Helper()
	testenv.Must(b.t, errors.Join(os.Mkdir(b.root+"/other", 0o755), os.Symlink("/other", b.root+"/opt")))
	(&bundle{t: b.t, dir: b.dir}).makeCache()
}

// usePlainDev leaves out the tmpfs at /dev, where the image has a link in place of a node.
func (b *liveBundle) usePlainDev() {
	b.t.Helper()
	b.plainDev = true
	err := os.MkdirAll(b.root+"/dev", 0o755)
	if err == nil {
		err = os.Symlink("/bin/busybox", b.root+"/dev/nvidia0")
	}
	testenv.Must(b.t, err)
}

// What cannot be given leaves nothing behind, and the container does not start.
func TestLiveRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*liveBundle)
		want   string
	}{
		"a device that does not exist": {
			func(b *liveBundle) { b.annotation = "test.com/gpu=9" }, "device test.com/gpu=9 does not exist",
		},
		"another kind": {
			func(b *liveBundle) { b.annotation = "test.com/disk=0" },
			"device test.com/disk=0 is not given: kind test.com/disk is not allowed",
		},
		"an additional group": {
			func(b *liveBundle) { b.edits = map[string]any{"additionalGids": []int{44}} },
			"device test.com/gpu=0 cannot be given: additional group 44 of the process: " +
				"it cannot be added to a container that already exists",
		},
		"another program's hook": {
			func(b *liveBundle) {
				b.edits = map[string]any{"hooks": []any{map[string]any{
					"hookName": "createContainer", "path": "/bin/true", "args": []string{"true"},
				}}}
			}, "hook /bin/true of the createContainer stage",
		},
		"a volume in place of the mount": {
			func(b *liveBundle) {
				b.mounts = append(b.mounts, map[string]any{
					"destination": "/opt/driver", "source": b.dir + "/volume", "type": "bind", "options": []string{"rbind"},
				})
			},
			"cannot be mounted at /opt/driver/libcuda.so.580.1: /opt/driver: on another mount than the container's root",
		},
		"a mount in another one, without its mount point": {
			func(b *liveBundle) {
				mount := func(from, to string) map[string]any {
					return map[string]any{"hostPath": from, "containerPath": to, "options": []string{"rbind"}}
				}
				b.edits = map[string]any{"mounts": []any{
					mount(b.dir+"/volume", "/new/dir"), mount("/etc/passwd", "/new/dir/a/file"),
				}}
			}, "/etc/passwd cannot be mounted at /new/dir/a/file: a/file in ",
		},
		"the bundle's config.json is a link": {
			func(b *liveBundle) {
				b.setup = fmt.Sprintf("mv %[1]s/config.json %[1]s/other; ln -s other %[1]s/config.json", b.dir)
			}, "config.json is a symbolic link, not a regular file",
		},
	} {
		for _, e := range engines(t) {
			t.Run(name+", "+e.name, func(t *testing.T) {
				t.Parallel()
				b := newLiveBundle(t)
				testenv.Must(t, os.Mkdir(b.dir+"/volume", 0o755))
				tc.change(b)
				// Without its own changes, the runtime makes these.
				for _, dir := range []string{"dev", "proc", "opt/driver"} {
					testenv.Must(t, os.MkdirAll(filepath.Join(b.root, dir), 0o755))
				}
				before := testimage.Digest(t, b.root)
				out, stderr, err := b.run(e)
				if err == nil || out != "" || !strings.Contains(stderr, tc.want) {
					t.Errorf("got %q, %v: %s, want %q", out, err, stderr, tc.want)
				}
				if after := testimage.Digest(t, b.root); !maps.Equal(before, after) {
					t.Errorf("the root has changed: %v", after)
				}
				entries, err := os.ReadDir(b.dir + "/volume")
				if err != nil || len(entries) > 0 {
					t.Errorf("the volume has %v, %v", entries, err)
				}
			})
		}
	}
}

func TestSlowLiveManyAtOnce(t *testing.T) {
	const containers = 50
	for _, e := range engines(t) {
		t.Run(e.name, func(t *testing.T) {
			var all sync.WaitGroup
			for range containers {
				b := newLiveBundle(t)
				all.Go(func() {
					if out, stderr, err := b.run(e); out != triesOutput || err != nil {
						t.Errorf("got %q, %v: %s", out, err, stderr)
					}
				})
			}
			all.Wait()
		})
	}
}

// In other stages the container has its root already, or its process is not known.
func TestLiveInTheWrongStage(t *testing.T) {
	for stage, want := range map[string]string{
		"createContainer": "process", "startContainer": "", "poststart": "has another root than the host",
	} {
		for _, e := range engines(t) {
			t.Run(stage+", "+e.name, func(t *testing.T) {
				b := newLiveBundle(t)
				b.stage, b.more = stage, "; b sleep 1" // for hooks that run beside it
				out, stderr, err := b.run(e)
				if strings.Contains(out, "/opt/driver") || strings.Contains(out, "such device") ||
					stage == "createContainer" && err == nil || !strings.Contains(stderr, want) {
					t.Errorf("got %q, %v: %s, want %q", out, err, stderr, want)
				}
			})
		}
	}
}
