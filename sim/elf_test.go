package sim

import (
	"bytes"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/testenv"
)

var stubLibrary = Library{
	SONAME: "libstub.so.1",
	Note:   &Note{Section: ".note.cuda.fwd_compatibility", Name: "NVIDIA", Type: 3, Desc: []byte(`{"a": [1]}`)},
}

// TestLoaderAcceptsLibraries checks the libraries with dlopen and ldd.
func TestLoaderAcceptsLibraries(t *testing.T) {
	cc := testenv.Command(t, "cc")
	dir := t.TempDir()
	needy := Library{SONAME: "libneedy.so.2", Needed: []string{"libstub.so.1"}}
	for file, l := range map[string]Library{"libstub.so.1": stubLibrary, "libneedy.so.2": needy} {
		if err := l.WriteELF(filepath.Join(dir, file)); err != nil {
			t.Fatal(err)
		}
	}
	source := filepath.Join(dir, "open.c")
	program := `#include <dlfcn.h>
#include <stdio.h>
int main(void) {
	if (dlopen("libneedy.so.2", RTLD_NOW) && dlopen("libstub.so.1", RTLD_NOW | RTLD_NOLOAD)) return 0;
	puts(dlerror());
	return 1;
}`
	if err := os.WriteFile(source, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(dir, "open")
	if out, err := exec.Command(cc, "-o", open, source, "-ldl").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := exec.Command(open)
	cmd.Env = []string{"LD_LIBRARY_PATH=" + dir}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("dlopen: %v: %s", err, out)
	}
}

func TestLibraryHeaders(t *testing.T) {
	for _, arch := range []string{"amd64", "arm64"} {
		l := stubLibrary
		l.Arch = arch
		l.Needed = []string{"libc.so.6"}
		data, err := l.ELF()
		if err != nil {
			t.Fatal(err)
		}
		f, err := elf.NewFile(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		soname, err := f.DynString(elf.DT_SONAME)
		if err != nil || !cmp.Equal(soname, []string{"libstub.so.1"}) {
			t.Errorf("%s: SONAME is %q, error %v", arch, soname, err)
		}
		if needed, err := f.ImportedLibraries(); err != nil || !cmp.Equal(needed, l.Needed) {
			t.Errorf("%s: needs %q, error %v", arch, needed, err)
		}
		note := f.Section(l.Note.Section)
		if note == nil {
			t.Fatalf("%s: no section %s", arch, l.Note.Section)
		}
		if got, err := note.Data(); err != nil ||
			!bytes.HasSuffix(got, append([]byte("NVIDIA\x00\x00"+`{"a": [1]}`), 0, 0)) {
			t.Errorf("%s: the note is %q, error %v", arch, got, err)
		}
	}
}

func TestExitProgramRuns(t *testing.T) {
	data, err := exitProgram(runtime.GOARCH)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, data, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(path).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("running it: %v, output %q", err, out)
	}
}
