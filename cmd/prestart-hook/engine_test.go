package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gpu-cdi-plugin/internal/hookargs"
	testimage "gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// engine is an OCI runtime.
type engine struct {
	name string
	path string
}

func engines(t *testing.T) []engine {
	t.Helper()
	needRoot(t)
	return []engine{{"runc", testenv.Command(t, "runc")}, {"crun", testenv.Command(t, "crun")}}
}

var containerID atomic.Int64

// engineTimeout bounds the life of a container on a busy machine.
const engineTimeout = 2 * time.Minute

// run runs a bundle until it ends, after the shell commands in setup. It uses a mount namespace with its own /run,
// where engines have their state. crun does not start with cgroup v2 mounted beside v1, so v2 is unmounted for it.
func (e engine) run(t *testing.T, bundle, setup string) (stdout, stderr string, err error) {
	t.Helper()
	return e.runBy(t, bundle, setup, `exec "$0" "$@"`)
}

// runBy is run with the shell command that runs the engine, "$0" with "$@".
func (e engine) runBy(t *testing.T, bundle, setup, command string) (stdout, stderr string, err error) {
	t.Helper()
	id := fmt.Sprintf("prestart-hook-test-%d-%d", os.Getpid(), containerID.Add(1))
	script := "set -e\nmount -n -t tmpfs tmpfs /run\n" + setup + "\n"
	if e.name == "crun" {
		script += "umount /sys/fs/cgroup/unified 2>/dev/null || true\n"
	}
	script += command
	ctx, cancel := context.WithTimeout(t.Context(), engineTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", script, e.path, "run", "--bundle", bundle, id)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	cmd.WaitDelay = engineTimeout
	var out, msg bytes.Buffer
	// A pipe, not the null device: crun gives its standard input to the container's user.
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(""), &out, &msg
	err = cmd.Run()
	hookMsg, _ := os.ReadFile(filepath.Join(bundle, "hook-stderr"))
	return strings.TrimSpace(out.String()), msg.String() + string(hookMsg), err
}

// bundle is a container's configuration.
type bundle struct {
	t        *testing.T
	dir      string
	process  []string
	readonly bool
	// mounts maps destinations of bind mounts to their sources. more are other mounts, in the form of config.json.
	mounts map[string]string
	more   []map[string]any
	masked []string
	// user is the user ID of the container's process, without capabilities if it is not 0.
	user int
	// stage is the hook's, createContainer if empty. first is a shell script that another hook runs before it, or
	// empty.
	stage, first string
	// setup are shell commands that run before the engine, in its mount namespace.
	setup string
	// firstID is the host's user and group ID of the container's root. If it is not 0, the container has a user
	// namespace.
	firstID int
	args    hookargs.CreateContainer
}

func newBundle(t *testing.T) *bundle {
	t.Helper()
	dir := t.TempDir()
	driver := filepath.Join(dir, "libcuda.so.580.1")
	testimage.Library(t, driver, "libcuda.so.1")
	return &bundle{
		t: t, dir: dir, process: []string{"/bin/loader", "libcuda.so.1"},
		mounts: map[string]string{"/opt/driver/libcuda.so.580.1": driver},
		args: hookargs.CreateContainer{
			DriverVersion: "580.1",
			Libraries:     []hookargs.Library{{SONAME: "libcuda.so.1", Path: "/opt/driver/libcuda.so.580.1"}},
			Links:         []hookargs.Link{{Path: "/opt/driver/libcuda.so", Target: "libcuda.so.1"}},
			Params:        true, EGLProfile: true,
		},
	}
}

func (b *bundle) root() string { return filepath.Join(b.dir, "rootfs") }

func (b *bundle) run(e engine) (stdout, stderr string, err error) {
	b.t.Helper()
	mounts := []map[string]any{
		{"destination": "/proc", "type": "proc", "source": "proc"},
		{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755"}},
	}
	for to, from := range b.mounts {
		mounts = append(mounts, map[string]any{
			"destination": to, "source": from, "type": "bind",
			"options": []string{"ro", "nosuid", "nodev", "rbind", "rprivate"},
		})
	}
	mounts = append(mounts, b.more...)
	var namespaces []map[string]string
	for _, kind := range []string{"pid", "mount", "ipc", "uts"} {
		namespaces = append(namespaces, map[string]string{"type": kind})
	}
	linux := map[string]any{"namespaces": namespaces, "maskedPaths": b.masked}
	if b.firstID != 0 {
		ids := []map[string]int{{"containerID": 0, "hostID": b.firstID, "size": 1000}}
		linux = map[string]any{
			"namespaces": append(namespaces, map[string]string{"type": "user"}), "uidMappings": ids, "gidMappings": ids,
		}
	}
	hook := map[string]any{
		"path": hookBinary(b.t), "args": append([]string{"prestart-hook"}, b.args.Args()...), "env": []string{"NONE=1"},
	}
	hooks := []any{hook}
	if b.first != "" {
		hooks = []any{map[string]any{
			"path": "/bin/sh", "args": []string{"sh", "-c", b.first}, "env": []string{"PATH=/usr/bin:/bin"},
		}, hook}
	}
	config, err := json.Marshal(map[string]any{
		"ociVersion": "1.0.2",
		"process": map[string]any{
			"args": b.process, "cwd": "/", "noNewPrivileges": true,
			"user": map[string]int{"uid": b.user, "gid": b.user},
			"env":  []string{"PATH=/bin", "LD_PRELOAD=/proc/self/cwd/poc.so"},
		},
		"root":   map[string]any{"path": "rootfs", "readonly": b.readonly},
		"mounts": mounts,
		"hooks":  map[string]any{cmp.Or(b.stage, "createContainer"): hooks},
		"linux":  linux,
		// crun discards the standard error of hooks.
		"annotations": map[string]string{"run.oci.hooks.stderr": filepath.Join(b.dir, "hook-stderr")},
	})
	testenv.Must(b.t, err)
	testenv.Must(b.t, os.WriteFile(filepath.Join(b.dir, "config.json"), config, 0o600))
	return e.run(b.t, b.dir, b.setup)
}

// makeCache runs ldconfig for the root.
func (b *bundle) makeCache() {
	b.t.Helper()
	if out, err := exec.Command(testenv.Command(b.t, "ldconfig"), "-r", b.root()).CombinedOutput(); err != nil {
		b.t.Fatalf("ldconfig: %v\n%s", err, out)
	}
}

func TestEnginesFindTheDriverInEveryImage(t *testing.T) {
	glibc := func(b *bundle) { testimage.GlibcRoot(b.t, b.root()) }
	cached := func(b *bundle) { glibc(b); b.makeCache() }
	const there = "/opt/driver/libcuda.so.580.1"
	for name, tc := range map[string]struct {
		image    func(b *bundle)
		readonly bool
		want     string // the beginning of the container's output
		fails    map[string]string
	}{
		"a cache":            {image: cached, want: there},
		"no cache":           {image: glibc, want: there},
		"a cache, read-only": {image: cached, readonly: true, want: there},
		"a FIFO, read-only": {
			image:    func(b *bundle) { glibc(b); makeFIFO(&container{t: b.t, root: b.root()}, "/etc/ld.so.cache") },
			readonly: true, want: there,
		},
		"musl":                        {image: useMuslImage, want: "/opt/driver/libcuda.so.1"},
		"a static program":            {image: useStaticImage, want: "ran"},
		"a static program, read-only": {image: useStaticImage, readonly: true, want: "ran"},
		// crun before December 2025 makes the root read-only first, so there is no file to mount the cache over.
		"no cache, read-only": {image: glibc, readonly: true, want: there, fails: map[string]string{
			"crun": "no program in the container would find libcuda.so.1 without /etc/ld.so.cache",
		}},
		"no cache, read-only, in the loader's own directory": {image: func(b *bundle) {
			glibc(b)
			b.moveDriverToDefaultDir()
		}, readonly: true, want: mustMultiarch() + "/libcuda.so."},
	} {
		for _, e := range engines(t) {
			t.Run(name+", "+e.name, func(t *testing.T) {
				b := newBundle(t)
				b.readonly = tc.readonly
				tc.image(b)
				out, stderr, err := b.run(e)
				if want, fails := tc.fails[e.name]; fails && err != nil {
					if !strings.Contains(stderr, want) {
						t.Errorf("%v: %s, want a message with %q", err, stderr, want)
					}
					return
				}
				// Debian's /lib is a link to /usr/lib, and glibc has both as default directories.
				if !strings.HasPrefix(strings.TrimPrefix(out, "/usr"), strings.TrimPrefix(tc.want, "/usr")) ||
					err != nil {
					t.Fatalf("got %q, want %q; %v: %s", out, tc.want, err, stderr)
				}
				before := testimage.Fingerprint(t, b.root())
				if out2, stderr, err := b.run(e); err != nil || out2 != out {
					t.Errorf("the second time: %q, %v: %s", out2, err, stderr)
				}
				if testimage.Fingerprint(t, b.root()) != before {
					t.Error("the second start changed the root")
				}
			})
		}
	}
}

func mustMultiarch() string {
	dir, _ := multiarch()
	return dir
}

// Programs also load libraries by the names of links, such as libcuda.so. The cache has those names, since no link can
// be made in a read-only root.
func TestEnginesFindLibrariesByTheNamesOfLinks(t *testing.T) {
	for _, e := range engines(t) {
		for name, readonly := range map[string]bool{"": false, ", read-only": true} {
			t.Run(e.name+name, func(t *testing.T) {
				b := newBundle(t)
				testimage.GlibcRoot(t, b.root())
				b.makeCache()
				b.readonly, b.process = readonly, []string{"/bin/loader", "libcuda.so"}
				if out, stderr, err := b.run(e); out != "/opt/driver/libcuda.so.580.1" || err != nil {
					t.Errorf("got %q, %v: %s", out, err, stderr)
				}
			})
		}
	}
}

// useMuslImage makes an image with musl, which finds libraries by file name. Specs have a link with the SONAME.
func useMuslImage(b *bundle) {
	b.t.Helper()
	testimage.MuslRoot(b.t, b.root())
	b.args.Links = append(b.args.Links, hookargs.Link{Path: "/opt/driver/libcuda.so.1", Target: "libcuda.so.580.1"})
}

func useStaticImage(b *bundle) {
	b.t.Helper()
	testimage.CopyFile(b.t, testenv.Command(b.t, "busybox"), filepath.Join(b.root(), "bin/busybox"))
	b.process = []string{"/bin/busybox", "echo", "ran"}
}

// moveDriverToDefaultDir mounts the driver, with its SONAME's link, in a directory that the loader searches by default.
func (b *bundle) moveDriverToDefaultDir() {
	b.t.Helper()
	dir := mustMultiarch()
	driver := b.mounts["/opt/driver/libcuda.so.580.1"]
	b.mounts = map[string]string{dir + "/libcuda.so.580.1": driver}
	b.args.Libraries[0].Path = dir + "/libcuda.so.580.1"
	b.args.Links = nil
	root := filepath.Join(b.root(), dir)
	testenv.Must(b.t, os.MkdirAll(root, 0o755))
	testenv.Must(b.t, os.Symlink("libcuda.so.580.1", filepath.Join(root, "libcuda.so.1")))
}

// In a user namespace the hook cannot read config.json.
func TestEnginesWithAUserNamespace(t *testing.T) {
	before := ownerOf(t, os.DevNull)
	defer func() {
		if after := ownerOf(t, os.DevNull); after != before {
			t.Errorf("%s belongs to user %d now, and before to %d", os.DevNull, after, before)
		}
	}()
	for _, e := range engines(t) {
		for name, readonly := range map[string]bool{"": false, ", read-only": true} {
			t.Run(e.name+name, func(t *testing.T) {
				b := newBundle(t)
				testimage.GlibcRoot(t, b.root())
				b.makeCache()
				b.readonly, b.firstID = readonly, 100000
				chown(t, b.root(), b.firstID)
				out, stderr, err := b.run(e)
				if out != "/opt/driver/libcuda.so.580.1" || err != nil {
					t.Errorf("got %q, %v: %s", out, err, stderr)
				}
			})
		}
	}
}

// If /proc hides process 1, the owner of the mount namespace shows that it is not the host's.
func TestEnginesWithAUserNamespaceAndHiddenProcesses(t *testing.T) {
	for _, e := range engines(t) {
		t.Run(e.name, func(t *testing.T) {
			b := newBundle(t)
			testimage.GlibcRoot(t, b.root())
			b.firstID = 100000
			b.setup = "mount -t proc -o hidepid=2 proc /proc"
			chown(t, b.root(), b.firstID)
			if out, stderr, err := b.run(e); out != "/opt/driver/libcuda.so.580.1" || err != nil {
				t.Errorf("got %q, %v: %s", out, err, stderr)
			}
		})
	}
}

// In other stages the process is in the host's mount namespace.
func TestEnginesInTheWrongStageChangeNothing(t *testing.T) {
	for _, e := range engines(t) {
		t.Run(e.name, func(t *testing.T) {
			b := newBundle(t)
			testimage.GlibcRoot(t, b.root())
			b.mounts = nil // the runtime would make their mount points
			b.stage = "createRuntime"
			before := testimage.Fingerprint(t, filepath.Join(b.root(), "etc"))
			out, stderr, err := b.run(e)
			const want = "is not a container's root in the createContainer stage, nothing was changed"
			if err == nil || !strings.Contains(stderr, want) {
				t.Errorf("got %q, %v: %s, want %q", out, err, stderr, want)
			}
			if testimage.Fingerprint(t, filepath.Join(b.root(), "etc")) != before {
				t.Error("the hook changed the root")
			}
		})
	}
}

func ownerOf(t *testing.T, name string) uint32 {
	t.Helper()
	var st syscall.Stat_t
	testenv.Must(t, syscall.Stat(name, &st))
	return st.Uid
}

func chown(t *testing.T, dir string, id int) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, id, id))
	})
	testenv.Must(t, err)
	for ; dir != "/"; dir = filepath.Dir(dir) {
		i, err := os.Stat(dir)
		if err == nil && i.Mode()&0o001 == 0 {
			err = os.Chmod(dir, i.Mode()|0o011)
		}
		testenv.Must(t, err)
	}
}
