package ldcache_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/ldcache"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// load runs the root's /bin/loader in a chroot and returns its lines.
func load(t *testing.T, root string, names ...string) []string {
	t.Helper()
	cmd := exec.Command("/bin/loader", names...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	cmd.Dir = "/"
	out, err := cmd.Output()
	if exit, failed := err.(*exec.ExitError); err != nil && !failed { //nolint:errorlint // it is not wrapped
		t.Fatal(err)
	} else if failed && len(exit.Stderr) > 0 {
		t.Fatalf("loader: %s", exit.Stderr)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

func flags(t *testing.T) int32 {
	t.Helper()
	f, ok := ldcache.FlagsFor(runtime.GOARCH)
	if !ok {
		testenv.Skip(t, "no flags are known for "+runtime.GOARCH)
	}
	return f
}

func writeCache(t *testing.T, root string, c *ldcache.Cache) {
	t.Helper()
	testenv.Must(t, os.WriteFile(filepath.Join(root, "etc/ld.so.cache"), c.Marshal(), 0o644))
}

func TestLoaderFindsLibrariesThroughCache(t *testing.T) {
	testenv.Root(t)
	root := t.TempDir()
	image.GlibcRoot(t, root)
	image.Library(t, filepath.Join(root, "opt/driver/libcuda.so.580.1"), "libcuda.so.1")

	if got := load(t, root, "libcuda.so.1"); !strings.Contains(got[0], "cannot open shared object file") {
		t.Fatalf("without a cache: %q, want it not to be found", got)
	}
	// The binary search would miss some of these names if digits were compared as characters.
	c := &ldcache.Cache{}
	var names, want []string
	for i := range 400 {
		dir := fmt.Sprintf("/opt/driver/%d", i)
		name := fmt.Sprintf("lib%c%d_%c.so.%d", 'a'+i%7, i*i%1013, 'Z'-i%3, i%13)
		c.Entries = append(c.Entries, ldcache.Entry{Name: name, Path: dir + "/file.so", Flags: flags(t)})
		names, want = append(names, name), append(want, dir+"/file.so")
		image.CopyFile(t, filepath.Join(root, "opt/driver/libcuda.so.580.1"), filepath.Join(root, dir, "file.so"))
	}
	c.Entries = append(c.Entries,
		ldcache.Entry{Name: "libcuda.so.1", Path: "/opt/driver/libcuda.so.580.1", Flags: flags(t)},
		ldcache.Entry{Name: "libcuda.so.1", Path: "/wrong/architecture", Flags: 0x0503})
	writeCache(t, root, c)
	got := load(t, root, append([]string{"libcuda.so.1"}, names...)...)
	if diff := cmp.Diff(append([]string{"/opt/driver/libcuda.so.580.1"}, want...), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestLibrariesOfHWCapsDirectoriesAreStillPreferred(t *testing.T) {
	testenv.Root(t)
	ldconfig := testenv.Command(t, "ldconfig")
	root := t.TempDir()
	image.GlibcRoot(t, root)
	for _, dir := range []string{"", "glibc-hwcaps/x86-64-v2", "glibc-hwcaps/x86-64-v3"} {
		image.Library(t, filepath.Join(root, "opt/app", dir, "libapp.so.1"), "libapp.so.1")
	}
	conf := filepath.Join(root, "etc/ld.so.conf")
	testenv.Must(t, os.WriteFile(conf, []byte("/opt/app\n"), 0o644))
	if out, err := exec.Command(ldconfig, "-r", root).CombinedOutput(); err != nil {
		t.Fatalf("ldconfig: %v\n%s", err, out)
	}
	before := load(t, root, "libapp.so.1")

	data, err := os.ReadFile(filepath.Join(root, "etc/ld.so.cache"))
	testenv.Must(t, err)
	c, err := ldcache.Parse(data)
	testenv.Must(t, err)
	if runtime.GOARCH == "amd64" && (len(c.HWCaps) != 2 || c.Generator == "") {
		t.Errorf("extension block: names %q, generator %q", c.HWCaps, c.Generator)
	}
	image.Library(t, filepath.Join(root, "opt/driver/libcuda.so.580.1"), "libcuda.so.1")
	c.Prepend(ldcache.Entry{Name: "libcuda.so.1", Path: "/opt/driver/libcuda.so.580.1", Flags: flags(t)})
	writeCache(t, root, c)
	want := append(before, "/opt/driver/libcuda.so.580.1")
	if diff := cmp.Diff(want, load(t, root, "libapp.so.1", "libcuda.so.1")); diff != "" {
		t.Errorf("(-ldconfig's cache +ours):\n%s", diff)
	}
}

// ldconfig -p reads caches of this package, and Parse reads what ldconfig writes.
func TestLdconfigAgrees(t *testing.T) {
	ldconfig := testenv.Command(t, "ldconfig")
	root := t.TempDir()
	image.Library(t, filepath.Join(root, "lib/libapp.so.1"), "libapp.so.1")
	image.Library(t, filepath.Join(root, "lib/libapp.so.10"), "libapp.so.10")
	testenv.Must(t, os.MkdirAll(filepath.Join(root, "etc"), 0o755))
	file := filepath.Join(root, "etc/ld.so.cache")
	for _, format := range []string{"new", "compat"} {
		if out, err := exec.Command(ldconfig, "-r", root, "-c", format).CombinedOutput(); err != nil {
			t.Fatalf("ldconfig -c %s: %v\n%s", format, err, out)
		}
		data, err := os.ReadFile(file)
		testenv.Must(t, err)
		c, err := ldcache.Parse(data)
		if err != nil {
			t.Errorf("%s: %v", format, err)
			continue
		}
		if got, _ := c.Lookup("libapp.so.10", flags(t)); got != "/lib/libapp.so.10" {
			t.Errorf("%s: libapp.so.10 is at %q in %+v", format, got, c.Entries)
		}
		writeCache(t, root, c)
		out, err := exec.Command(ldconfig, "-p", "-C", file).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "libapp.so.10 (libc6,") {
			t.Errorf("%s: ldconfig -p: %v\n%s", format, err, out)
		}
	}
}
