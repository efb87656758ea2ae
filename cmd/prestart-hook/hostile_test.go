package main

import (
	"bytes"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/ldcache"
	testimage "gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

func needRoot(t testing.TB) {
	t.Helper()
	testenv.Root(t)
}

func makeFIFO(c *container, name string) {
	testenv.Must(c.t, os.MkdirAll(filepath.Dir(c.path(name)), 0o755))
	testenv.Must(c.t, unix.Mkfifo(c.path(name), 0o666))
}

func makeDevice(c *container, name string, major, minor uint32) {
	testenv.Must(c.t, os.MkdirAll(filepath.Dir(c.path(name)), 0o755))
	testenv.Must(c.t, unix.Mknod(c.path(name), unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor))))
}

func makeSparse(c *container, name string) {
	c.write(name, "")
	testenv.Must(c.t, os.Truncate(c.path(name), 4<<30))
}

func validCache() []byte {
	flags, _ := ldcache.FlagsFor("amd64")
	entries := []ldcache.Entry{{Name: "libz.so.1", Path: "/lib/libz.so.1", Flags: flags}}
	return (&ldcache.Cache{Entries: entries}).Marshal()
}

// cacheWithFalseCount returns a cache whose header has a larger number of entries.
func cacheWithFalseCount() string {
	data := validCache()
	binary.LittleEndian.PutUint32(data[20:], 0xffffffff)
	return string(data)
}

// The hook runs as root with the host's files in sight. Each image tries to make it change a file outside the
// container. The directory "canary" beside the bundle stands for the host; "../../../canary" leads there from /etc.
func TestHostileImagesCannotLeadTheHookOutside(t *testing.T) {
	needRoot(t)
	const compat, replaced = "/usr/local/cuda/compat", "/etc/ld.so.cache"
	for name, tc := range map[string]struct {
		image    func(c *container)
		standard bool // the driver's libraries are in a directory that the loader searches by default
		args     []string
		status   int
		want     string // part of standard error, which is empty if this is
		noLib    bool   // the loader does not find the driver's libcuda through the cache
	}{
		"the cache is a FIFO": {
			image: func(c *container) { makeFIFO(c, "/etc/ld.so.cache") }, want: replaced,
		},
		"the cache is a device": {
			image: func(c *container) { makeDevice(c, "/etc/ld.so.cache", 1, 5) }, want: replaced,
		},
		"the cache is a watchdog": {
			image: func(c *container) { makeDevice(c, "/etc/ld.so.cache", 10, 130) }, want: replaced,
		},
		"the cache has 4 GiB": {
			image: func(c *container) { makeSparse(c, "/etc/ld.so.cache") }, want: replaced,
		},
		"the cache is truncated": {
			image: func(c *container) { c.write("/etc/ld.so.cache", string(validCache()[:60])) }, want: replaced,
		},
		"the cache is empty": {
			image: func(c *container) { c.write("/etc/ld.so.cache", "") }, want: replaced,
		},
		"the cache has a header with 4 billion entries": {
			image: func(c *container) { c.write("/etc/ld.so.cache", cacheWithFalseCount()) }, want: replaced,
		},
		"the cache is a script": {
			image: func(c *container) { c.write("/etc/ld.so.cache", "#!/bin/sh\n") }, want: replaced,
		},
		"the cache is a directory": {
			image: func(c *container) { c.write("/etc/ld.so.cache/x", "") }, status: 1, want: "would find libcuda.so.1",
			noLib: true,
		},
		"the cache is a directory and not needed": {
			image: func(c *container) { c.write("/etc/ld.so.cache/x", "") }, standard: true, want: replaced,
			noLib: true,
		},
		"the cache is the host's, by path": {
			image: func(c *container) { c.link(c.canary+"/etc/ld.so.cache", "/etc/ld.so.cache") },
		},
		"the cache is the host's, by climbing": {
			image: func(c *container) { c.link("../../../canary/etc/ld.so.cache", "/etc/ld.so.cache") },
		},
		"the cache is a link to itself": {
			image: func(c *container) { c.link("ld.so.cache", "/etc/ld.so.cache") }, want: replaced,
		},
		"the cache is a link to another file": {
			image: func(c *container) { c.link("passwd", "/etc/ld.so.cache") }, want: replaced,
		},
		"the cache is behind 100 links": {
			image: func(c *container) { makeLinkChain(c, "/etc/ld.so.cache", 100) }, want: replaced,
		},
		"/etc is the host's, by path": {
			image: func(c *container) { c.link(c.canary+"/etc", "/etc") }, status: 1, want: "/etc", noLib: true,
		},
		"/etc is the host's, by climbing": {
			image: func(c *container) { c.link("../../canary/etc", "/etc") }, status: 1, want: "/etc", noLib: true,
		},
		"/etc is the host's and not needed": {
			image: func(c *container) { c.link("../../canary/etc", "/etc") }, standard: true, want: "/etc", noLib: true,
		},
		"/etc climbs to the root": {
			image: func(c *container) { c.link("../../../../../../../..", "/etc") }, noLib: true,
		},
		"/etc is a file": {
			image: func(c *container) { testenv.Must(c.t, os.RemoveAll(c.path("/etc"))); c.write("/etc", "") }, status: 1,
			want: "/etc", noLib: true,
		},
		"/etc is a link to itself": {
			image: func(c *container) { c.link("etc", "/etc") }, status: 1, want: "/etc", noLib: true,
		},
		"the directory of a link is the host's": {
			image: func(c *container) { c.link("../../../canary", "/usr/lib/x") },
			args:  []string{"--link=/usr/lib/x/new::y", "--link=/usr/lib/x/d/new::y"}, want: "/usr/lib/x/new",
		},
		"a link's name is taken by a link to the host's file": {
			image: func(c *container) { c.link("../../../../canary/libcuda.so.999.1", "/usr/lib/x/f") },
			args:  []string{"--link=/usr/lib/x/f::y"},
		},
		"a library is a link to the host's": {
			image: func(c *container) { c.link("../../../../canary/libcuda.so.999.1", "/opt/driver/libcuda.so.580.1") },
			noLib: true,
		},
		"a library is a FIFO": {image: func(c *container) {
			testenv.Must(c.t, os.Remove(c.path("/opt/driver/libcuda.so.580.1")))
			makeFIFO(c, "/opt/driver/libcuda.so.580.1")
		}, noLib: true},
		"compat is the host's (CVE-2024-0132)": {
			image: func(c *container) { c.link("../../../../../canary", compat) },
		},
		"compat is the host's, by path": {
			image: func(c *container) { c.link(c.canary, compat) },
		},
		"compat is the whole root": {image: func(c *container) { c.link("/", compat) }},
		"compat is a file": {
			image: func(c *container) { c.write(compat, "") }, want: "compat",
		},
		"a compat libcuda is the host's": {
			image: func(c *container) { c.link(c.canary+"/libcuda.so.999.1", compat+"/libcuda.so.999.1") },
		},
		"a compat libcuda is a FIFO": {
			image: func(c *container) { makeFIFO(c, compat+"/libcuda.so.999.1") },
		},
		"a compat libcuda is a device": {
			image: func(c *container) { makeDevice(c, compat+"/libcuda.so.999.1", 10, 130) },
		},
		"a compat libcuda has 4 GiB": {
			image: func(c *container) { makeSparse(c, compat+"/libcuda.so.999.1") }, want: "compat",
		},
		"a compat libcuda is no library": {
			image: func(c *container) { c.write(compat+"/libcuda.so.999.1", strings.Repeat("x", 999)) },
			want:  "compat",
		},
		"compat has 3,000 names": {image: func(c *container) { makeFiles(c, compat, 3000) }},
		"musl's path file is the host's": {
			image: func(c *container) {
				addMuslLoader(c)
				c.link("../../../canary/etc/ld.so.cache", "/etc/ld-musl-x86_64.path")
			},
		},
		"musl's path file is a FIFO": {
			image: func(c *container) { addMuslLoader(c); makeFIFO(c, "/etc/ld-musl-x86_64.path") },
			want:  "/etc/ld-musl-x86_64.path",
		},
		"by-path is the host's": {image: func(c *container) {
			makeDevice(c, "/dev/dri/card1", 226, 1)
			c.link("../../../../canary", "/dev/dri/by-path")
		}, args: []string{"--dri=0000:1b:00.0/card1"}, want: "by-path"},
		"the profile's directory is the host's": {
			image: func(c *container) {
				makeDevice(c, "/dev/nvidia0", 195, 0)
				c.link("../../../canary", "/etc/nvidia")
			},
			args: []string{"--egl-profile"}, want: "10-container.conf",
		},
		"/dev is the host's": {
			image: func(c *container) { c.link("../../canary", "/dev") },
			args:  []string{"--egl-profile", "--dri=0000:1b:00.0/card1"},
		},
		"the parameters are a link to the host's": {
			image: func(c *container) {
				c.link("../../../../../../canary/libcuda.so.999.1", "/proc/driver/nvidia/params")
			},
			args: []string{"--mask-params"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newContainer(t)
			dir := "/opt/driver"
			if tc.standard {
				dir, _ = multiarch()
			}
			tc.image(c)
			args := append([]string{
				"--driver-version=580.1", "--libraries=" + dir + ":libcuda.so.1=libcuda.so.580.1",
				"--link=" + dir + "/libcuda.so.1::libcuda.so.580.1",
			}, tc.args...)
			status, stderr := c.run(args...)
			c.checkCanary()
			if status != tc.status || !strings.Contains(stderr, tc.want) || (tc.want == "") != (stderr == "") {
				t.Errorf("status %d, want %d, standard error %q, want %q in it", status, tc.status, stderr, tc.want)
			}
			if found := c.found("libcuda.so.1"); (found == dir+"/libcuda.so.580.1") == tc.noLib {
				t.Errorf("libcuda.so.1 is found at %q", found)
			}
			before := testimage.Fingerprint(t, c.root)
			if again, stderr := c.run(args...); again != status {
				t.Errorf("the second time: status %d, %s", again, stderr)
			}
			c.checkCanary()
			if testimage.Fingerprint(t, c.root) != before {
				t.Error("the second run changed something")
			}
		})
	}
}

func makeLinkChain(c *container, name string, n int) {
	c.link("link0", name)
	for i := range n {
		c.link("link"+strconv.Itoa(i+1), filepath.Join(filepath.Dir(name), "link"+strconv.Itoa(i)))
	}
	c.write(filepath.Join(filepath.Dir(name), "link"+strconv.Itoa(n)), "end")
}

func makeFiles(c *container, dir string, n int) {
	for i := range n {
		c.write(filepath.Join(dir, "libcuda-"+strconv.Itoa(i)), "")
	}
}

func addMuslLoader(c *container) { c.write("/lib/ld-musl-x86_64.so.1", "loader") }

// The published exploit of CVE-2025-23266: with the image's environment the loader of a dynamically linked hook runs
// the image's code as the host's root.
func TestTheImagesEnvironmentIsIgnored(t *testing.T) {
	needRoot(t)
	c := newContainer(t)
	marker := filepath.Join(c.bundle, "owned")
	testimage.Compile(t, c.path("/poc.so"), `#include <stdio.h>
		__attribute__((constructor)) static void own(void) { FILE *f = fopen("`+marker+`", "w"); if (f) fclose(f); }`,
		"-shared", "-fPIC")
	c.env = []string{
		"LD_PRELOAD=/proc/self/cwd/poc.so", "LD_AUDIT=/proc/self/cwd/poc.so", "LD_LIBRARY_PATH=/proc/self/cwd",
		"GCONV_PATH=/proc/self/cwd", "PATH=/proc/self/cwd", "TMPDIR=/proc/self/cwd", "HOME=/proc/self/cwd",
		"GODEBUG=x=y", "GOTRACEBACK=crash", "GOGC=1", "GOMAXPROCS=1",
	}
	victim := exec.Command("/bin/true")
	victim.Dir, victim.Env = c.root, c.env
	_ = victim.Run()
	if err := os.Remove(marker); err != nil {
		t.Fatalf("the exploit does not work on a dynamic program: %v", err)
	}
	status, stderr := c.run("--libraries=/opt/driver:libcuda.so.1=libcuda.so.580.1")
	if status != 0 || stderr != "" {
		t.Errorf("status %d, %s", status, stderr)
	}
	if _, err := os.Stat(marker); err == nil {
		t.Error("the image's code was executed")
	}
	c.checkCanary()
}

// Another container with the same root swaps directories for links while the hook runs.
func TestSlowLinksThatAppearMeanwhileAreNotFollowed(t *testing.T) {
	needRoot(t)
	for name, tc := range map[string]struct{ dir, target string }{
		"the cache's directory": {"/etc", "../../canary/etc"},
		"a link's directory":    {"/usr/lib/x", "../../../../canary"},
		"compat":                {"/usr/local/cuda/compat", "../../../../../../canary"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newContainer(t)
			testenv.Must(c.t, os.MkdirAll(c.path(tc.dir), 0o755))
			c.link(tc.target, tc.dir+".other")
			stop := make(chan struct{})
			var swapper sync.WaitGroup
			swapper.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						_ = unix.Renameat2(unix.AT_FDCWD, c.path(tc.dir), unix.AT_FDCWD, c.path(tc.dir+".other"),
							unix.RENAME_EXCHANGE)
					}
				}
			})
			for i := range 100 {
				c.run("--driver-version=580.1", "--libraries=/opt/driver:libcuda.so.1=libcuda.so.580.1",
					"--link=/usr/lib/x/link::target"+strconv.Itoa(i),
					"--link=/usr/lib/x/dir/link::target"+strconv.Itoa(i))
			}
			close(stop)
			swapper.Wait()
			c.checkCanary()
		})
	}
}

func TestACacheOf100000LibrariesIsMerged(t *testing.T) {
	needRoot(t)
	c := newContainer(t)
	cache := &ldcache.Cache{}
	flags, _ := ldcache.FlagsFor("amd64")
	for i := range 100_000 {
		name := "lib" + strconv.Itoa(i) + ".so." + strings.Repeat("1", i%50)
		cache.Entries = append(cache.Entries, ldcache.Entry{Name: name, Path: "/usr/lib/" + name, Flags: flags})
	}
	c.write("/etc/ld.so.cache", string(cache.Marshal()))
	before, err := os.ReadFile(c.path("/etc/ld.so.cache"))
	testenv.Must(c.t, err)
	if status, stderr := c.run("--libraries=/opt/driver:libcuda.so.1=libcuda.so.580.1"); status != 0 || stderr != "" {
		t.Errorf("status %d, %s", status, stderr)
	}
	after, err := os.ReadFile(c.path("/etc/ld.so.cache"))
	testenv.Must(c.t, err)
	if c.found("libcuda.so.1") == "" || c.found("lib99999.so."+strings.Repeat("1", 99999%50)) == "" ||
		bytes.Equal(before, after) {
		t.Error("the merged cache lacks libraries")
	}
}
