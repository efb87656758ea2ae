package dist

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// host is a simulated host on which programs can run.
type host struct {
	*testing.T
	root string
}

func newHost(t *testing.T) *host {
	t.Helper()
	testenv.Root(t)
	testenv.MountNamespace(t)
	h := &host{t, simtest.Node(t, "workstation").Root()}
	testenv.Must(t, image.AddGlibc(h.root))
	for top := h.root; top != "/tmp" && top != "/"; top = filepath.Dir(top) {
		testenv.Must(t, os.Chmod(top, 0o755))
	}
	h.mountProc()
	return h
}

// mountProc mounts the kernel's /proc on the host, with what the simulated driver has there.
func (h *host) mountProc() {
	h.Helper()
	proc, driver := filepath.Join(h.root, "proc"), filepath.Join(h.root, "tmp/driver")
	testenv.Must(h, os.MkdirAll(driver, 0o755))
	mount := func(source, target, fstype string, flags uintptr) {
		h.Helper()
		testenv.Must(h, unix.Mount(source, target, fstype, flags, ""))
		h.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
	}
	mount(filepath.Join(proc, "driver"), driver, "", unix.MS_BIND)
	mount("proc", proc, "proc", 0)
	mount(driver, filepath.Join(proc, "driver"), "", unix.MS_BIND)
}

// files are the files of the host, without those of the kernel.
func (h *host) files() map[string]string {
	all := map[string]string{}
	entries, err := os.ReadDir(h.root)
	testenv.Must(h, err)
	for _, e := range entries {
		if dir := filepath.Join(h.root, e.Name()); e.IsDir() && e.Name() != "proc" && e.Name() != "tmp" {
			for name, is := range image.Digest(h, dir) {
				all[filepath.Join(e.Name(), name)] = is
			}
		}
	}
	return all
}

// launch runs the launcher as the image does.
func (h *host) launch(code int, args ...string) proc.Result {
	h.Helper()
	return proc.Must(h, code, proc.Cmd{Args: append([]string{shared.Program(h.T, "launcher"), "--host", h.root}, args...)})
}

// programs is where the launcher puts the programs.
const programs = "var/lib/gpu-cdi-plugin/bin"

func TestTheLauncherRunsThePluginOnTheHost(t *testing.T) {
	h := newHost(t)
	if r := h.launch(0, "run", "devices", "-o", "name"); !strings.HasPrefix(r.Stdout, "nvidia.com/gpu=GPU-") {
		t.Errorf("the devices are %v", r)
	}
	for _, name := range []string{"gpu-cdi-plugin", "prestart-hook"} {
		want, err := os.ReadFile(shared.Program(t, name))
		testenv.Must(t, err)
		got, err := os.ReadFile(filepath.Join(h.root, programs, name))
		testenv.Must(t, err)
		info, err := os.Lstat(filepath.Join(h.root, programs, name))
		testenv.Must(t, err)
		if string(got) != string(want) || info.Mode() != 0o755 {
			t.Errorf("%s on the host has %d bytes and mode %v", name, len(got), info.Mode())
		}
	}
	if r := h.launch(4, "run", "cdi", "diff"); !strings.Contains(r.Stdout, "the file does not exist") {
		t.Errorf("the exit status of the plugin is not passed on: %v", r)
	}
}

func TestTheLauncherReplacesAProgramOnlyIfItDiffers(t *testing.T) {
	h := newHost(t)
	h.launch(0, "run", "--version")
	hook := filepath.Join(h.root, programs, "prestart-hook")
	same := func(before os.FileInfo) bool {
		t.Helper()
		now, err := os.Lstat(hook)
		testenv.Must(t, err)
		return os.SameFile(before, now)
	}
	before, err := os.Lstat(hook)
	testenv.Must(t, err)
	h.launch(0, "run", "--version")
	if !same(before) {
		t.Error("an equal program was replaced")
	}
	for name, change := range map[string]func() error{
		"an older program":          func() error { return os.WriteFile(hook, []byte("old"), 0o755) },
		"a program that cannot run": func() error { return os.Chmod(hook, 0o644) },
		"a program of another user": func() error { return os.Chown(hook, 1000, 1000) },
		"a link in its place": func() error {
			testenv.Must(t, os.Rename(hook, hook+".moved"))
			return os.Symlink("prestart-hook.moved", hook)
		},
	} {
		t.Run(name, func(t *testing.T) {
			testenv.Must(t, change())
			before, err := os.Lstat(hook)
			testenv.Must(t, err)
			h.launch(0, "run", "--version")
			if same(before) {
				t.Error("it was not replaced")
			}
		})
	}
}

func TestTheLauncherRefusesADirectoryOfOthers(t *testing.T) {
	h := newHost(t)
	dir := filepath.Join(h.root, programs)
	testenv.Must(t, os.MkdirAll(dir, 0o755))
	testenv.Must(t, os.Chmod(dir, 0o777))
	if r := h.launch(1, "run", "--version"); !strings.Contains(r.Stderr, "others can change it") {
		t.Errorf("the error is %v", r)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("it has %v (%v)", entries, err)
	}
}

// TestTheLauncherPassesAConfigMapOn has a directory as the kubelet makes it of a ConfigMap, outside the host's root.
func TestTheLauncherPassesAConfigMapOn(t *testing.T) {
	h := newHost(t)
	dir := t.TempDir()
	write := func(version, text string) {
		t.Helper()
		testenv.Must(t, os.Mkdir(filepath.Join(dir, version), 0o755))
		testenv.Must(t, os.WriteFile(filepath.Join(dir, version, "config.yaml"), []byte(text), 0o644))
		testenv.Must(t, os.Symlink(version, filepath.Join(dir, "..data_tmp")))
		testenv.Must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	testenv.Must(t, os.Symlink("..data/config.yaml", filepath.Join(dir, "config.yaml")))
	for version, resource := range map[string]string{"..1": "example.com/a", "..2": "example.com/b"} {
		write(version, "resource: "+resource+"\n")
		if r := h.launch(0, "--config", dir, "run", "config", "view"); !strings.Contains(r.Stdout, "resource: "+resource) {
			t.Errorf("the configuration is %v", r)
		}
	}
	if r := h.launch(1, "--config", dir+"/none", "run", "config", "view"); !strings.Contains(r.Stderr, "no such file") {
		t.Errorf("the error is %v", r)
	}
}

func TestTheLauncherRemovesWhatIsOnTheHost(t *testing.T) {
	h := newHost(t)
	before := h.files()
	h.launch(0, "run", "cdi", "generate", "--write")
	testenv.Must(t, os.MkdirAll(filepath.Join(h.root, "run/gpu-cdi-plugin/mps"), 0o755))
	testenv.Must(t, os.MkdirAll(filepath.Join(h.root, "var/lib/gpu-cdi-plugin/devices"), 0o755))
	for range 2 { // the second time nothing is there
		h.launch(0, "run", "hook", "uninstall")
		h.launch(0, "run", "cdi", "remove")
		h.launch(0, "remove")
		after := h.files()
		for path := range after {
			if strings.Contains(path, "gpu-cdi-plugin") || strings.Contains(path, "nvidia.com-gpu") {
				t.Errorf("%s is still there", path)
			}
		}
		for path, was := range before {
			if after[path] != was {
				t.Errorf("%s has changed from %s to %s", path, was, after[path])
			}
		}
	}
}

// TestTheLauncherRemovesWhatMPSHasMounted has the host in a mount namespace of its own, as a pod has it.
func TestTheLauncherRemovesWhatMPSHasMounted(t *testing.T) {
	h := newHost(t)
	h.launch(0, "run", "--version")
	mount := func(source, target, fstype string, flags uintptr) {
		t.Helper()
		testenv.Must(t, os.MkdirAll(target, 0o755), unix.Mount(source, target, fstype, flags, ""), os.Chmod(target, 0o755))
		t.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
	}
	run, state := filepath.Join(h.root, "run/gpu-cdi-plugin"), filepath.Join(h.root, "var/lib/gpu-cdi-plugin")
	mount("tmpfs", filepath.Join(run, "mps/shm"), "tmpfs", 0)
	mount("tmpfs", filepath.Join(run, "mps/shm"), "tmpfs", 0) // over the first one
	mount("tmpfs", filepath.Join(run, "mps/with space/shm"), "tmpfs", 0)
	client := t.TempDir() // the /dev/shm of a container
	mount(filepath.Join(run, "mps/shm"), client, "", unix.MS_BIND)
	testenv.Must(t, os.WriteFile(filepath.Join(client, "cuda.shm"), nil, 0o600))
	mount("tmpfs", filepath.Join(run, "mps/shm/nested"), "tmpfs", 0)
	mount("tmpfs", state, "tmpfs", 0) // an administrator's
	testenv.Must(t, os.WriteFile(filepath.Join(state, "device"), nil, 0o600))

	launcher := []string{shared.Program(t, "launcher"), "--host", h.root, "remove"}
	for range 2 {
		proc.Must(t, 0, proc.Cmd{Args: append([]string{"unshare", "--mount", "--propagation", "slave"}, launcher...)})
	}
	if _, err := os.Lstat(run); !os.IsNotExist(err) {
		t.Errorf("%s is still there (%v)", run, err)
	}
	if left, err := os.ReadDir(state); err != nil || len(left) > 0 {
		t.Errorf("the administrator's mount has %v (%v)", left, err)
	}
	if _, err := os.Stat(filepath.Join(client, "cuda.shm")); err != nil {
		t.Errorf("the container's shared memory has lost a file: %v", err)
	}
	mounts, err := os.ReadFile("/proc/thread-self/mounts")
	testenv.Must(t, err)
	if strings.Contains(string(mounts), run) {
		t.Errorf("there are mounts on the host below %s:\n%s", run, mounts)
	}
}

func TestTheLauncherKeepsTheHookForEnginesThatRunIt(t *testing.T) {
	h := newHost(t)
	engine := filepath.Join(h.root, "etc/containers")
	testenv.Must(t, os.MkdirAll(engine, 0o755))
	h.launch(0, "run", "hook", "install", "podman")
	before := h.files()
	if r := h.launch(1, "remove"); !strings.Contains(r.Stderr, `run "launcher run hook uninstall" first`) {
		t.Errorf("the error is %v", r)
	}
	if diff := cmp.Diff(before, h.files()); diff != "" {
		t.Errorf("-before +after:\n%s", diff)
	}
	h.launch(0, "run", "hook", "uninstall")
	h.launch(0, "remove")
	for path := range h.files() {
		if strings.Contains(path, "gpu-cdi-plugin") {
			t.Errorf("%s is still there", path)
		}
	}
}

func TestTheLauncherKeepsTheRecordsOfPreparedClaims(t *testing.T) {
	h := newHost(t)
	h.launch(0, "run", "--version")
	claims := filepath.Join(h.root, "var/lib/gpu-cdi-plugin/claims")
	testenv.Must(t, os.Mkdir(claims, 0o700))
	h.launch(0, "run", "--version")
	testenv.Must(t, os.WriteFile(filepath.Join(claims, "00000000-0000-0000-0000-000000000001.json"), nil, 0o600))
	before := h.files()
	if r := h.launch(1, "remove"); !strings.Contains(r.Stderr, "a ResourceClaim is prepared, as /var/lib/") {
		t.Errorf("the error is %v", r)
	}
	if diff := cmp.Diff(before, h.files()); diff != "" {
		t.Errorf("-before +after:\n%s", diff)
	}
	h.launch(0, "--force", "remove")
	for path := range h.files() {
		if strings.Contains(path, "gpu-cdi-plugin") {
			t.Errorf("%s is still there", path)
		}
	}
}

func TestTheLauncherMountsATmpfsOnce(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	dir := filepath.Join(t.TempDir(), "mps", "shm")
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	for range 2 {
		proc.Must(t, 0, proc.Cmd{Args: []string{shared.Program(t, "launcher"), "tmpfs", dir, "size=1m,mode=1777"}})
	}
	mounts, err := os.ReadFile("/proc/thread-self/mounts")
	testenv.Must(t, err)
	want := "gpu-cdi-plugin " + dir + " tmpfs rw,nosuid,nodev,noexec,"
	if strings.Count(string(mounts), want) != 1 || !strings.Contains(string(mounts), "size=1024k") {
		t.Errorf("want one mount like %q, got\n%s", want, mounts)
	}
	r := proc.Must(t, 1, proc.Cmd{Args: []string{shared.Program(t, "launcher"), "tmpfs", dir + "/other", "size=x"}})
	if !strings.Contains(r.Stderr, "size=x") {
		t.Errorf("the error is %v", r)
	}
}

func TestTheLauncherExplainsWrongArguments(t *testing.T) {
	launcher := shared.Program(t, "launcher")
	for _, args := range [][]string{{}, {"run"}, {"wait", "x"}, {"install"}, {"--nothing", "run"}} {
		r := proc.Must(t, 2, proc.Cmd{Args: append([]string{launcher}, args...)})
		if !strings.Contains(r.Stderr, "launcher --help") {
			t.Errorf("%q: %v", args, r)
		}
	}
	r := proc.Must(t, 0, proc.Cmd{Args: []string{launcher, "--help"}})
	if !strings.HasPrefix(r.Stdout, "Usage: launcher") {
		t.Errorf("the help is %v", r)
	}
}
