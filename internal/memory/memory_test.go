package memory

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// mapFile maps a new file of one page that is full of x.
func mapFile(t *testing.T) []byte {
	t.Helper()
	return mapAs(t, unix.MAP_PRIVATE, unix.PROT_READ|unix.PROT_WRITE)
}

func mapAs(t *testing.T, flags, prot int) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, bytes.Repeat([]byte("x"), os.Getpagesize()), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, os.Getpagesize(), prot, flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(m) })
	return m
}

func protect(t *testing.T, m []byte) {
	t.Helper()
	if err := unix.Mprotect(m, unix.PROT_READ); err != nil {
		t.Fatal(err)
	}
}

// mapped reports whether this process's page table has the page. See pagemap in the kernel's documentation.
func mapped(t *testing.T, m []byte) bool {
	t.Helper()
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var entry [8]byte
	if _, err := f.ReadAt(entry[:], int64(uintptr(unsafe.Pointer(&m[0])))/int64(os.Getpagesize())*8); err != nil {
		t.Fatal(err)
	}
	return entry[7]&0x80 != 0
}

func TestGiveBackUnmapsWhatTheFileHas(t *testing.T) {
	m := mapFile(t)
	protect(t, m)
	if m[0] != 'x' || !mapped(t, m) {
		t.Fatal("the page is not mapped after it was read")
	}
	if err := GiveBack(); err != nil {
		t.Fatal(err)
	}
	if mapped(t, m) {
		t.Error("the page is still mapped")
	}
	if m[0] != 'x' {
		t.Errorf("the page has %q, want what is in the file", m[0])
	}
}

func TestGiveBackLosesNothing(t *testing.T) {
	relocated, writable := mapFile(t), mapFile(t)
	relocated[1], writable[1] = 'y', 'z'
	protect(t, relocated)
	if err := GiveBack(); err != nil {
		t.Fatal(err)
	}
	if relocated[1] != 'y' || writable[1] != 'z' {
		t.Errorf("the pages have %q and %q, want what was written to them, y and z", relocated[1], writable[1])
	}
}

// A page of a device cannot be mapped again, and what is shared may be a device.
func TestGiveBackLeavesWhatIsShared(t *testing.T) {
	m := mapAs(t, unix.MAP_SHARED, unix.PROT_READ)
	if m[0] != 'x' || !mapped(t, m) {
		t.Fatal("the page is not mapped after it was read")
	}
	if err := GiveBack(); err != nil {
		t.Fatal(err)
	}
	if !mapped(t, m) {
		t.Error("the page of a shared mapping is not mapped any more")
	}
}

// The first of several entries of /proc/self/smaps that matter here; each has more lines.
const smaps = `00400000-00a00000 r-xp 00011000 fe:00 12 /usr/bin/program
Rss:                6588 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me sd
00a00000-00b00000 r--p 00611000 fe:00 12 /usr/bin/program
Anonymous:             4 kB
00b00000-00c00000 rw-p 00711000 fe:00 12 /usr/bin/program
Anonymous:             0 kB
c000000000-c000400000 rw-p 00000000 00:00 0
Anonymous:          2600 kB
7f0000000000-7f0000100000 r--p 00000000 fe:00 13 /usr/lib/a library.so (deleted)
Anonymous:             0 kB
7fff00000000-7fff00002000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
7f1000000000-7f1000001000 r--s 00000000 00:05 321 /dev/nvidiactl
Anonymous:             0 kB
VmFlags: rd sh mr mm
7f2000000000-7f2000001000 r--p 00000000 00:05 322 /dev/a device
Anonymous:             0 kB
VmFlags: rd mr mw me io
7f3000000000-7f3000010000 r--p 00200000 fe:00 15 /usr/lib/relocated.so, and swapped out
Anonymous:             0 kB
Swap:                 64 kB
7f4000000000-7f4000200000 r--p 00000000 00:10 16 /dev/hugepages/file
Anonymous:             0 kB
Private_Hugetlb:    2048 kB
7f5000000000-7f5000200000 r--p 00000000 fe:00 17 /usr/lib/last.so
Anonymous:             0 kB
Private_Hugetlb:       0 kB
Swap:                  0 kB
VmFlags: rd mr mw me sd
nonsense-7fff00002000 r-xp 00000000 fe:00 14 /nonsense
Anonymous:             8 kB
`

func TestCleanMappings(t *testing.T) {
	got, err := clean(strings.NewReader(smaps))
	if err != nil {
		t.Fatal(err)
	}
	want := []mapping{
		{0x400000, 0xa00000, "/usr/bin/program"},
		{0x7f0000000000, 0x7f0000100000, "/usr/lib/a"},
		{0x7f5000000000, 0x7f5000200000, "/usr/lib/last.so"},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(mapping{})); diff != "" {
		t.Errorf("mappings that can be read again (-want +got):\n%s", diff)
	}
}

func TestAMappingWithAFlagThatTellsOfADevice(t *testing.T) {
	const entry = "7f0000000000-7f0000001000 r--p 00000000 00:05 1 /dev/device\nVmFlags: rd "
	for flag, want := range map[string]int{"mr": 1, "io": 0, "pf": 0, "mm": 0, "ht": 0, "lo": 0} {
		if got, err := clean(strings.NewReader(entry + flag + " sd\n")); err != nil || len(got) != want {
			t.Errorf("%s: %d can be read again, want %d; error %v", flag, len(got), want, err)
		}
	}
}
