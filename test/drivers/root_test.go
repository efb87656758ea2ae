package drivers

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// release is where Debian has a branch of the driver.
type release struct{ branch, suite, source string }

var releases = []release{
	{"470", "bullseye", "nvidia-graphics-drivers"},
	{"525", "bookworm", "nvidia-graphics-drivers-tesla"},
	{"535", "bookworm", "nvidia-graphics-drivers"},
	{"550", "trixie", "nvidia-graphics-drivers"},
	{"555", "experimental", "nvidia-graphics-drivers"},
}

// The base system of all roots has what the driver's libraries are linked with, and NVIDIA's programs that have a
// version of their own.
var (
	baseSuite    = "trixie"
	basePackages = strings.Fields(`libstdc++6 libgcc-s1 libx11-6 libx11-xcb1 libxext6 libxcb-dri2-0 libxcb-dri3-0
		libxcb-present0 libxcb-randr0 libxcb-sync1 libxcb-xfixes0 libgbm1 libdrm2 libwayland-client0 libwayland-server0
		libglvnd0 libegl1 libgl1 libgles1 libgles2 libopengl0 libvdpau1 libvulkan1 libssl3t64 libdbus-1-3
		libnvidia-egl-wayland1 libnvidia-egl-gbm1 nvidia-modprobe nvidia-persistenced glx-alternative-nvidia`)
)

const (
	// The exit status of root.sh if the archive cannot be reached, and if it has not what is wanted.
	statusUnreachable = 69
	statusGone        = 3

	unpackLimit = 15 * time.Minute
	libDir      = "usr/lib/x86_64-linux-gnu"
)

// driver is a driver in a root.
type driver struct {
	version string
	// root is a host on which the driver is installed and its kernel module is not loaded.
	root string
	// base is the same host without the driver.
	base string
}

// TestDrivers runs all checks with each of the selected drivers, one after the other: a root takes a gigabyte.
func TestDrivers(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the lists of files are those of amd64")
	}
	testenv.Root(t)
	for _, program := range []string{"dpkg-deb", "apt-get", "tar", "flock"} {
		testenv.Command(t, program)
	}
	base := filepath.Join(t.TempDir(), "base")
	unpack(t, append([]string{"base", baseSuite, base}, basePackages...)...)
	for _, r := range selected(t) {
		t.Run(r.branch, func(t *testing.T) {
			d := install(t, r, base)
			t.Run("without the kernel module", d.testWithoutModule)
			t.Run("functions", d.testFunctions)
			n := d.node(t)
			t.Run("files", n.testFiles)
			t.Run("containers", n.testContainers)
			t.Run("nvidia-ctk", n.testPeer)
			t.Run("mps", n.testMPS)
		})
	}
}

func selected(t *testing.T) []release {
	t.Helper()
	if *branches == "all" {
		return releases
	}
	var list []release
	for branch := range strings.SplitSeq(*branches, ",") {
		i := slices.IndexFunc(releases, func(r release) bool { return r.branch == branch })
		if i < 0 {
			t.Fatalf("-drivers: unknown branch %q", branch)
		}
		list = append(list, releases[i])
	}
	return list
}

// unpack runs root.sh. What the archive no longer has is skipped, in CI too.
func unpack(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), unpackLimit)
	defer cancel()
	res, err := proc.Run(ctx, proc.Cmd{Args: append([]string{"sh", "testdata/root.sh"}, args...)})
	testenv.Must(t, err)
	switch res.Code {
	case 0:
	case statusGone:
		t.Skip("gone from the archive: " + strings.TrimSpace(res.Stderr))
	case statusUnreachable:
		testenv.Skip(t, "needs Debian's archive: "+strings.TrimSpace(res.Stderr))
	default:
		t.Fatalf("root.sh: %v", res)
	}
	t.Logf("%s unpacked in %v", strings.Join(args[:2], " "), res.Wall.Round(time.Second))
	return strings.TrimSpace(res.Stdout)
}

// install installs a driver over a copy of the base system.
func install(t *testing.T, r release, base string) *driver {
	t.Helper()
	root := filepath.Join(t.TempDir(), "root")
	copyTree(t, base, root)
	version := unpack(t, "driver", r.suite, root, r.source, r.branch)
	if version == "" {
		t.Fatal("the packages have no libnvidia-ml")
	}
	t.Logf("the driver is %s", version)
	return &driver{version: version, root: root, base: base}
}

// branch is the driver's major version.
func (d *driver) branch() int {
	major, _, _ := strings.Cut(d.version, ".")
	branch, _ := strconv.Atoi(major)
	return branch
}

// copyTree copies a tree by hard links, since no test writes into its files.
func copyTree(t *testing.T, from, to string) {
	t.Helper()
	proc.Must(t, 0, proc.Cmd{Args: []string{"cp", "-al", from, to}})
}

// node is a host on which the driver is installed and seems to be loaded. The device nodes, /proc, /sys and
// libnvidia-ml are those of a simulated node; all else is the driver's.
type node struct {
	*driver
	root string
}

const machine = "workstation"

func (d *driver) node(t *testing.T) *node {
	t.Helper()
	n := &node{driver: d, root: filepath.Join(t.TempDir(), "node")}
	copyTree(t, d.root, n.root)
	sim := simtest.Node(t, machine, simtest.Driver(d.version))
	for _, name := range []string{"dev", "proc", "sys", "run"} {
		proc.Must(t, 0, proc.Cmd{Args: []string{"cp", "-aT", filepath.Join(sim.Root(), name), filepath.Join(n.root, name)}})
	}
	// The simulated library finds its node by its own place, so it cannot lie where the real one is.
	library := filepath.Join(n.root, libDir, "libnvidia-ml.so")
	proc.Must(t, 0, proc.Cmd{Args: []string{"cp", sim.Library(), library + "." + d.version}})
	_ = os.Remove(library + ".1")
	testenv.Must(t, os.Symlink(filepath.Base(library)+"."+d.version, library+".1"))
	return n
}

// plugin runs gpu-cdi-plugin on a root, and ends the test unless the exit status is want.
func plugin(t *testing.T, want int, root string, args ...string) proc.Result {
	t.Helper()
	global := []string{shared.Program(t, "gpu-cdi-plugin"), "--root", root, "--cdi-dir", filepath.Join(root, "run/cdi")}
	return proc.Must(t, want, proc.Cmd{Args: withoutDev(append(global, args...)...)})
}

// withoutDev returns a command that runs a program with a /dev of its own: without a kernel module the real library
// makes /dev/nvidiactl on this machine.
func withoutDev(args ...string) []string {
	return append([]string{
		"unshare", "--mount", "--propagation", "private", "sh", "-c",
		`mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && exec "$@"`, "sh",
	}, args...)
}

// contains ends the test unless a text contains another one.
func contains(t *testing.T, what, text, want string) {
	t.Helper()
	if !strings.Contains(text, want) {
		t.Errorf("%s: want %q in\n%s", what, want, text)
	}
}
