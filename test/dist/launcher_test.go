package dist

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

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
