package elffile

import (
	"debug/elf"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// Every library and position-independent program of this machine is compared.
func TestRealFilesAgreeWithTheStandardLibrary(t *testing.T) {
	self, err := os.Executable()
	testenv.Must(t, err)
	files := []string{self}
	for _, pattern := range []string{
		"/usr/lib/*-linux-gnu/*.so*", "/usr/lib/*-linux-gnu/*/*.so", "/usr/lib64/*.so*", "/usr/bin/*", "/usr/sbin/*",
	} {
		found, err := filepath.Glob(pattern)
		testenv.Must(t, err)
		files = append(files, found...)
	}
	seen := map[string]bool{}
	read := 0
	for _, file := range files {
		real, err := filepath.EvalSymlinks(file)
		if err != nil || seen[real] {
			continue
		}
		seen[real] = true
		if info, err := os.Stat(real); err == nil && info.Mode().IsRegular() && compare(t, real) {
			read++
		}
	}
	t.Logf("%d of %d files are libraries or such programs for this machine", read, len(seen))
}

// compare reports whether the file is a library or a position-independent program for this machine.
func compare(t *testing.T, file string) bool {
	t.Helper()
	r, err := os.Open(file)
	if errors.Is(err, os.ErrPermission) {
		return false
	}
	testenv.Must(t, err)
	defer r.Close()
	info, err := r.Stat()
	testenv.Must(t, err)
	f, ours := ReadLibrary(r, info.Size(), MachineOf(runtime.GOARCH))
	peer, theirs := elf.NewFile(r)
	switch {
	case theirs != nil:
		if ours == nil {
			t.Errorf("%s: debug/elf says %v", file, theirs)
		}
		return false
	case peer.Class != elf.ELFCLASS64 || peer.Data != elf.ELFDATA2LSB ||
		peer.Machine != MachineOf(runtime.GOARCH):
		if !errors.Is(ours, ErrMachine) {
			t.Errorf("%s is for %s, %s: got %v", file, peer.Machine, peer.Class, ours)
		}
		return false
	case peer.Type != elf.ET_DYN:
		if ours == nil {
			t.Errorf("%s is %s", file, peer.Type)
		}
		return false
	case ours != nil:
		t.Errorf("%s: %v", file, ours)
		return false
	}
	names, err := peer.DynString(elf.DT_SONAME)
	testenv.Must(t, err)
	want := strings.Join(names, "")
	if got, err := f.SONAME(); err != nil || got != want {
		t.Errorf("%s: got the SONAME %q and the error %v, debug/elf has %q", file, got, err, want)
	}
	return true
}
