package install

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// root is a host in a directory, with a hook.
type root struct {
	t         *testing.T
	dir, hook string
}

func newRoot(t *testing.T) *root {
	t.Helper()
	if os.Geteuid() != 0 {
		testenv.Skip(t, "needs root")
	}
	r := &root{t, filepath.Join(t.TempDir(), "root"), "/sbin/prestart-hook"}
	r.write(r.hook, "#!/bin/true\n", 0o755)
	r.write("etc/docker/daemon.json", `{"debug": true}`, 0o600)
	r.write("etc/containerd/config.toml", "version = 2", 0o640)
	r.write("etc/crio/crio.conf", "[crio]\n", 0o644)
	r.must(os.Mkdir(filepath.Join(r.dir, "run"), 0o755))
	for _, name := range []string{"etc/docker/daemon.json", "etc/containerd/config.toml"} {
		r.must(os.Chown(filepath.Join(r.dir, name), 12, 34))
	}
	return r
}

func (r *root) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *root) write(name, content string, mode fs.FileMode) {
	r.t.Helper()
	path := filepath.Join(r.dir, name)
	r.must(os.MkdirAll(filepath.Dir(path), 0o755))
	r.must(os.WriteFile(path, []byte(content), mode))
}

// snapshot describes all that is in the root and beside it.
func (r *root) snapshot() map[string]string {
	r.t.Helper()
	all := map[string]string{}
	r.must(filepath.WalkDir(filepath.Dir(r.dir), func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		content, _ := os.Readlink(path)
		if info.Mode().IsRegular() {
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			content = string(data)
		}
		all[path] = fmt.Sprintf("%v %d:%d %s", info.Mode(), st.Uid, st.Gid, content)
		return nil
	}))
	return all
}

func everything() []string {
	var names []string
	for _, e := range Engines() {
		names = append(names, e.Name)
	}
	return names
}

func (r *root) install(engines ...string) (err error) {
	if engines == nil {
		engines = everything()
	}
	release, err := Lock(r.dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	h, err := Read(r.dir, engines, r.hook)
	if err != nil {
		return err
	}
	p, err := h.Install(engines, r.hook)
	if err != nil {
		return err
	}
	return p.Apply()
}

func (r *root) uninstall() error {
	h, err := Read(r.dir, everything(), "")
	if err != nil {
		return err
	}
	p, err := h.Uninstall(everything())
	if err != nil {
		return err
	}
	return p.Apply()
}

func TestApply(t *testing.T) {
	r := newRoot(t)
	before := r.snapshot()
	r.must(r.install())
	installed := r.snapshot()
	for name, want := range map[string]string{
		"etc/docker/daemon.json":     "-rw------- 12:34 ",
		"etc/containerd/config.toml": "-rw-r----- 12:34 ",
		crioDropIn:                   "-rw-r--r-- 0:0 ",
		precreate:                    "-rw-r--r-- 0:0 ",
		filepath.Dir(precreate):      "drwxr-xr-x 0:0 ",
		"sbin/gpu-cdi-runtime":       "Lrwxrwxrwx 0:0 prestart-hook",
	} {
		path := filepath.Join(r.dir, name)
		if !strings.HasPrefix(installed[path], want) || installed[path] == before[path] {
			t.Errorf("%s: %q, want %q", path, installed[path], want)
		}
	}
	r.must(r.install())
	if diff := cmp.Diff(installed, r.snapshot()); diff != "" {
		t.Errorf("a second Install (-before +after):\n%s", diff)
	}
	r.must(r.uninstall())
	if diff := cmp.Diff(before, r.snapshot()); diff != "" {
		t.Errorf("Uninstall (-before +after):\n%s", diff)
	}
}

// containerd 1 replaces the settings of CRI by those of an imported file, so our part belongs there. An imported file
// can be a link: only a file that is changed must not be one.
func TestImportsOfContainerd(t *testing.T) {
	r := newRoot(t)
	r.write("etc/containerd/config.toml", "version = 2\nimports = ['site/*']\n", 0o644)
	r.write("etc/containerd/site/a.conf", "version = 2\nimports = ['/srv/cri.toml', '/srv/last.toml', '/srv/none.toml']\n",
		0o644)
	r.must(os.Symlink("../config.toml", filepath.Join(r.dir, "etc/containerd/site/b.toml")))
	r.write("srv/cri.toml", "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd]\n", 0o644)
	r.write("srv/last.toml", "version = 2\n", 0o644)
	before := r.snapshot()
	r.must(r.install())
	for name, want := range map[string]bool{
		"etc/containerd/config.toml": false, "srv/cri.toml": true, "srv/last.toml": false,
	} {
		data, err := os.ReadFile(filepath.Join(r.dir, name))
		if err != nil || strings.Contains(string(data), "runtimes.gpu-cdi") != want {
			t.Errorf("%s, %v:\n%s", name, err, data)
		}
	}
	r.must(r.uninstall())
	if diff := cmp.Diff(before, r.snapshot()); diff != "" {
		t.Errorf("Uninstall (-before +after):\n%s", diff)
	}
}

func TestAReadOnlyDirectory(t *testing.T) {
	testenv.MountNamespace(t)
	r := newRoot(t)
	usr := filepath.Join(r.dir, "usr")
	r.must(os.Mkdir(usr, 0o755))
	r.must(unix.Mount("none", usr, "tmpfs", unix.MS_RDONLY, ""))
	t.Cleanup(func() { _ = unix.Unmount(usr, unix.MNT_DETACH) })
	before := r.snapshot()
	if err := r.install(); !errors.As(err, new(*ReadOnlyError)) {
		t.Errorf("got the error %v", err)
	}
	if diff := cmp.Diff(before, r.snapshot()); diff != "" {
		t.Errorf("Install (-before +after):\n%s", diff)
	}
}

func TestAnEmptyDaemonFile(t *testing.T) {
	r := newRoot(t)
	r.write("etc/docker/daemon.json", "", 0o644)
	before := r.snapshot()
	r.must(r.install("docker"))
	r.must(r.uninstall())
	if diff := cmp.Diff(before, r.snapshot()); diff != "" {
		t.Errorf("Uninstall (-before +after):\n%s", diff)
	}
}

// systemd takes a unit that is a link to /dev/null as an empty one, in place of the unit of a later directory.
func TestAMaskedUnit(t *testing.T) {
	r := newRoot(t)
	r.must(os.MkdirAll(filepath.Join(r.dir, "etc/systemd/system"), 0o755))
	r.must(os.Symlink("/dev/null", filepath.Join(r.dir, "etc/systemd/system/docker.service")))
	r.write("usr/lib/systemd/system/docker.service", "[Service]\nExecStart=dockerd --config-file=/x.json\n", 0o644)
	r.must(r.install("docker"))
}

// If one file cannot be written, none is.
func TestApplyTakesBackWhatItDid(t *testing.T) {
	r := newRoot(t)
	r.write("usr/share/containers", "a file in place of a directory", 0o644)
	before := r.snapshot()
	if err := r.install(); err == nil || !strings.Contains(err.Error(), "usr/share/containers") {
		t.Errorf("got the error %v", err)
	}
	if diff := cmp.Diff(before, r.snapshot()); diff != "" {
		t.Errorf("Install (-before +after):\n%s", diff)
	}
}

// Processes that install at the same time wait for each other, so that Uninstall knows what all of them have done.
func TestInstallAtTheSameTime(t *testing.T) {
	r := newRoot(t)
	before := r.snapshot()
	for range 10 {
		done := make(chan error)
		for _, engine := range everything() {
			go func() { done <- r.install(engine) }()
		}
		for range everything() {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		r.must(r.uninstall())
		if diff := cmp.Diff(before, r.snapshot()); diff != "" {
			t.Fatalf("Uninstall (-before +after):\n%s", diff)
		}
	}
}

// A file that another process has replaced since it was written is not taken back.
func TestApplyTakesBackOnlyItsOwn(t *testing.T) {
	r := newRoot(t)
	h, err := Read(r.dir, everything(), r.hook)
	r.must(err)
	r.must(h.apply(Change{crioDropIn, nil, &File{Data: []byte("ours")}}))
	r.write(crioDropIn, "another's", 0o644)
	err = h.apply(Change{crioDropIn, &File{Data: []byte("ours")}, nil})
	if err == nil || !strings.Contains(err.Error(), "has changed since") {
		t.Errorf("got the error %v", err)
	}
	if data, err := os.ReadFile(filepath.Join(r.dir, crioDropIn)); string(data) != "another's" {
		t.Errorf("it is %q, %v", data, err)
	}
}

func TestApplyToChangedFiles(t *testing.T) {
	for _, name := range []string{daemonFile, crioDropIn} {
		r := newRoot(t)
		h, err := Read(r.dir, everything(), r.hook)
		r.must(err)
		p, err := h.Install(everything(), r.hook)
		r.must(err)
		r.write(name, "{}", 0o644)
		before := r.snapshot()
		if err := p.Apply(); err == nil || !strings.Contains(err.Error(), name+": it has changed since it was read") {
			t.Errorf("got the error %v", err)
		}
		if diff := cmp.Diff(before, r.snapshot()); diff != "" {
			t.Errorf("Install (-before +after):\n%s", diff)
		}
	}
}

// Links below another root lead where they do in that root, as absolute links of an image do.
func TestLinksDoNotLeadOutOfTheRoot(t *testing.T) {
	for name, prefix := range map[string]string{"absolute links": "", "links upwards": strings.Repeat("../", 40)} {
		t.Run(name, func(t *testing.T) {
			r := newRoot(t)
			outside := filepath.Join(t.TempDir(), "outside")
			r.must(os.RemoveAll(filepath.Join(r.dir, "run")))
			for _, link := range []string{"etc/crio", "etc/docker", "run", "usr", "var"} {
				there := filepath.Join(outside, filepath.Base(link))
				r.must(os.MkdirAll(there, 0o755))
				r.must(os.RemoveAll(filepath.Join(r.dir, link)))
				r.must(os.MkdirAll(filepath.Join(r.dir, there), 0o755))
				r.must(os.Symlink(prefix+there, filepath.Join(r.dir, link)))
			}
			r.write(filepath.Join(outside, "docker/daemon.json"), `{"debug": true}`, 0o600)
			before := r.snapshot()
			r.must(r.install())
			daemon, err := os.ReadFile(filepath.Join(r.dir, outside, "docker/daemon.json"))
			if !strings.Contains(string(daemon), `"debug": true`) || !strings.Contains(string(daemon), runtimeName) {
				t.Errorf("daemon.json in the root: %q, %v", daemon, err)
			}
			if files, err := filepath.Glob(outside + "/*/*"); err != nil || len(files) > 0 {
				t.Errorf("outside the root: %q, %v", files, err)
			}
			r.must(r.uninstall())
			if diff := cmp.Diff(before, r.snapshot()); diff != "" {
				t.Errorf("Uninstall (-before +after):\n%s", diff)
			}
		})
	}
}

// Read does not wait, and reads regular files of a limited size only.
func TestReadOfHostileFiles(t *testing.T) {
	for name, c := range map[string]struct {
		make func(path string) error
		want string
	}{
		"a FIFO":      {func(path string) error { return unix.Mkfifo(path, 0o644) }, "is a FIFO"},
		"a directory": {func(path string) error { return os.Mkdir(path, 0o755) }, "is a directory"},
		"a device": {func(path string) error {
			return unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5)))
		}, "is a character device"},
		"a huge file": {func(path string) error {
			return os.WriteFile(path, make([]byte, maxFile+1), 0o644)
		}, "the limit is"},
		"a dangling link": {func(path string) error { return os.Symlink("none", path) }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoot(t)
			path := filepath.Join(r.dir, daemonFile)
			r.must(os.Remove(path))
			r.must(c.make(path))
			before := r.snapshot()
			if err := r.install(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got the error %v, want %q", err, c.want)
			}
			if diff := cmp.Diff(before, r.snapshot()); diff != "" {
				t.Errorf("Install (-before +after):\n%s", diff)
			}
		})
	}
}
