package hook

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/ldcache"
	"gpu-cdi-plugin/internal/rootfs"
)

var (
	libcuda = hookargs.Library{SONAME: "libcuda.so.1", Path: "/drv/libcuda.so.580.1"}
	libml   = hookargs.Library{SONAME: "libnvidia-ml.so.1", Path: "/drv/libnvidia-ml.so.580.1"}
	compat  = hookargs.Library{SONAME: "libcuda.so.1", Path: "/usr/local/cuda/compat/libcuda.so.1"}
	none    = content{err: fmt.Errorf("open: %w", os.ErrNotExist)}
)

func testArch(t *testing.T) arch {
	t.Helper()
	a, err := archFor("amd64")
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func cacheOf(entries ...ldcache.Entry) content {
	return content{data: (&ldcache.Cache{Entries: entries, Generator: "ldconfig"}).Marshal()}
}

// describe is a plan as lines.
func describe(t *testing.T, p *plan) []string {
	t.Helper()
	var lines []string
	for _, l := range p.links {
		lines = append(lines, l.Path+" -> "+l.Target)
	}
	for _, s := range p.searches {
		if s.path != cachePath {
			lines = append(lines, fmt.Sprintf("%s: %q", s.path, s.data))
			continue
		}
		c, err := ldcache.Parse(s.data)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, "cache by "+c.Generator)
		for _, e := range c.Entries {
			lines = append(lines, fmt.Sprintf("cache %s %#x => %s", e.Name, e.Flags, e.Path))
		}
	}
	for _, f := range p.files {
		lines = append(lines, fmt.Sprintf("%s: %s", f.path, f.data))
	}
	for _, f := range p.masks {
		lines = append(lines, fmt.Sprintf("mount %s: %q", f.path, f.data))
	}
	for _, n := range p.notes {
		lines = append(lines, "note: "+n.Error())
	}
	return lines
}

func TestMakePlan(t *testing.T) {
	libs := []hookargs.Library{libcuda, libml}
	fresh := []string{
		"cache by " + generator,
		"cache libnvidia-ml.so.1 0x303 => /drv/libnvidia-ml.so.580.1",
		"cache libcuda.so.1 0x303 => /drv/libcuda.so.580.1",
	}
	for name, tc := range map[string]struct {
		args hookargs.CreateContainer
		img  image
		want []string
	}{
		"nothing is asked for": {img: image{cache: none}},
		"the driver's libraries come before the image's of the same name": {
			img: image{libraries: libs, glibc: true, cache: cacheOf(
				ldcache.Entry{Name: "libz.so.1", Path: "/lib/libz.so.1", Flags: ldcache.FlagsX8664},
				ldcache.Entry{Name: "libcuda.so.1", Path: "/usr/lib/stub/libcuda.so.1", Flags: ldcache.FlagsX8664},
				ldcache.Entry{Name: "libcuda.so.1", Path: "/usr/lib32/libcuda.so.1", Flags: 3},
			)},
			want: []string{
				"cache by ldconfig",
				"cache libz.so.1 0x303 => /lib/libz.so.1",
				"cache libnvidia-ml.so.1 0x303 => /drv/libnvidia-ml.so.580.1",
				"cache libcuda.so.1 0x303 => /drv/libcuda.so.580.1",
				"cache libcuda.so.1 0x3 => /usr/lib32/libcuda.so.1",
			},
		},
		"the image's compatible libcuda comes before the driver's": {
			img: image{libraries: libs, compat: []hookargs.Library{compat}, glibc: true, cache: cacheOf()},
			want: []string{
				"cache by ldconfig",
				"cache libnvidia-ml.so.1 0x303 => /drv/libnvidia-ml.so.580.1",
				"cache libcuda.so.1 0x303 => /usr/local/cuda/compat/libcuda.so.1",
			},
		},
		"no cache": {img: image{libraries: libs, glibc: true, cache: none}, want: fresh},
		"no libraries": {
			img: image{glibc: true, cache: cacheOf()},
		},
		"no loader": {img: image{libraries: libs, cache: none}},
		"names of links beside a library, for whichever library is first": {
			args: hookargs.CreateContainer{Links: []hookargs.Link{
				{Path: "/drv/libcuda.so", Target: "libcuda.so.1"},
				{Path: "/drv/libcuda.so.1", Target: "libcuda.so.580.1"},
				{Path: "/drv/libml_indirect.so.0", Target: "libnvidia-ml.so.580.1"},
				{Path: "/drv/gbm/nvidia-drm_gbm.so", Target: "../libnvidia-ml.so.1"},
				{Path: "/drv/libabsent.so", Target: "libabsent.so.1"},
				{Path: "/drv/plugin.so", Target: "libnvidia-ml.so.1"},
			}},
			img: image{libraries: libs, compat: []hookargs.Library{compat}, glibc: true, cache: cacheOf()},
			want: []string{
				"/drv/libcuda.so -> libcuda.so.1",
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				"/drv/libml_indirect.so.0 -> libnvidia-ml.so.580.1",
				"/drv/gbm/nvidia-drm_gbm.so -> ../libnvidia-ml.so.1",
				"/drv/libabsent.so -> libabsent.so.1",
				"/drv/plugin.so -> libnvidia-ml.so.1",
				"cache by ldconfig",
				"cache libnvidia-ml.so.1 0x303 => /drv/libnvidia-ml.so.580.1",
				"cache libml_indirect.so.0 0x303 => /drv/libnvidia-ml.so.580.1",
				"cache libcuda.so.1 0x303 => /usr/local/cuda/compat/libcuda.so.1",
				"cache libcuda.so 0x303 => /usr/local/cuda/compat/libcuda.so.1",
			},
		},
		"no loader in sight, but a cache": {
			img:  image{libraries: libs, cache: content{data: []byte("damaged")}},
			want: append(fresh[:3:3], "note: /etc/ld.so.cache: not a usable ld.so.cache: no known magic at its beginning; a new one replaces it"),
		},
		"a cache that cannot be read": {
			img:  image{libraries: libs, glibc: true, cache: content{err: rootfs.ErrNotRegular}},
			want: append(fresh[:3:3], "note: not a regular file; a new one replaces it"),
		},
		"musl without a path file": {
			img: image{libraries: libs, musl: true, cache: none, muslPath: none},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				"/drv/libnvidia-ml.so.1 -> libnvidia-ml.so.580.1",
				`/etc/ld-musl-x86_64.path: "/lib\n/usr/local/lib\n/usr/lib\n/drv\n"`,
			},
		},
		"musl with a path file": {
			args: hookargs.CreateContainer{Links: []hookargs.Link{{Path: "/drv/libcuda.so.1", Target: "libcuda.so.580.1"}}},
			img:  image{libraries: libs, musl: true, cache: none, muslPath: content{data: []byte("/lib:/opt/lib")}},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				"/drv/libnvidia-ml.so.1 -> libnvidia-ml.so.580.1",
				`/etc/ld-musl-x86_64.path: "/lib\n/opt/lib\n/drv\n"`,
			},
		},
		"musl with the directory in its path file already": {
			img:  image{libraries: libs[:1], musl: true, cache: none, muslPath: content{data: []byte("/drv:/lib")}},
			want: []string{"/drv/libcuda.so.1 -> libcuda.so.580.1"},
		},
		"musl with a path file that cannot be read": {
			img: image{libraries: libs[:1], musl: true, cache: none, muslPath: content{err: rootfs.ErrTooLarge}},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				`/etc/ld-musl-x86_64.path: "/lib\n/usr/local/lib\n/usr/lib\n/drv\n"`,
				"note: file too large; a new one replaces it",
			},
		},
		"musl with an empty path file": {
			img:  image{libraries: libs[:1], musl: true, cache: none, muslPath: content{data: []byte{}}},
			want: []string{"/drv/libcuda.so.1 -> libcuda.so.580.1", `/etc/ld-musl-x86_64.path: "/drv\n"`},
		},
		"musl with a path file that has more than directories": {
			img: image{libraries: libs[:1], musl: true, cache: none, muslPath: content{data: []byte(
				"/lib/\npassword=x:lib:/a/../b:/c//d:/\x01:/with space\n" + strings.Repeat("/", 4096) + "\n/" + strings.Repeat("y", 4095))}},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				`/etc/ld-musl-x86_64.path: "/lib\n/with space\n/drv\n"`,
				"note: /etc/ld-musl-x86_64.path: left out 7 parts that are no clean absolute path, or beyond the limit of 100",
			},
		},
		"musl with a path file of many directories": {
			img: image{libraries: libs[:1], musl: true, cache: none, muslPath: content{data: []byte(strings.Repeat("/x:", 101))}},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				`/etc/ld-musl-x86_64.path: "` + strings.Repeat(`/x\n`, 100) + `/drv\n"`,
				"note: /etc/ld-musl-x86_64.path: left out 1 parts that are no clean absolute path, or beyond the limit of 100",
			},
		},
		"musl's path file and the cache are on a volume": {
			img: image{
				libraries: libs[:1], musl: true, glibc: true,
				cache:    content{err: rootfs.ErrVolume, cover: cacheOf(ldcache.Entry{Name: "libsecret.so.1", Path: "/secret"}).data},
				muslPath: content{err: rootfs.ErrVolume, cover: []byte("/secret")},
			},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				"cache by " + generator,
				"cache libcuda.so.1 0x303 => /drv/libcuda.so.580.1",
				`/etc/ld-musl-x86_64.path: "/lib\n/usr/local/lib\n/usr/lib\n/drv\n"`,
				"note: on another mount than the container's root; a new one replaces it",
				"note: on another mount than the container's root; a new one replaces it",
			},
		},
		"musl's path file and the cache are mounted over, and right": {
			img: image{
				libraries: libs[:1], musl: true, glibc: true,
				cache: content{err: rootfs.ErrVolume, cover: cacheOf(
					ldcache.Entry{Name: "libz.so.1", Path: "/lib/libz.so.1", Flags: ldcache.FlagsX8664},
					ldcache.Entry{Name: "libcuda.so.1", Path: "/drv/libcuda.so.580.1", Flags: ldcache.FlagsX8664}).data},
				muslPath: content{err: rootfs.ErrVolume, cover: []byte("/lib\n/drv\n")},
			},
			want: []string{"/drv/libcuda.so.1 -> libcuda.so.580.1"},
		},
		"musl's default path has the directory": {
			img: image{
				libraries: []hookargs.Library{{SONAME: "libcuda.so.1", Path: "/usr/lib/libcuda.so.1"}}, musl: true, cache: none, muslPath: none,
			},
		},
		"musl's default path has the directory, but the path file cannot be read": {
			img: image{
				libraries: []hookargs.Library{{SONAME: "libcuda.so.1", Path: "/usr/lib/libcuda.so.1"}}, musl: true, cache: none,
				muslPath: content{err: rootfs.ErrNotRegular},
			},
			want: []string{
				`/etc/ld-musl-x86_64.path: "/lib\n/usr/local/lib\n/usr/lib\n"`,
				"note: not a regular file; a new one replaces it",
			},
		},
		"a cache with entries that no ldconfig writes": {
			img: image{libraries: libs[:1], glibc: true, cache: cacheOf(
				ldcache.Entry{Name: "libz.so.1", Path: "/opt/../lib/libz.so.1", Flags: ldcache.FlagsX8664},
				ldcache.Entry{Name: "password", Path: "secret", Flags: ldcache.FlagsX8664},
				ldcache.Entry{Name: "a/b", Path: "/lib/b", Flags: ldcache.FlagsX8664},
			)},
			want: []string{
				"cache by ldconfig",
				"cache libz.so.1 0x303 => /opt/../lib/libz.so.1",
				"cache libcuda.so.1 0x303 => /drv/libcuda.so.580.1",
				"note: /etc/ld.so.cache: left out 2 entries without a name or an absolute path",
			},
		},
		"links by PCI address for the nodes that were given": {
			args: hookargs.CreateContainer{DRI: []hookargs.DRI{
				{PCIBusID: "0000:1b:00.0", Nodes: []string{"card1", "renderD129"}},
				{PCIBusID: "0000:43:00.0", Nodes: []string{"card2", "renderD130", "control"}},
			}},
			img: image{cache: none, nodes: map[string]bool{"card1": true, "renderD129": true, "renderD130": true, "control": true}},
			want: []string{
				"/dev/dri/by-path/pci-0000:1b:00.0-card -> ../card1",
				"/dev/dri/by-path/pci-0000:1b:00.0-render -> ../renderD129",
				"/dev/dri/by-path/pci-0000:43:00.0-render -> ../renderD130",
			},
		},
		"the parameters and the profile": {
			img: image{cache: none, params: []byte("A: 1\nModifyDeviceFiles: 1\n"), minors: []uint32{0, 3, 63, 64}},
			want: []string{
				profilePath + `: {"profiles":[{"name":"_container_","settings":["EGLVisibleDGPUDevices",0x8000000000000009]}],` +
					`"rules":[{"pattern":[],"profile":"_container_"}]}`,
				`mount /proc/driver/nvidia/params: "A: 1\nModifyDeviceFiles: 0\n"`,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := describe(t, makePlan(&tc.args, &tc.img, testArch(t)))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// What the first run writes, the second run reads and writes again.
func TestPlanIsIdempotent(t *testing.T) {
	img := &image{libraries: []hookargs.Library{libml, libcuda}, glibc: true, musl: true, muslPath: none, cache: cacheOf(
		ldcache.Entry{Name: "libz.so.1", Path: "/lib/libz.so.1", Flags: ldcache.FlagsX8664},
		ldcache.Entry{Name: "libcuda.so.1", Path: "/usr/lib/libcuda.so.1", Flags: ldcache.FlagsX8664})}
	args := &hookargs.CreateContainer{}
	first := makePlan(args, img, testArch(t))
	written := []content{{data: first.searches[0].data}, {data: first.searches[1].data}}
	img.cache, img.muslPath = written[0], written[1]
	second := makePlan(args, img, testArch(t))
	if len(second.searches) != 1 || !bytes.Equal(second.searches[0].data, written[0].data) || len(second.notes) != 0 {
		t.Errorf("the second plan is %q, want the same cache and nothing else", describe(t, second))
	}
	// In a read-only root the first run mounts both.
	img.cache = content{err: rootfs.ErrVolume, cover: written[0].data}
	img.muslPath = content{err: rootfs.ErrVolume, cover: written[1].data}
	if covered := makePlan(args, img, testArch(t)); len(covered.searches)+len(covered.notes) != 0 {
		t.Errorf("over its own mounts the plan is %q, want no change", describe(t, covered))
	}
}

// A cache at the limit becomes too large with the driver's libraries, and would be refused at the next start.
func TestPlanIsIdempotentAtTheLimit(t *testing.T) {
	c := &ldcache.Cache{}
	for i := range ldcache.MaxEntries {
		c.Entries = append(c.Entries, ldcache.Entry{Name: fmt.Sprint("lib", i), Path: "/x"})
	}
	img := &image{libraries: []hookargs.Library{libml, libcuda}, glibc: true, cache: content{data: c.Marshal()}}
	first := makePlan(&hookargs.CreateContainer{}, img, testArch(t))
	if len(first.notes) != 1 || !strings.Contains(first.notes[0].Error(), cachePath) {
		t.Errorf("notes %v, want one that names %s", first.notes, cachePath)
	}
	img.cache.data = first.searches[0].data
	second := makePlan(&hookargs.CreateContainer{}, img, testArch(t))
	if len(second.notes) != 0 || string(first.searches[0].data) != string(second.searches[0].data) {
		t.Errorf("the second plan differs, with notes %v", second.notes)
	}
}

func TestIsGlibcDefault(t *testing.T) {
	debian := map[string]bool{"/lib/x86_64-linux-gnu/libc.so.6": true}
	fedora := map[string]bool{"/usr/lib64/libc.so.6": true}
	for name, tc := range map[string]struct {
		dir  string
		has  map[string]bool
		want bool
	}{
		"where libc is":                         {"/usr/lib64", fedora, true},
		"the same without /usr":                 {"/lib64", fedora, true},
		"the same with /usr":                    {"/usr/lib/x86_64-linux-gnu", debian, true},
		"Debian's directory in a Fedora image":  {"/usr/lib/x86_64-linux-gnu", fedora, false},
		"Fedora's directory in a Debian image":  {"/usr/lib64", debian, false},
		"a directory that only looks like /usr": {"/usr64/lib", debian, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := isGlibcDefault(tc.dir, func(f string) bool { return tc.has[f] }); got != tc.want {
				t.Errorf("isGlibcDefault(%q) = %v, want %v", tc.dir, got, tc.want)
			}
		})
	}
}

func TestArchFor(t *testing.T) {
	for _, goarch := range []string{"amd64", "arm64"} {
		if a, err := archFor(goarch); err != nil || a.flags == 0 || !strings.HasPrefix(a.muslPath, "/etc/ld-musl-") {
			t.Errorf("archFor(%q) = %+v, %v", goarch, a, err)
		}
	}
	if _, err := archFor("riscv64"); err == nil {
		t.Error("no error for an architecture without a driver")
	}
}

func TestMaskParams(t *testing.T) {
	for name, tc := range map[string]struct{ in, want string }{
		"on, among others":      {"A: 1\nModifyDeviceFiles: 1\nB: 2\n", "A: 1\nModifyDeviceFiles: 0\nB: 2\n"},
		"on, without a newline": {"ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0"},
		"off":                   {"ModifyDeviceFiles: 0\n", ""},
		"another number":        {"ModifyDeviceFiles: 11\n", ""},
		"another name":          {"xModifyDeviceFiles: 1\n", ""},
		"absent":                {"A: 1\n", ""},
		"empty":                 {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := string(maskParams([]byte(tc.in))); got != tc.want {
				t.Errorf("maskParams(%q) = %q, want %q", tc.in, got, tc.want)
			}
		})
	}
}

func FuzzMaskParams(f *testing.F) {
	f.Add([]byte("A: 1\nModifyDeviceFiles: 1\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		out := maskParams(in)
		if out == nil {
			return
		}
		if len(out) != len(in) {
			t.Errorf("%q became %q", in, out)
		}
		if again := maskParams(out); again != nil {
			t.Errorf("%q became %q the second time", out, again)
		}
	})
}

func TestVersions(t *testing.T) {
	// Ascending.
	list := []string{"525.60", "525.60.13", "535.54.3", "535.129.03", "550.54.14", "580.65.06", "580.126.09", "1000.0"}
	for i, a := range list {
		for j, b := range list {
			v, _ := parseVersion(a)
			w, _ := parseVersion(b)
			if got := v.compare(w); got != sign(i-j) {
				t.Errorf("compare(%q, %q) = %d, want %d", a, b, got, sign(i-j))
			}
		}
	}
	for _, s := range []string{"", "580", "580.", ".1", "580.x", "580.1-rc", "1.99999999999", "-1.2", "+1.2"} {
		if v, ok := parseVersion(s); ok {
			t.Errorf("parseVersion(%q) = %v, want none", s, v)
		}
	}
}

func sign(n int) int {
	switch {
	case n < 0:
		return -1
	case n > 0:
		return 1
	}
	return 0
}

func FuzzVersion(f *testing.F) {
	f.Add("580.126.09", "575.57.08")
	f.Fuzz(func(t *testing.T, a, b string) {
		v, okV := parseVersion(a)
		w, okW := parseVersion(b)
		if (v == nil) == okV {
			t.Errorf("parseVersion(%q) = %v, %v", a, v, okV)
		}
		if okV && okW && v.compare(w) != -w.compare(v) {
			t.Errorf("%q and %q compare differently both ways", a, b)
		}
	})
}

func TestAbridge(t *testing.T) {
	if got := abridge([]string{"a", "b", "c", "d"}); got != "a, b, c and 1 more" {
		t.Errorf("got %q", got)
	}
	if got := abridge([]string{"a"}); got != "a" {
		t.Errorf("got %q", got)
	}
}
