package dist

import (
	"bytes"
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/guide"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// modprobe makes the node of unified memory on the simulated host, as the driver's nvidia-modprobe does.
const modprobe = `#!/bin/sh
echo "$*" >>/sim/modprobe.log
mknod /sim/dev/nvidia-uvm c 511 0
`

// emptyRoot makes a directory for testdata/boot.sh, with no files of its own.
func emptyRoot(t *testing.T) string {
	t.Helper()
	testenv.Root(t)
	dir := t.TempDir()
	for _, name := range []string{"root", "scratch", "out", "files/srv"} {
		testenv.Must(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
	}
	testenv.Must(t, os.Chmod(dir, 0o755))
	return dir
}

// newRoot makes a directory for testdata/boot.sh, with the packages, a simulated driver and a container's root.
func newRoot(t *testing.T) string {
	t.Helper()
	release, dir := releaseDir(t), emptyRoot(t)
	files := filepath.Join(dir, "files")
	testenv.Must(t, os.Mkdir(filepath.Join(files, "srv/image"), 0o755))
	deb := filepath.Join(release, "gpu-cdi-plugin_1.2.3_amd64.deb")
	image.CopyFile(t, deb, filepath.Join(files, "srv/new.deb"))
	image.CopyFile(t, filepath.Join(release, "device-manager_1.2.3_amd64.deb"), filepath.Join(files, "srv/manager.deb"))
	image.CopyFile(t, filepath.Join(release, "gpu-cdi-plugin-1.2.3-1.x86_64.rpm"), filepath.Join(files, "srv/new.rpm"))
	image.CopyFile(t, filepath.Join(release, "device-manager-1.2.3-1.x86_64.rpm"), filepath.Join(files, "srv/manager.rpm"))
	older(t, deb, filepath.Join(files, "srv/old.deb"))
	testenv.Must(t, os.Mkdir(filepath.Join(files, "srv/dist"), 0o755),
		os.Link(filepath.Join(files, "srv/new.deb"), filepath.Join(files, "srv/dist", filepath.Base(deb))),
		os.WriteFile(filepath.Join(files, "srv/guide.sh"), []byte(installGuide(t)), 0o644))
	const archive = "gpu-cdi-plugin_1.2.3_linux_amd64.tar.gz"
	image.CopyFile(t, filepath.Join(release, archive), filepath.Join(files, "srv/dist", archive))
	for script, at := range map[string]struct{ document, heading string }{
		"without.sh":        {"docs/install.md", "Without packages"},
		"remove-without.sh": {"docs/install.md", "Remove it without packages"},
		"no-hook.sh":        {"docs/podman.md", "Without the hook"},
	} {
		block := guide.BlocksByHeading(t, at.document)[at.heading]
		if block == "" {
			t.Errorf("%s has no commands under %q", at.document, at.heading)
		}
		testenv.Must(t, os.WriteFile(filepath.Join(files, "srv", script), []byte(block), 0o644))
	}
	testenv.Must(t, image.Build(t.Context(), image.Static, filepath.Join(files, "srv/image")))

	_, after, _ := strings.Cut(guide.Read(t, "docs/install.md"), "```ini\n")
	dropIn, _, _ := strings.Cut(after, "```")
	testenv.Must(t, os.WriteFile(filepath.Join(files, "srv/metrics.conf"), []byte(dropIn), 0o644))

	node := simtest.Node(t, "workstation").Root()
	proc.Must(t, 0, proc.Cmd{Args: []string{"cp", "-a", node, filepath.Join(files, "sim")}}) // with its device nodes
	testenv.Must(t, os.Remove(filepath.Join(files, "sim/dev/nvidia-uvm")),
		os.WriteFile(filepath.Join(files, "sim/usr/bin/nvidia-modprobe"), []byte(modprobe), 0o755))
	for _, unit := range []string{"gpu-cdi-watch", "gpu-cdi-plugin", "gpu-cdi-mps@", "device-manager"} {
		dropIn := filepath.Join(files, "etc/systemd/system", unit+".service.d")
		testenv.Must(t, os.MkdirAll(dropIn, 0o755),
			os.WriteFile(filepath.Join(dropIn, "sim.conf"), []byte("[Service]\nEnvironment=GPU_CDI_ROOT=/sim\n"), 0o644))
	}
	return dir
}

// installGuide returns the commands of the guide for the throw-away root, where the release is made already and doctor
// has findings about this machine.
func installGuide(t *testing.T) string {
	t.Helper()
	text := guide.First(t, "docs/install.md")
	for from, to := range map[string]string{
		"make dist\n": "", "gpu-cdi-plugin doctor\n": "gpu-cdi-plugin doctor || [ $? -eq 4 ]\n",
	} {
		if !strings.Contains(text, from) {
			t.Errorf("docs/install.md has no command %q", from)
		}
		text = strings.Replace(text, from, to, 1)
	}
	return text
}

// older makes a package of an earlier version out of another one.
func older(t *testing.T, from, to string) {
	t.Helper()
	tree := t.TempDir()
	proc.Must(t, 0, proc.Cmd{Args: []string{"dpkg-deb", "--raw-extract", from, tree}})
	control := filepath.Join(tree, "DEBIAN/control")
	text := strings.Replace(string(readFile(t, control)), "Version: 1.2.3", "Version: 1.2.2", 1)
	testenv.Must(t, os.WriteFile(control, []byte(text), 0o644))
	proc.Must(t, 0, proc.Cmd{Args: []string{"dpkg-deb", "--build", "-Zgzip", "-z1", "--root-owner-group", tree, to}})
}

// removeSystemdsCgroups removes, at the end of the test, the cgroups that a systemd leaves when it ends.
func removeSystemdsCgroups(t *testing.T) {
	t.Helper()
	list := func() map[string]bool {
		names := map[string]bool{}
		for _, pattern := range []string{"init.scope", "*.slice", "*.mount"} {
			found, err := filepath.Glob("/sys/fs/cgroup/unified/" + pattern)
			testenv.Must(t, err)
			for _, path := range found {
				names[filepath.Base(path)] = true
			}
		}
		return names
	}
	before := list()
	t.Cleanup(func() {
		for name := range list() {
			if !before[name] {
				testenv.Must(t, engine.RemoveCgroups("/"+name))
			}
		}
	})
}

// boot runs a script of testdata in a throw-away root, for which dir has been prepared, and returns the files that are
// left.
func boot(t *testing.T, dir, script string, mode ...string) []string {
	t.Helper()
	testenv.MountNamespace(t)
	t.Cleanup(func() {
		_ = unix.Unmount(filepath.Join(dir, "root"), unix.MNT_DETACH)
		_ = unix.Unmount(filepath.Join(dir, "scratch"), unix.MNT_DETACH)
	})
	removeSystemdsCgroups(t)
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	r, err := proc.Run(ctx, proc.Cmd{
		Args: append([]string{"/bin/sh", "testdata/boot.sh", dir, "testdata/" + script}, mode...),
	})
	testenv.Must(t, err)
	log, _ := os.ReadFile(filepath.Join(dir, "out/log"))
	if !strings.HasSuffix(string(log), "PASS\n") {
		t.Fatalf("%s:\n%s\n%s", script, r, log)
	}
	var left []string
	upper := filepath.Join(dir, "scratch/upper")
	testenv.Must(t, filepath.WalkDir(upper, func(path string, e fs.DirEntry, err error) error {
		name := strings.TrimPrefix(path, upper+"/")
		_, given := os.Lstat(filepath.Join(dir, "files", name))
		if err == nil && given != nil && (!e.IsDir() || isOurs(name)) {
			left = append(left, name)
		}
		return err
	}))
	return left
}

// TestThePackageNamesNVIDIAsRefresh runs the package's script for a root in which NVIDIA's toolkit is installed.
func TestThePackageNamesNVIDIAsRefresh(t *testing.T) {
	const etc, lib = "etc/systemd/system/", "lib/systemd/system/"
	script, err := os.ReadFile("../../deploy/packages/gpu-cdi-plugin.postinst.sh")
	testenv.Must(t, err)
	for name, c := range map[string]struct {
		files []string // a name that ends with @ is a link to /dev/null
		want  string   // "" for no message
	}{
		"no toolkit": {},
		"a toolkit whose udev rule starts the service": {
			[]string{lib + "nvidia-cdi-refresh.path", lib + "nvidia-cdi-refresh.service", "run/cdi/nvidia.yaml"},
			"systemctl mask --now nvidia-cdi-refresh.path; systemctl mask --now nvidia-cdi-refresh.service; rm -f ",
		},
		"only its spec": {[]string{"etc/cdi/nvidia.yaml"}, "- this package: rm -f /etc/cdi/nvidia.yaml"},
		"units that are masked": {[]string{
			etc + "nvidia-cdi-refresh.path@", lib + "nvidia-cdi-refresh.path",
			etc + "nvidia-cdi-refresh.service@", lib + "nvidia-cdi-refresh.service",
		}, ""},
		"an older toolkit, whose units cannot be masked": {
			[]string{etc + "nvidia-cdi-refresh.path", etc + "multi-user.target.wants/nvidia-cdi-refresh.path"},
			"- this package: systemctl disable --now nvidia-cdi-refresh.path; rm -f ",
		},
		"an older toolkit, whose units are disabled": {[]string{etc + "nvidia-cdi-refresh.path"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for _, file := range c.files {
				path := filepath.Join(root, strings.TrimSuffix(file, "@"))
				testenv.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
				if strings.HasSuffix(file, "@") {
					testenv.Must(t, os.Symlink("/dev/null", path))
				} else {
					testenv.Must(t, os.WriteFile(path, nil, 0o644))
				}
			}
			res, err := proc.Run(t.Context(), proc.Cmd{
				Args: []string{"sh", "-s", "configure", ""}, Stdin: bytes.NewReader(script),
				Env: []string{"DPKG_ROOT=" + root, "PATH=" + os.Getenv("PATH")},
			})
			testenv.Must(t, err)
			got := strings.Contains(res.Stderr, "NVIDIA's CDI refresh is here too")
			if res.Code != 0 || got != (c.want != "") || !strings.Contains(res.Stderr, c.want) {
				t.Errorf("want %q, got %v", c.want, res)
			}
		})
	}
}

// TestSlowThePackageWithoutSystemd compares the root file by file: only dpkg's own records may differ in the end.
func TestSlowThePackageWithoutSystemd(t *testing.T) {
	for _, name := range boot(t, newRoot(t), "chroot.sh") {
		// The last two are the simulated host, and what boot.sh removes.
		if !isLog(name) && !strings.HasPrefix(name, "sim/") && name != "var/lib/kubelet" {
			t.Errorf("%s is left, or was changed", name)
		}
	}
}

// isOurs reports whether a file is named like those of the packages.
func isOurs(name string) bool {
	return strings.Contains(name, "gpu-cdi") || strings.Contains(name, "device-manager")
}

// isLog reports whether a file is one of dpkg or of the system's log.
func isLog(name string) bool {
	return strings.HasPrefix(name, "var/lib/dpkg/") || strings.HasPrefix(name, "var/log/")
}

// TestSlowThePackageUnderSystemd has a real systemd as process 1. It writes files of its own.
func TestSlowThePackageUnderSystemd(t *testing.T) {
	testenv.Command(t, "/lib/systemd/systemd")
	testenv.Command(t, "podman")
	for _, name := range boot(t, newRoot(t), "systemd.sh", "systemd") {
		if isOurs(name) && !isLog(name) {
			t.Errorf("%s is left", name)
		}
	}
}
