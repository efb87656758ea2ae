package driver

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/ldcache"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestDiscoverFindsLibraries(t *testing.T) {
	t.Parallel()
	core := func(dir string) []string {
		return []string{dir + "/libcuda.so." + testVersion, dir + "/libnvidia-ml.so." + testVersion}
	}
	for name, c := range map[string]struct {
		make func(*tree)
		want []string
	}{
		"in Debian's multiarch directory": {
			func(r *tree) { r.core(multiarchDir, testVersion) }, core(multiarchDir),
		},
		"in /usr/lib64, as on Fedora": {
			func(r *tree) { r.core("/usr/lib64", testVersion) }, core("/usr/lib64"),
		},
		"in /usr/lib, as on Arch": {
			func(r *tree) { r.core("/usr/lib", testVersion) }, core("/usr/lib"),
		},
		"in /usr/local/nvidia/lib64, as on container hosts": {
			func(r *tree) { r.core("/usr/local/nvidia/lib64", testVersion) }, core("/usr/local/nvidia/lib64"),
		},
		"once, where /lib is a link to /usr/lib": {
			func(r *tree) { r.core(multiarchDir, testVersion); r.link("/lib", "usr/lib") }, core(multiarchDir),
		},
		"in a directory that only the loader's cache has": {
			func(r *tree) {
				r.core("/srv/driver", testVersion)
				r.cache("/srv/driver/libcuda.so.1", "/srv/driver/libnvidia-ml.so.1", "/srv/other/libfoo.so.1")
			}, core("/srv/driver"),
		},
		"but not those for another machine in the cache": {
			func(r *tree) {
				r.core("/usr/lib64", testVersion)
				r.library("/srv/lib32/libnvcuvid.so." + testVersion)
				c := &ldcache.Cache{Entries: []ldcache.Entry{
					{Name: "libnvcuvid.so.1", Path: "/srv/lib32/libnvcuvid.so.1", Flags: 3},
				}}
				r.file("/etc/ld.so.cache", string(c.Marshal()), 0o644)
			}, core("/usr/lib64"),
		},
		"in the usual directories, with a damaged cache": {
			func(r *tree) { r.core("/usr/lib64", testVersion); r.file("/etc/ld.so.cache", "garbage", 0o644) },
			core("/usr/lib64"),
		},
		"in the usual directories, with a FIFO as cache": {
			func(r *tree) { r.core("/usr/lib64", testVersion); r.fifo("/etc/ld.so.cache") }, core("/usr/lib64"),
		},
		"behind the links of Debian's alternatives": {
			func(r *tree) {
				r.core("/usr/lib/nvidia/tesla-580", testVersion)
				r.link(multiarchDir+"/libcuda.so.1", "/etc/alternatives/nvidia--libcuda.so.1")
				r.link("/etc/alternatives/nvidia--libcuda.so.1", "/usr/lib/nvidia/tesla-580/libcuda.so.1")
			}, core("/usr/lib/nvidia/tesla-580"),
		},
		"in a store behind links, as on NixOS": {
			func(r *tree) {
				r.core("/nix/store/abc-nvidia-x11/lib", testVersion)
				r.link("/run/opengl-driver/lib/libcuda.so.1", "/nix/store/abc-nvidia-x11/lib/libcuda.so.1")
			}, core("/nix/store/abc-nvidia-x11/lib"),
		},
		"in two directories": {
			func(r *tree) {
				r.core(multiarchDir, testVersion)
				r.library("/usr/lib64/libnvidia-encode.so." + testVersion)
			}, append(core(multiarchDir), "/usr/lib64/libnvidia-encode.so."+testVersion),
		},
		"with any name and the driver's version": {
			func(r *tree) {
				r.core("/usr/lib64", testVersion)
				r.library("/usr/lib64/libnvidia-new.so." + testVersion)
			},
			append(core("/usr/lib64"), "/usr/lib64/libnvidia-new.so."+testVersion),
		},
		"with a version of their own, the newest of each": {
			func(r *tree) {
				r.core("/usr/lib64", testVersion)
				r.library("/usr/lib64/libnvidia-egl-gbm.so.1.1.2")
				r.library("/usr/lib64/libnvidia-egl-gbm.so.1.1.3")
				r.library(multiarchDir + "/libnvidia-egl-gbm.so.1.1.4")
				r.library("/usr/lib64/libnvidia-egl-xcb.so.1.0.1")
				r.library("/usr/lib64/libnvidia-egl-xcb.so.1.0.2")
				r.library("/usr/lib64/libnvidia-egl-gbm.so.1.1.10")
				r.link("/usr/lib64/libnvidia-egl-gbm.so.1", "libnvidia-egl-gbm.so.1.1.10")
				r.library("/usr/lib64/libnvidia-nvvm70.so.4")
			}, append(core("/usr/lib64"), "/usr/lib64/libnvidia-egl-gbm.so.1.1.10",
				"/usr/lib64/libnvidia-egl-xcb.so.1.0.2", "/usr/lib64/libnvidia-nvvm70.so.4"),
		},
		"in the next directory, if the first copy is damaged": {
			func(r *tree) {
				r.file("/usr/lib64/libcuda.so."+testVersion, "text", 0o755)
				r.core("/usr/local/nvidia/lib64", testVersion)
			}, core("/usr/local/nvidia/lib64"),
		},
		"in subdirectories, for video and for the X server": {
			func(r *tree) {
				r.core("/usr/lib64", testVersion)
				r.library("/usr/lib64/vdpau/libvdpau_nvidia.so." + testVersion)
				r.library("/usr/lib64/nvidia/xorg/nvidia_drv.so")
				r.library("/usr/lib64/xorg/modules/extensions/libglxserver_nvidia.so." + testVersion)
			}, append(core("/usr/lib64"), "/usr/lib64/nvidia/xorg/nvidia_drv.so",
				"/usr/lib64/vdpau/libvdpau_nvidia.so."+testVersion,
				"/usr/lib64/xorg/modules/extensions/libglxserver_nvidia.so."+testVersion),
		},
		"but not those of another version": {
			func(r *tree) { r.core("/usr/lib64", testVersion); r.library("/usr/lib64/libnvcuvid.so.575.57.08") },
			core("/usr/lib64"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newTree(t)
			c.make(r)
			slices.Sort(c.want)
			d := r.discover(testVersion)
			if diff := cmp.Diff(c.want, libraryPaths(d)); diff != "" {
				t.Errorf("libraries (-want +got):\n%s", diff)
			}
			for _, l := range d.Libraries {
				if l.HostPath != r.dir+l.Path {
					t.Errorf("%s is %s on the host, want it under %s", l.Path, l.HostPath, r.dir)
				}
			}
		})
	}
}

// All files of the driver are found, wherever it is installed.
func TestDiscoverInOtherDirectories(t *testing.T) {
	files := func(dir string) []string {
		n := simtest.Node(t, "workstation", simtest.LibDir(dir))
		h, err := host.New(n.Root(), "", "")
		testenv.Must(t, err)
		d, err := Discover(h, "")
		testenv.Must(t, err)
		var names []string
		for _, l := range d.Libraries {
			names = append(names, filepath.Base(l.Path))
			if strings.HasPrefix(filepath.Base(l.Path), "libcuda.so") && filepath.Dir(l.Path) != "/"+dir {
				t.Errorf("libcuda is %s in a container, the driver is in %s", l.Path, dir)
			}
		}
		for _, f := range d.Files {
			names = append(names, filepath.Base(f.Path))
		}
		return sorted(names)
	}
	want := files(multiarchDir[1:])
	for _, dir := range []string{"usr/lib64", "usr/local/nvidia/lib64", multiarchDir[1:] + "/nvidia/current"} {
		if diff := cmp.Diff(want, files(dir)); diff != "" {
			t.Errorf("files with the driver in %s (-multiarch +there):\n%s", dir, diff)
		}
	}
}

// Links in a driver container are followed as in the container. They cannot lead out of its root.
func TestDiscoverStaysInTheRoot(t *testing.T) {
	t.Parallel()
	outside := newTree(t)
	outside.core("/lib", testVersion)
	outside.file("/nvidia-smi", "", 0o755)
	r := newTree(t)
	r.core("/opt/real", testVersion)
	r.link("/usr/lib64", "/opt/real")
	r.link("/opt/real/libnvidia-encode.so."+testVersion, outside.dir+"/lib/libcuda.so."+testVersion)
	const up = "../../../../../../../../.."
	r.link("/opt/real/libnvcuvid.so."+testVersion, up+outside.dir+"/lib/libcuda.so."+testVersion)
	r.link("/usr/bin/nvidia-smi", outside.dir+"/nvidia-smi")
	d := r.discover(testVersion)
	want := []string{"/opt/real/libcuda.so." + testVersion, "/opt/real/libnvidia-ml.so." + testVersion}
	if diff := cmp.Diff(want, libraryPaths(d)); diff != "" {
		t.Errorf("libraries (-want +got):\n%s", diff)
	}
	if len(d.Files) > 0 {
		t.Errorf("files from outside the root: %v", d.Files)
	}
	f := finding(t, d.Findings, "libnvidia-encode.so."+testVersion)
	if f.Used || f.Note != "a link that leads nowhere" || !strings.HasPrefix(f.Path, r.dir) {
		t.Errorf("finding for a link out of the root: %+v", f)
	}
}

func TestDiscoverReadsTheVersionFromTheFiles(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		make func(*tree)
		want string
	}{
		"of the library behind the SONAME": {func(r *tree) {
			r.core("/usr/lib64", "575.57.08")
			r.library("/usr/lib64/libcuda.so." + testVersion)
		}, "575.57.08"},
		"the newest, without such a link": {func(r *tree) {
			r.library("/usr/lib64/libcuda.so.575.57.08")
			r.library("/usr/lib64/libcuda.so.580.9.1")
			r.library("/usr/lib64/libcuda.so.580.65.06")
		}, "580.65.06"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTree(t)
			c.make(r)
			if got := r.discover("").Version; got != c.want {
				t.Errorf("version %q, want %q", got, c.want)
			}
		})
	}
}

func TestASearchReturnsTheVersionThatTheDriverReports(t *testing.T) {
	t.Parallel()
	const other = "575.57.08"
	for name, c := range map[string]struct {
		version, want string
		wrapped       error
	}{
		"of the version of the files":                   {testVersion, testVersion, nil},
		"of the version of files that no link leads to": {other, other, nil},
		"of a version that no file has":                 {"1.2.3", "", gpu.ErrNoDriver},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTree(t)
			r.core("/usr/lib64", testVersion)
			r.library("/usr/lib64/libcuda.so." + other)
			d, err := Begin(r.host()).Driver(c.version)
			switch {
			case !errors.Is(err, c.wrapped):
				t.Errorf("error %v, want %v", err, c.wrapped)
			case err == nil && d.Version != c.want:
				t.Errorf("version %s, want %s", d.Version, c.want)
			}
		})
	}
}

// Driver does not repeat a discovery that found the version.
func TestASearchRunsInTheBackground(t *testing.T) {
	t.Parallel()
	r := newTree(t)
	r.core("/usr/lib64", testVersion)
	s := Begin(r.host())
	<-s.done
	testenv.Must(t, os.RemoveAll(filepath.Join(r.dir, "usr")))
	if d, err := s.Driver(testVersion); err != nil || d.Version != testVersion {
		t.Errorf("driver %v, error %v", d, err)
	}
}

func TestDiscoverRefusesARootWithoutAUsableDriver(t *testing.T) {
	t.Parallel()
	cuda := "/usr/lib64/libcuda.so." + testVersion
	for name, c := range map[string]struct {
		make func(*tree)
		want []string
		why  error // besides gpu.ErrNoDriver
	}{
		"that is empty": {
			func(*tree) {},
			[]string{"no libcuda or libnvidia-ml", "/usr/lib64", "/usr/local/nvidia/lib64"},
			gpu.ErrNoDriver,
		},
		"with libraries of another version only": {
			func(r *tree) { r.core("/usr/lib64", "575.57.08"); r.core(multiarchDir, "570.1.2") },
			[]string{"the driver has version " + testVersion, "have 570.1.2, 575.57.08"},
			ErrOtherVersion,
		},
		"with a libcuda that is text": {
			func(r *tree) {
				r.core(multiarchDir, testVersion)
				r.file(cuda, "#!/bin/sh", 0o755)
				os.Remove(r.dir + multiarchDir + "/libcuda.so." + testVersion)
			},
			[]string{cuda, "not a usable ELF file"},
			ErrDamaged,
		},
		"with a libcuda that is empty": {
			func(r *tree) { r.file(cuda, "", 0o755) }, []string{cuda}, ErrDamaged,
		},
		"with a libcuda that is truncated": {
			func(r *tree) { r.core("/usr/lib64", testVersion); testenv.Must(r.t, os.Truncate(r.dir+cuda, 300)) },
			[]string{cuda},
			ErrDamaged,
		},
		"with a libcuda whose last page is missing": {
			func(r *tree) {
				r.core("/usr/lib64", testVersion)
				info, err := os.Stat(r.dir + cuda)
				testenv.Must(r.t, err)
				testenv.Must(r.t, os.Truncate(r.dir+cuda, info.Size()/2))
			},
			[]string{cuda},
			ErrDamaged,
		},
		"with a libcuda that is a FIFO": {
			func(r *tree) { r.fifo(cuda) }, []string{cuda, "a FIFO"}, ErrDamaged,
		},
		"with a libcuda that is a directory": {
			func(r *tree) { testenv.Must(r.t, os.MkdirAll(r.dir+cuda, 0o755)) }, []string{cuda, "a directory"}, ErrDamaged,
		},
		"without libcuda": {
			func(r *tree) { r.library("/usr/lib64/libnvidia-ml.so." + testVersion) },
			[]string{"for compute", "no libcuda under ", ": not found"},
			ErrNoCUDA,
		},
		"with a link for libcuda and no file": {
			func(r *tree) {
				r.core("/usr/lib64", testVersion)
				testenv.Must(r.t, os.Remove(r.dir+cuda))
			},
			[]string{"for compute", "no libcuda under ", ": a link that leads nowhere"},
			ErrNoCUDA,
		},
		"with a libnvidia-ml that is empty": {
			func(r *tree) {
				r.core("/usr/lib64", testVersion)
				testenv.Must(r.t, os.Truncate(r.dir+"/usr/lib64/libnvidia-ml.so."+testVersion, 0))
			},
			[]string{"for utility", "libnvidia-ml.so." + testVersion},
			ErrDamaged,
		},
		"with libraries for another machine only": {
			func(r *tree) { writeForeign(r, cuda) }, []string{"no libcuda or libnvidia-ml"}, gpu.ErrNoDriver,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTree(t)
			c.make(r)
			d, err := Discover(r.host(), testVersion)
			if (d == nil) == (err == nil) {
				t.Fatalf("driver %v and error %v, want exactly one", d != nil, err)
			}
			if err == nil {
				err = d.Check(All)
			}
			checkError(t, err, append(c.want, r.dir)...)
			for _, why := range []error{ErrDamaged, ErrOtherVersion, ErrNoCUDA} {
				if errors.Is(err, why) != errors.Is(c.why, why) || !errors.Is(err, gpu.ErrNoDriver) {
					t.Errorf("error %v, want it to wrap %v", err, c.why)
				}
			}
		})
	}
}

func TestDiscoverRefusesARootThatIsNotThere(t *testing.T) {
	h, err := host.New("", filepath.Join(t.TempDir(), "nowhere"), "")
	testenv.Must(t, err)
	_, err = Discover(h, testVersion)
	checkError(t, err, "nowhere", "no such file")
	if !errors.Is(err, gpu.ErrNoDriver) {
		t.Errorf("error %v", err)
	}
}

// writeForeign writes a library for another machine.
func writeForeign(r *tree, p string) {
	arch := "arm64"
	if runtime.GOARCH == "arm64" {
		arch = "amd64"
	}
	testenv.Must(r.t, sim.Library{SONAME: "libx.so.1", Arch: arch}.WriteELF(r.path(p)))
}

// A driver without libcuda serves the capabilities that do not need it.
func TestCheckConsidersCapabilities(t *testing.T) {
	testenv.Root(t)
	r := newTree(t)
	r.library("/usr/lib64/libnvidia-ml.so." + testVersion)
	r.node("/dev/nvidiactl")
	d := r.discover(testVersion)
	for c, good := range map[Capabilities]bool{
		0: false, All: false, Compute: false, Compute | Utility: false, Utility: true, Graphics: true,
	} {
		if err := d.Check(c); (err == nil) != good {
			t.Errorf("for %s: error %v", c, err)
		}
	}
}

// No capability works without nvidiactl.
func TestCheckNeedsTheControlNode(t *testing.T) {
	testenv.Root(t)
	for name, c := range map[string]struct {
		change func(*tree)
		want   string
	}{
		"a device node": {func(r *tree) { r.node("/dev/nvidiactl") }, ""},
		"no file":       {func(*tree) {}, "dev/nvidiactl: not found"},
		"a file":        {func(r *tree) { r.file("/dev/nvidiactl", "", 0o666) }, "file, not a character device"},
		"a link":        {func(r *tree) { r.node("/dev/a"); r.link("/dev/nvidiactl", "a") }, "link, not a character device"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTree(t)
			r.core("/usr/lib64", testVersion)
			c.change(r)
			for _, capabilities := range []Capabilities{0, All, Compute, Utility, Display} {
				for _, d := range []*Driver{r.discover(testVersion), DiscoverNodes(r.host())} {
					err := d.Check(capabilities)
					if c.want == "" {
						testenv.Must(t, err)
						continue
					}
					checkError(t, err, c.want)
					if !errors.Is(err, ErrNoControl) || !errors.Is(err, gpu.ErrNoDriver) {
						t.Errorf("for %s: error %v", capabilities, err)
					}
				}
			}
		})
	}
}

// A library is broken if the host has it, or a link to it, and the capabilities need it. So is a device node that CUDA
// needs, even if the host has no trace of it.
func TestExplainMarksBrokenLibraries(t *testing.T) {
	t.Parallel()
	r := newTree(t)
	r.library("/usr/lib64/libnvidia-ml.so." + testVersion)                                      // without libcuda
	r.file("/usr/lib64/libnvcuvid.so."+testVersion, "not ELF", 0o755)                           // damaged
	r.link("/usr/lib64/libnvoptix.so.1", "libnvoptix.so."+testVersion)                          // gone
	r.link("/usr/lib64/libnvidia-egl-gbm.so.1", "libnvidia-egl-gbm.so.1.1.3")                   // gone, of its own version
	r.link("/usr/lib64/libnvidia-cfg.so.1", "libnvidia-cfg.so.575.57.08")                       // of an old driver
	r.library("/usr/lib64/libnvidia-cfg.so.575.57.08")                                          //
	r.link("/usr/lib64/libnvidia-fbc.so", "libnvidia-fbc.so.1")                                 // only linkers open it
	writeForeign(r, "/usr/lib64/libnvidia-encode.so."+testVersion)                              // for another machine
	r.file("/usr/lib64/libnvidia-opencl.so."+testVersion, "damaged", 0o755)                     // with a good copy
	r.library(multiarchDir + "/libnvidia-opencl.so." + testVersion)                             //
	r.file("/usr/lib64/nvidia/xorg/nvidia_drv.so", "not ELF", 0o755)                            // a module of the X server
	testenv.Must(r.t, sim.Library{}.WriteELF(r.path("/usr/lib64/libnvidia-glsi.so.575.57.08"))) // of another version
	d := r.discover(testVersion)
	for c, want := range map[Capabilities][]string{
		All: {
			"/dev/nvidia-uvm", "libcuda", "libnvcuvid.so." + testVersion, "libnvidia-egl-gbm.so.1", "libnvoptix",
			"nvidia_drv.so",
		},
		Utility:  nil,
		Compute:  {"/dev/nvidia-uvm", "libcuda"},
		Graphics: {"/dev/nvidia-uvm", "libcuda", "libnvidia-egl-gbm.so.1", "libnvoptix"},
		Video:    {"/dev/nvidia-uvm", "libcuda", "libnvcuvid.so." + testVersion},
	} {
		var got []string
		for _, f := range d.Explain(c) {
			if f.Broken {
				got = append(got, f.Name)
			}
		}
		if diff := cmp.Diff(want, sorted(got), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("for %s (-want +got):\n%s", c, diff)
		}
	}
}

// A library that cannot be used has a finding with the reason. The others can be used.
func TestFindingsSayWhatIsNotUsed(t *testing.T) {
	t.Parallel()
	r := newTree(t)
	r.core("/usr/lib64", testVersion)
	r.file("/usr/lib64/libnvcuvid.so."+testVersion, "\x7fELF but not for long", 0o755)
	writeForeign(r, "/usr/lib64/libnvidia-encode.so."+testVersion)
	testenv.Must(r.t, sim.Library{SONAME: "a,b=c.so.1"}.WriteELF(r.path("/usr/lib64/libnvidia-fbc.so."+testVersion)))
	r.library("/usr/lib64/libnvidia-cfg.so.575.57.08")
	r.core(multiarchDir, testVersion)
	d := r.discover(testVersion)
	for name, want := range map[string]string{
		"libnvcuvid.so." + testVersion:       "not a usable ELF file",
		"libnvidia-encode.so." + testVersion: "not for this machine",
		"libnvidia-fbc.so." + testVersion:    "not a plain file name",
		"libnvidia-cfg":                      "only of version 575.57.08",
		"libnvidia-opencl":                   "not found",
	} {
		f := finding(t, d.Findings, name)
		if f.Used || !strings.Contains(f.Note, want) || f.Kind != KindLibrary {
			t.Errorf("finding for %s: %+v, want a note with %q", name, f, want)
		}
	}
	first := finding(t, d.Findings, "libcuda.so.1")
	if !first.Used || !strings.Contains(first.Note, "ignored: ") || len(d.Libraries) != 2 {
		t.Errorf("finding for a library with two copies: %+v; libraries %v", first, libraryPaths(d))
	}
}

// The X server searches its own directories only. Debian has links there, and the files elsewhere.
func TestModulesOfTheXServer(t *testing.T) {
	t.Parallel()
	const (
		drivers, extensions = "/usr/lib/xorg/modules/drivers", "/usr/lib/xorg/modules/extensions"
		debians             = "/usr/lib/nvidia/current"
		glx                 = "libglxserver_nvidia.so"
	)
	found := map[string]string{
		drivers + "/nvidia_drv.so":                 debians + "/nvidia_drv.so",
		extensions + "/" + glx + "." + testVersion: debians + "/" + glx + "." + testVersion,
		extensions + "/" + glx:                     "-> " + glx + "." + testVersion,
	}
	for name, c := range map[string]struct {
		make func(*tree)
		want map[string]string // path in the container to path in the root, or to a link's target
	}{
		"links of Debian's alternatives": {func(r *tree) {
			r.link(drivers+"/nvidia_drv.so", "/etc/alternatives/glx--nvidia_drv.so")
			r.link("/etc/alternatives/glx--nvidia_drv.so", debians+"/nvidia_drv.so")
			r.link(extensions+"/"+glx, "/etc/alternatives/glx--"+glx)
			r.link("/etc/alternatives/glx--"+glx, debians+"/"+glx+"."+testVersion)
		}, found},
		"Debian's files without links": {func(*tree) {}, found},
		"a link to another version": {func(r *tree) {
			r.library(debians + "/" + glx + ".575.57.08")
			r.link(extensions+"/"+glx, debians+"/"+glx+".575.57.08")
		}, found},
		"files in the directory of the X server": {func(r *tree) {
			r.library("/usr/lib64/nvidia/xorg/nvidia_drv.so")
			r.library("/usr/lib64/nvidia/xorg/" + glx + "." + testVersion)
		}, map[string]string{
			"/usr/lib64/nvidia/xorg/nvidia_drv.so":              "/usr/lib64/nvidia/xorg/nvidia_drv.so",
			"/usr/lib64/nvidia/xorg/" + glx + "." + testVersion: "/usr/lib64/nvidia/xorg/" + glx + "." + testVersion,
			"/usr/lib64/nvidia/xorg/" + glx:                     "-> " + glx + "." + testVersion,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newTree(t)
			r.core("/usr/lib64", testVersion)
			r.library(debians + "/nvidia_drv.so")
			r.library(debians + "/" + glx + "." + testVersion)
			c.make(r)
			got := map[string]string{}
			for _, l := range r.discover(testVersion).Libraries {
				if l.SONAME != "" {
					continue
				}
				got[l.Path] = strings.TrimPrefix(l.HostPath, r.dir)
				for _, link := range l.Links {
					got[link.Path] = "-> " + link.Target
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestDiscoverMakesLinks(t *testing.T) {
	t.Parallel()
	r := newTree(t)
	r.core("/usr/lib64", testVersion)
	r.link("/usr/lib64/libnvidia-ml.so", "libnvidia-ml.so.1")
	r.library("/usr/lib64/libGLX_nvidia.so." + testVersion)
	r.library("/usr/lib64/libnvidia-allocator.so." + testVersion)
	testenv.Must(r.t, sim.Library{}.WriteELF(r.path("/usr/lib64/libnvidia-tls.so."+testVersion)))
	r.library("/usr/lib64/nvidia/xorg/libglxserver_nvidia.so." + testVersion)
	got := map[string]string{}
	for _, l := range r.discover(testVersion).Libraries {
		for _, link := range l.Links {
			got[link.Path] = link.Target
		}
	}
	want := map[string]string{
		"/usr/lib64/libcuda.so":                         "libcuda.so.1", // not on this host, but many programs load it
		"/usr/lib64/libcuda.so.1":                       "libcuda.so." + testVersion,
		"/usr/lib64/libnvidia-ml.so":                    "libnvidia-ml.so.1", // the host has this link
		"/usr/lib64/libnvidia-ml.so.1":                  "libnvidia-ml.so." + testVersion,
		"/usr/lib64/libGLX_nvidia.so.1":                 "libGLX_nvidia.so." + testVersion,
		"/usr/lib64/libGLX_indirect.so.0":               "libGLX_nvidia.so." + testVersion,
		"/usr/lib64/libnvidia-allocator.so.1":           "libnvidia-allocator.so." + testVersion,
		"/usr/lib64/gbm/nvidia-drm_gbm.so":              "../libnvidia-allocator.so.1",
		"/usr/lib64/nvidia/xorg/libglxserver_nvidia.so": "libglxserver_nvidia.so." + testVersion,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("links (-want +got):\n%s", diff)
	}
}
