package driver

import (
	"bytes"
	"debug/elf"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/internal/elffile"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

func stub(t testing.TB, soname string) []byte {
	t.Helper()
	data, err := sim.Library{SONAME: soname, Needed: []string{"libc.so.6"}}.ELF()
	testenv.Must(t, err)
	return data
}

func parse(data []byte) (string, error) {
	return parseSONAME(bytes.NewReader(data), int64(len(data)))
}

func TestParseSONAME(t *testing.T) {
	for _, want := range []string{"libcuda.so.1", ""} {
		if got, err := parse(stub(t, want)); got != want || err != nil {
			t.Errorf("got %q, %v; want %q", got, err, want)
		}
	}
}

// The C library of this system was made by another toolchain than the simulated ones.
func TestReadSONAMEOfARealLibrary(t *testing.T) {
	for _, dir := range []string{multiarchDir, "/lib64", "/usr/lib"} {
		path, err := filepath.EvalSymlinks(filepath.Join(dir, "libc.so.6"))
		if err != nil {
			continue
		}
		got, err := readSONAME(path)
		if got != "libc.so.6" || err != nil {
			t.Errorf("%s: got %q, %v", path, got, err)
		}
		return
	}
	t.Log("this system has no glibc")
}

func TestReadSONAMEReturnsTheFileNameWithoutOne(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plugin.so")
	testenv.Must(t, os.WriteFile(path, stub(t, ""), 0o755))
	if got, err := readSONAME(path); got != "plugin.so" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
}

// A library that is cut off anywhere, or has another value in one byte, gives a name or an error, and never both.
func TestParseSONAMEOfDamagedLibraries(t *testing.T) {
	whole := stub(t, "libcuda.so.1")
	for n := range whole {
		if n > 4096 && n%997 != 0 {
			continue
		}
		if _, err := parse(whole[:n]); err == nil {
			t.Errorf("no error for the first %d of %d bytes", n, len(whole))
		}
	}
	for i := range min(len(whole), 2048) {
		for _, b := range []byte{0, 1, 0x7f, 0xff} {
			data := bytes.Clone(whole)
			data[i] = b
			if name, err := parse(data); err != nil && name != "" {
				t.Fatalf("byte %d as %#x: %q and %v", i, b, name, err)
			}
		}
	}
}

func TestParseSONAMERefusesOtherMachinesAndFiles(t *testing.T) {
	whole := stub(t, "libcuda.so.1")
	change := func(at int, b byte) []byte {
		data := bytes.Clone(whole)
		data[at] = b
		return data
	}
	if _, err := parse(change(0x12, 0xf3)); !errors.Is(err, elffile.ErrMachine) { // RISC-V
		t.Errorf("a library for another machine: %v", err)
	}
	_, err := parse(change(0x10, byte(elf.ET_EXEC)))
	checkError(t, err, "not a shared library")
	for _, name := range []string{"../../etc/passwd", "a/b", "a,b", "a=b", "a:b", ".."} {
		if got, err := parse(stub(t, name)); err == nil {
			t.Errorf("SONAME %q is taken as %q", name, got)
		}
	}
}

func FuzzParseSONAME(f *testing.F) {
	f.Add(stub(f, "libcuda.so.1"))
	f.Add([]byte("\x7fELF\x02\x01\x01"))
	f.Fuzz(func(t *testing.T, data []byte) {
		name, err := parse(data)
		if err != nil && name != "" {
			t.Fatalf("%q and the error %v", name, err)
		}
		if err == nil && name != "" && (!isPlain(name) || strings.Contains(name, "/")) {
			t.Errorf("SONAME %q", name)
		}
	})
}

// FuzzDiscover searches a root with a garbage library and a garbage loader cache. Nothing but the search for libraries
// reads these two.
func FuzzDiscover(f *testing.F) {
	f.Add(stub(f, "libcuda.so.1"), []byte("glibc-ld.so.cache1.1"), true)
	f.Add([]byte("\x7fELF"), []byte{}, false)
	trees := map[bool]*tree{}
	for core, garbage := range map[bool]string{true: "libcuda", false: "libnvcuvid"} {
		r := &tree{f, inMemory(f)}
		r.core("/usr/lib64", testVersion)
		r.library("/usr/lib64/libnvcuvid.so." + testVersion)
		r.path("/etc/ld.so.cache")
		r.link("/garbage", "usr/lib64/"+garbage+".so."+testVersion)
		trees[core] = r
	}
	f.Fuzz(func(t *testing.T, garbage, cache []byte, core bool) {
		r := &tree{t, trees[core].dir}
		testenv.Must(r.t, os.WriteFile(r.dir+"/garbage", garbage, 0o755))
		testenv.Must(r.t, os.WriteFile(r.dir+"/etc/ld.so.cache", cache, 0o644))
		s := newLibraryScan(newRoot(r.dir), testVersion)
		s.run("", nil)
		testenv.Must(r.t, s.check())
		d := s.driver()
		if err := d.Check(All); err != nil && !core {
			t.Errorf("a damaged library that is not needed is an error: %v", err)
		}
		used := 0
		for _, f := range d.Findings {
			if f.Used {
				used++
			}
			if f.Broken && (f.Used || f.Note == "") {
				t.Errorf("a broken library without a reason: %+v", f)
			}
		}
		if used != len(d.Libraries) {
			t.Errorf("%d libraries, and findings for %d", len(d.Libraries), used)
		}
		for _, l := range d.Libraries {
			if !isPlain(l.Path) || !isPlain(l.SONAME) {
				t.Errorf("a library that cannot be an argument of the hook: %+v", l)
			}
		}
	})
}

// inMemory is a directory in memory, if this machine has one: a fuzz test writes its input to a file thousands of
// times.
func inMemory(f *testing.F) string {
	f.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "fuzz")
	if err != nil {
		return f.TempDir()
	}
	f.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
