package hook

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/hook/rootfs"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/ldcache"
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

// describe formats a plan as lines.
func describe(t *testing.T, p *plan) []string {
	t.Helper()
	var lines []string
	for _, l := range p.links {
		lines = append(lines, l.Path+" -> "+l.Target)
	}
	for _, s := range p.loaderFiles {
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
	for _, n := range p.warnings {
		lines = append(lines, "warning: "+n.Error())
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
		seen observation
		want []string
	}{
		"no arguments": {seen: observation{cache: none}},
		"the driver's libraries come before the image's of the same name": {
			seen: observation{libraries: libs, glibc: true, cache: cacheOf(
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
			seen: observation{libraries: libs, compat: []hookargs.Library{compat}, glibc: true, cache: cacheOf()},
			want: []string{
				"cache by ldconfig",
				"cache libnvidia-ml.so.1 0x303 => /drv/libnvidia-ml.so.580.1",
				"cache libcuda.so.1 0x303 => /usr/local/cuda/compat/libcuda.so.1",
			},
		},
		"no cache": {seen: observation{libraries: libs, glibc: true, cache: none}, want: fresh},
		"no libraries": {
			seen: observation{glibc: true, cache: cacheOf()},
		},
		"neither a loader nor a cache": {seen: observation{libraries: libs, cache: none}},
		"names of links beside a library, for the first library of that name": {
			args: hookargs.CreateContainer{Links: []hookargs.Link{
				{Path: "/drv/libcuda.so", Target: "libcuda.so.1"},
				{Path: "/drv/libcuda.so.1", Target: "libcuda.so.580.1"},
				{Path: "/drv/libml_indirect.so.0", Target: "libnvidia-ml.so.580.1"},
				{Path: "/drv/gbm/nvidia-drm_gbm.so", Target: "../libnvidia-ml.so.1"},
				{Path: "/drv/libabsent.so", Target: "libabsent.so.1"},
				{Path: "/drv/plugin.so", Target: "libnvidia-ml.so.1"},
			}},
			seen: observation{libraries: libs, compat: []hookargs.Library{compat}, glibc: true, cache: cacheOf()},
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
		"a cache without a loader": {
			seen: observation{libraries: libs, cache: content{data: []byte("damaged")}},
			want: append(fresh[:3:3], "warning: /etc/ld.so.cache: not a usable ld.so.cache: no known magic number; "+
				"a new file replaces it"),
		},
		"a cache that cannot be read": {
			seen: observation{libraries: libs, glibc: true, cache: content{err: rootfs.ErrNotRegular}},
			want: append(fresh[:3:3], "warning: not a regular file; a new file replaces it"),
		},
		"musl without a path file": {
			seen: observation{libraries: libs, musl: true, cache: none, muslPath: none},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				"/drv/libnvidia-ml.so.1 -> libnvidia-ml.so.580.1",
				`/etc/ld-musl-x86_64.path: "/lib\n/usr/local/lib\n/usr/lib\n/drv\n"`,
			},
		},
		"musl with a path file": {
			args: hookargs.CreateContainer{
				Links: []hookargs.Link{{Path: "/drv/libcuda.so.1", Target: "libcuda.so.580.1"}},
			},
			seen: observation{
				libraries: libs, musl: true, cache: none, muslPath: content{data: []byte("/lib:/opt/lib")},
			},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				"/drv/libnvidia-ml.so.1 -> libnvidia-ml.so.580.1",
				`/etc/ld-musl-x86_64.path: "/lib\n/opt/lib\n/drv\n"`,
			},
		},
		"musl with the directory in its path file already": {
			seen: observation{
				libraries: libs[:1], musl: true, cache: none, muslPath: content{data: []byte("/drv:/lib")},
			},
			want: []string{"/drv/libcuda.so.1 -> libcuda.so.580.1"},
		},
		"musl with a path file that cannot be read": {
			seen: observation{
				libraries: libs[:1], musl: true, cache: none, muslPath: content{err: errors.New("file too large")},
			},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				`/etc/ld-musl-x86_64.path: "/lib\n/usr/local/lib\n/usr/lib\n/drv\n"`,
				"warning: file too large; a new file replaces it",
			},
		},
		"musl with an empty path file": {
			seen: observation{libraries: libs[:1], musl: true, cache: none, muslPath: content{data: []byte{}}},
			want: []string{"/drv/libcuda.so.1 -> libcuda.so.580.1", `/etc/ld-musl-x86_64.path: "/drv\n"`},
		},
		"musl with a path file that has other text than directories": {
			seen: observation{libraries: libs[:1], musl: true, cache: none, muslPath: content{data: []byte(
				"/lib/\npassword=x:lib:/a/../b:/c//d:/\x01:/with space\n" +
					strings.Repeat("/", 4096) + "\n/" + strings.Repeat("y", 4095))}},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				`/etc/ld-musl-x86_64.path: "/lib\n/with space\n/drv\n"`,
				"warning: /etc/ld-musl-x86_64.path: " +
					"dropped 7 parts that are not clean absolute paths, or beyond the limit of 100",
			},
		},
		"musl with a path file of many directories": {
			seen: observation{
				libraries: libs[:1], musl: true, cache: none,
				muslPath: content{data: []byte(strings.Repeat("/x:", 101))},
			},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				`/etc/ld-musl-x86_64.path: "` + strings.Repeat(`/x\n`, 100) + `/drv\n"`,
				"warning: /etc/ld-musl-x86_64.path: " +
					"dropped 1 parts that are not clean absolute paths, or beyond the limit of 100",
			},
		},
		"musl's path file and the cache are on a volume": {
			seen: observation{
				libraries: libs[:1], musl: true, glibc: true,
				cache: content{
					err: rootfs.ErrVolume, cover: cacheOf(ldcache.Entry{Name: "libsecret.so.1", Path: "/secret"}).data,
				},
				muslPath: content{err: rootfs.ErrVolume, cover: []byte("/secret")},
			},
			want: []string{
				"/drv/libcuda.so.1 -> libcuda.so.580.1",
				"cache by " + generator,
				"cache libcuda.so.1 0x303 => /drv/libcuda.so.580.1",
				`/etc/ld-musl-x86_64.path: "/lib\n/usr/local/lib\n/usr/lib\n/drv\n"`,
				"warning: on another mount than the container's root; a new file replaces it",
				"warning: on another mount than the container's root; a new file replaces it",
			},
		},
		"musl's path file and the cache are mounted over with the same content": {
			seen: observation{
				libraries: libs[:1], musl: true, glibc: true,
				cache: content{err: rootfs.ErrVolume, cover: cacheOf(
					ldcache.Entry{Name: "libz.so.1", Path: "/lib/libz.so.1", Flags: ldcache.FlagsX8664},
					ldcache.Entry{Name: "libcuda.so.1", Path: libcuda.Path, Flags: ldcache.FlagsX8664}).data},
				muslPath: content{err: rootfs.ErrVolume, cover: []byte("/lib\n/drv\n")},
			},
			want: []string{"/drv/libcuda.so.1 -> libcuda.so.580.1"},
		},
		"musl's default path has the directory": {
			seen: observation{
				libraries: []hookargs.Library{{SONAME: "libcuda.so.1", Path: "/usr/lib/libcuda.so.1"}},
				musl:      true, cache: none, muslPath: none,
			},
		},
		"musl's default path has the directory, but the path file cannot be read": {
			seen: observation{
				libraries: []hookargs.Library{{SONAME: "libcuda.so.1", Path: "/usr/lib/libcuda.so.1"}},
				musl:      true, cache: none, muslPath: content{err: rootfs.ErrNotRegular},
			},
			want: []string{
				`/etc/ld-musl-x86_64.path: "/lib\n/usr/local/lib\n/usr/lib\n"`,
				"warning: not a regular file; a new file replaces it",
			},
		},
		"a cache with entries that ldconfig never writes": {
			seen: observation{libraries: libs[:1], glibc: true, cache: cacheOf(
				ldcache.Entry{Name: "libz.so.1", Path: "/opt/../lib/libz.so.1", Flags: ldcache.FlagsX8664},
				ldcache.Entry{Name: "password", Path: "secret", Flags: ldcache.FlagsX8664},
				ldcache.Entry{Name: "a/b", Path: "/lib/b", Flags: ldcache.FlagsX8664},
			)},
			want: []string{
				"cache by ldconfig",
				"cache libz.so.1 0x303 => /opt/../lib/libz.so.1",
				"cache libcuda.so.1 0x303 => /drv/libcuda.so.580.1",
				"warning: /etc/ld.so.cache: dropped 2 entries without a name or an absolute path",
			},
		},
		"links by PCI address for the container's nodes": {
			args: hookargs.CreateContainer{DRI: []hookargs.DRI{
				{PCIBusID: "0000:1b:00.0", Nodes: []string{"card1", "renderD129"}},
				{PCIBusID: "0000:43:00.0", Nodes: []string{"card2", "renderD130", "control"}},
			}},
			seen: observation{
				cache: none,
				nodes: map[string]bool{"card1": true, "renderD129": true, "renderD130": true, "control": true},
			},
			want: []string{
				"/dev/dri/by-path/pci-0000:1b:00.0-card -> ../card1",
				"/dev/dri/by-path/pci-0000:1b:00.0-render -> ../renderD129",
				"/dev/dri/by-path/pci-0000:43:00.0-render -> ../renderD130",
			},
		},
		"the parameters and the profile": {
			seen: observation{
				cache: none, params: []byte("A: 1\nModifyDeviceFiles: 1\n"), minors: []uint32{0, 3, 63, 64},
			},
			want: []string{
				profilePath + `: {"profiles":[{"name":"_container_",` +
					`"settings":["EGLVisibleDGPUDevices",0x8000000000000009]}],` +
					`"rules":[{"pattern":[],"profile":"_container_"}]}`,
				`mount /proc/driver/nvidia/params: "A: 1\nModifyDeviceFiles: 0\n"`,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := describe(t, makePlan(&tc.args, &tc.seen, testArch(t)))
			if diff := gocmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// The plan of a second run has the files that the first run wrote.
func TestPlanIsIdempotent(t *testing.T) {
	libs := []hookargs.Library{libml, libcuda}
	seen := &observation{libraries: libs, glibc: true, musl: true, muslPath: none, cache: cacheOf(
		ldcache.Entry{Name: "libz.so.1", Path: "/lib/libz.so.1", Flags: ldcache.FlagsX8664},
		ldcache.Entry{Name: "libcuda.so.1", Path: "/usr/lib/libcuda.so.1", Flags: ldcache.FlagsX8664})}
	args := &hookargs.CreateContainer{}
	first := makePlan(args, seen, testArch(t))
	written := []content{{data: first.loaderFiles[0].data}, {data: first.loaderFiles[1].data}}
	seen.cache, seen.muslPath = written[0], written[1]
	second := makePlan(args, seen, testArch(t))
	if len(second.loaderFiles) != 1 || !bytes.Equal(second.loaderFiles[0].data, written[0].data) ||
		len(second.warnings) != 0 {
		t.Errorf("the second plan is %q, want the same cache and nothing else", describe(t, second))
	}
	// In a read-only root the first run mounts both.
	seen.cache = content{err: rootfs.ErrVolume, cover: written[0].data}
	seen.muslPath = content{err: rootfs.ErrVolume, cover: written[1].data}
	if covered := makePlan(args, seen, testArch(t)); len(covered.loaderFiles)+len(covered.warnings) != 0 {
		t.Errorf("with both mounted already the plan is %q, want no change", describe(t, covered))
	}
}

// With the driver's libraries a cache at the limit becomes too large, and the next run would not parse it.
func TestPlanIsIdempotentAtTheLimit(t *testing.T) {
	c := &ldcache.Cache{}
	for i := range ldcache.MaxEntries {
		c.Entries = append(c.Entries, ldcache.Entry{Name: fmt.Sprint("lib", i), Path: "/x"})
	}
	seen := &observation{libraries: []hookargs.Library{libml, libcuda}, glibc: true, cache: content{data: c.Marshal()}}
	first := makePlan(&hookargs.CreateContainer{}, seen, testArch(t))
	if len(first.warnings) != 1 || !strings.Contains(first.warnings[0].Error(), cachePath) {
		t.Errorf("warnings %v, want one that names %s", first.warnings, cachePath)
	}
	seen.cache.data = first.loaderFiles[0].data
	second := makePlan(&hookargs.CreateContainer{}, seen, testArch(t))
	if len(second.warnings) != 0 || string(first.loaderFiles[0].data) != string(second.loaderFiles[0].data) {
		t.Errorf("the second plan differs, with warnings %v", second.warnings)
	}
}

func TestGlibcDirs(t *testing.T) {
	debian := map[string]bool{"/lib/x86_64-linux-gnu/libc.so.6": true}
	fedora := map[string]bool{"/usr/lib64/libc.so.6": true}
	for name, tc := range map[string]struct {
		dir   string
		files map[string]bool
		want  bool
	}{
		"the directory of libc":                 {"/usr/lib64", fedora, true},
		"the same without /usr":                 {"/lib64", fedora, true},
		"the same with /usr":                    {"/usr/lib/x86_64-linux-gnu", debian, true},
		"Debian's directory in a Fedora image":  {"/usr/lib/x86_64-linux-gnu", fedora, false},
		"Fedora's directory in a Debian image":  {"/usr/lib64", debian, false},
		"a directory that only looks like /usr": {"/usr64/lib", debian, false},
	} {
		t.Run(name, func(t *testing.T) {
			libs := []hookargs.Library{
				{Path: tc.dir + "/libcuda.so.1"}, {Path: tc.dir + "/libnvidia-ml.so.1"}, {Path: "/drv/libx.so"},
			}
			var want []string
			if tc.want {
				want = []string{tc.dir}
			}
			if got := glibcDirs(libs, func(f string) bool { return tc.files[f] }); !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
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

func FuzzSearchDirs(f *testing.F) {
	f.Add([]byte("/lib:/usr/local/lib\n/usr/lib/"))
	f.Fuzz(func(t *testing.T, data []byte) {
		dirs, _ := searchDirs(data)
		again, dropped := searchDirs([]byte(strings.Join(dirs, "\n")))
		if len(dirs) > maxMuslDirs || !slices.Equal(again, dirs) || dropped != 0 {
			t.Errorf("%q became %q, and then %q", data, dirs, again)
		}
	})
}

func TestParseVersion(t *testing.T) {
	ascending := []string{
		"525.60", "525.60.13", "535.54.3", "535.129.03", "550.54.14", "580.65.06", "580.126.09", "1000.0",
	}
	for i, a := range ascending {
		for j, b := range ascending {
			if got := slices.Compare(parseVersion(a), parseVersion(b)); got != cmp.Compare(i, j) {
				t.Errorf("%q and %q compare as %d, want %d", a, b, got, cmp.Compare(i, j))
			}
		}
	}
	for _, s := range []string{"", "580", "580.", ".1", "580.x", "580.1-rc", "1.99999999999", "-1.2", "+1.2"} {
		if v := parseVersion(s); v != nil {
			t.Errorf("parseVersion(%q) = %v, want nil", s, v)
		}
	}
}
