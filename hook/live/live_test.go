package live

import (
	"bufio"
	"context"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/hook"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// created is a container as a runtime has it in the createRuntime stage: a child in a mount namespace of its own, where
// the root and a tmpfs at its /dev are mounted.
type created struct {
	t      *testing.T
	bundle string
	cmd    *exec.Cmd
}

func newCreated(t *testing.T, bundle string) *created {
	t.Helper()
	return newCreatedIn(t, bundle, &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS})
}

// newCreatedIn is newCreated with other namespaces.
func newCreatedIn(t *testing.T, bundle string, namespaces *syscall.SysProcAttr) *created {
	t.Helper()
	testenv.Root(t)
	root := filepath.Join(bundle, "rootfs")
	if err := errors.Join(os.MkdirAll(root+"/dev", 0o755), os.MkdirAll(root+"/data/volume", 0o755)); err != nil {
		t.Fatal(err)
	}
	c := &created{t: t, bundle: bundle}
	c.cmd = exec.Command("/bin/sh", "-c",
		`mount -n --bind "$0" "$0" && mount -n -t tmpfs tmpfs "$0/dev" && `+
			`mount -n --rbind /mnt "$0/data/volume" && echo ready && exec sleep 600`, root)
	c.cmd.SysProcAttr = namespaces
	out, err := c.cmd.StdoutPipe()
	if err == nil {
		err = c.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.end)
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	return c
}

func (c *created) end() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// give is Give, with this process as the runtime.
func (c *created) give(ctx context.Context, change func(*oci.Spec)) ([]error, error) {
	c.t.Helper()
	before, after := configs(c.t, change)
	return c.giveOf(ctx, before, after)
}

func (c *created) giveOf(ctx context.Context, before, after []byte) ([]error, error) {
	c.t.Helper()
	h, err := host.New("/", "/", "/")
	if err != nil {
		c.t.Fatal(err)
	}
	maker, err := openRuntime(h, os.Getpid())
	if err != nil {
		c.t.Fatal(err)
	}
	defer maker.Close()
	var warnings []error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends, which has another working directory then
		warnings, err = Give(ctx, Request{
			State:   &hook.State{ID: "x", PID: c.cmd.Process.Pid, Bundle: c.bundle},
			Runtime: maker, Before: before, After: after,
		}, h)
	}()
	<-done
	return warnings, err
}

// mounts is the mount table of a process.
func mounts(t *testing.T, process string) string {
	t.Helper()
	data, err := os.ReadFile("/proc/" + process + "/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func (c *created) inside(path string) string {
	return filepath.Join("/proc", itoa(c.cmd.Process.Pid), "root", c.bundle, "rootfs", path)
}

func zeroDevice() oci.LinuxDevice {
	d := device("/dev/gpu/zero", "c", 1, 5)
	d.FileMode = new(os.FileMode(0o604))
	return d
}

func TestGive(t *testing.T) {
	bundle := t.TempDir()
	source := filepath.Join(bundle, "source")
	if err := errors.Join(os.Mkdir(source, 0o755), os.WriteFile(source+"/lib", []byte("driver"), 0o644)); err != nil {
		t.Fatal(err)
	}
	change := func(c *oci.Spec) {
		c.Linux.Devices = append(c.Linux.Devices, zeroDevice())
		c.Mounts = append(c.Mounts,
			oci.Mount{Source: source, Destination: "/opt/dir", Options: []string{"rbind", "rprivate"}},
			oci.Mount{Source: source + "/lib", Destination: "/opt/lib", Options: []string{"ro", "bind"}})
		c.Hooks.CreateContainer = append(c.Hooks.CreateContainer, ours("create-container", "--link=/opt/link::lib"))
		c.Process.Env = append(c.Process.Env, "A=b")
	}
	var before map[string]string
	for _, start := range []string{"the first", "again on the same root"} {
		t.Run(start, func(t *testing.T) {
			c := newCreated(t, bundle)
			hostMounts := mounts(t, "self")
			warnings, err := c.give(t.Context(), change)
			if err != nil || len(warnings) != 1 || !strings.HasSuffix(warnings[0].Error(), "already: A") {
				t.Fatalf("%v, %v", warnings, err)
			}
			if mounts(t, "self") != hostMounts {
				t.Error("the mounts of the host have changed")
			}
			var st unix.Stat_t
			if err := unix.Lstat(c.inside("/dev/gpu/zero"), &st); err != nil || st.Rdev != unix.Mkdev(1, 5) ||
				st.Mode != unix.S_IFCHR|0o604 {
				t.Errorf("the node has mode %o, device %#x, %v", st.Mode, st.Rdev, err)
			}
			for _, name := range []string{"/opt/dir/lib", "/opt/lib", "/opt/link"} {
				if data, err := os.ReadFile(c.inside(name)); string(data) != "driver" {
					t.Errorf("%s: %q, %v", name, data, err)
				}
			}
			if err := os.WriteFile(c.inside("/opt/lib"), nil, 0o644); !errors.Is(err, unix.EROFS) {
				t.Errorf("write to a read-only mount: %v", err)
			}
			c.end()
			after := image.Digest(t, bundle)
			if before != nil && !maps.Equal(before, after) {
				t.Error("the second start changed the root")
			}
			before = after
		})
	}
}

// What fails in the middle leaves nothing in the root and no mount.
func TestGiveTakesBack(t *testing.T) {
	canceled, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("too late"))
	add := func(m ...oci.Mount) func(*oci.Spec) {
		return func(c *oci.Spec) {
			c.Linux.Devices = append(c.Linux.Devices, zeroDevice())
			c.Mounts = append(c.Mounts, m...)
		}
	}
	dir := t.TempDir()
	good := oci.Mount{Source: dir, Destination: "/opt/new", Options: []string{"bind"}}
	for name, tc := range map[string]struct {
		ctx    context.Context
		change func(*oci.Spec)
		want   string
	}{
		"the deadline": {canceled, add(good), "too late"},
		"a mount point on another mount": {
			t.Context(),
			add(good, oci.Mount{Source: "/etc/passwd", Destination: "/opt/new/a/file", Options: []string{"bind"}}),
			"a/file in " + dir + ", which is mounted at /opt/new: no such file",
		},
		"a missing source": {
			t.Context(), add(good, oci.Mount{Source: dir + "/none", Destination: "/opt/x", Options: []string{"bind"}}),
			"none at /opt/x: open_tree: no such file",
		},
		"a volume": {
			t.Context(), add(good, oci.Mount{Source: dir, Destination: "/data/volume/x", Options: []string{"bind"}}),
			"on another mount than the container's root",
		},
		"libraries that no program finds": {t.Context(), func(c *oci.Spec) {
			add(good, oci.Mount{Source: dir, Destination: "/etc/ld.so.cache", Options: []string{"bind"}})(c)
			add(oci.Mount{Source: "/etc/passwd", Destination: "/drv/libcuda.so.1", Options: []string{"bind"}})(c)
			c.Hooks.CreateContainer = append(c.Hooks.CreateContainer,
				ours("create-container", "--libraries=/drv:libcuda.so.1=libcuda.so.1"))
		}, "would find libcuda.so.1"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCreated(t, t.TempDir())
			pid := itoa(c.cmd.Process.Pid)
			before, table := image.Digest(t, c.inside("/")), mounts(t, pid)
			if _, err := c.give(tc.ctx, tc.change); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want an error with %q", err, tc.want)
			}
			if after := image.Digest(t, c.inside("/")); !maps.Equal(before, after) {
				t.Errorf("the root has changed: %v", after)
			}
			if mounts(t, pid) != table {
				t.Errorf("the mounts have changed:\n%s", mounts(t, pid))
			}
		})
	}
}

// A policy may allow devices only in user namespaces. The owner of a bundle can exchange config.json.
func TestGiveComparesTheUserNamespace(t *testing.T) {
	c := newCreated(t, t.TempDir())
	_, config := configs(t, func(c *oci.Spec) {
		c.Linux.Namespaces = []oci.LinuxNamespace{{Type: oci.UserNamespace}}
	})
	_, err := c.giveOf(t.Context(), config, config)
	if err == nil || !strings.Contains(err.Error(), "config.json is not that of process "+itoa(c.cmd.Process.Pid)) {
		t.Error(err)
	}
}

// What config.json says about a user namespace is not what the runtime made, if it was exchanged meanwhile.
func TestGiveComparesTheMappings(t *testing.T) {
	root := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 65536}}
	c := newCreatedIn(t, t.TempDir(), &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, UidMappings: root, GidMappings: root,
	})
	_, config := configs(t, func(c *oci.Spec) {
		c.Linux.Namespaces = []oci.LinuxNamespace{{Type: oci.UserNamespace}}
		c.Linux.UIDMappings = []oci.LinuxIDMapping{{ContainerID: 0, HostID: 100000, Size: 65536}}
	})
	_, err := c.giveOf(t.Context(), config, config)
	if err == nil || !strings.Contains(err.Error(), "the host's root is a user or group of its user namespace") {
		t.Error(err)
	}
}

// asked is a context that calls a function each time that it is asked whether it is done.
type asked struct {
	context.Context
	call func()
}

func (a asked) Err() error {
	a.call()
	return nil
}

// Between the rules of the cgroup and the mounts, the process ends: nothing is left in the root.
func TestGiveToAProcessThatEnds(t *testing.T) {
	bundle := t.TempDir()
	c := newCreated(t, bundle)
	before := image.Digest(t, bundle)
	times := 0
	_, err := c.give(asked{context.Background(), func() {
		if times++; times == 2 {
			c.end()
		}
	}}, func(s *oci.Spec) {
		s.Mounts = append(s.Mounts, oci.Mount{Source: "/etc", Destination: "/opt/new", Options: []string{"bind"}})
	})
	if times < 2 || err == nil || !strings.Contains(err.Error(), "the process has ended") {
		t.Errorf("asked %d times, got %v", times, err)
	}
	if !maps.Equal(image.Digest(t, bundle), before) {
		t.Error("something is left in the root")
	}
}
