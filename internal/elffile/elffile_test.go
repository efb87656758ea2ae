package elffile

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"io"
	"runtime"
	"strings"
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

const x86 = elf.EM_X86_64

// library makes a complete library for x86: headers, a segment with the strings, one with the dynamic table, and
// section headers.
func library(t testing.TB) []byte {
	t.Helper()
	return makeLibrary(t, sim.Library{SONAME: "libcuda.so.1", Needed: []string{"libc.so.6", "libm.so.6"}})
}

func makeLibrary(t testing.TB, l sim.Library) []byte {
	t.Helper()
	l.Arch = "amd64"
	data, err := l.ELF()
	testenv.Must(t, err)
	return data
}

func read(data []byte) (*File, error) {
	return ReadLibrary(bytes.NewReader(data), int64(len(data)), x86)
}

// set returns a change to a file: the number n at an offset, little-endian.
func set[N uint8 | uint16 | uint32 | uint64](at int, n N) func([]byte) []byte {
	return func(data []byte) []byte {
		var number bytes.Buffer
		_ = binary.Write(&number, binary.LittleEndian, n)
		copy(data[at:], number.Bytes())
		return data
	}
}

func cut(at int) func([]byte) []byte { return func(data []byte) []byte { return data[:at] } }

// program is the offset of a field in a program header.
func program(i, field int) int { return headerSize + i*programSize + field }

// The fields of a program header, and the headers of the simulation's libraries.
const (
	pType, pOffset, pAddr, pSize          = 0, 8, 16, 32
	headersLoad, dynamicLoad, table, last = 0, 1, 2, 3
)

func TestRead(t *testing.T) {
	size := len(library(t))
	for name, c := range map[string]struct {
		change func([]byte) []byte
		want   string // part of the error; empty for none
		is     error
	}{
		"a library":                     {cut(size), "", nil},
		"a library with more behind it": {func(b []byte) []byte { return append(b, 1, 2, 3) }, "", nil},
		"an empty file":                 {cut(0), "not an ELF file", nil},
		"a linker script": {
			func([]byte) []byte { return []byte("/* GNU ld script */\nGROUP ( libm.so.6 )\n") }, "not an ELF file", nil,
		},
		"only the magic number":      {cut(4), "truncated", errTruncated},
		"cut in the header":          {cut(40), "truncated", errTruncated},
		"cut in the program headers": {cut(100), "truncated", errTruncated},
		"cut in the last segment":    {cut(size / 2), "truncated", errTruncated},
		"cut in the section headers": {cut(size - 1), "truncated", errTruncated},
		"a 32-bit library": {
			set(elf.EI_CLASS, uint8(elf.ELFCLASS32)), "it is a 32-bit file", ErrMachine,
		},
		"an unknown class": {set[uint8](elf.EI_CLASS, 9), "unknown class 9", nil},
		"big-endian": {
			set(elf.EI_DATA, uint8(elf.ELFDATA2MSB)), "it is a big-endian file", ErrMachine,
		},
		"an unknown byte order":              {set[uint8](elf.EI_DATA, 9), "unknown byte order 9", nil},
		"another version in the first bytes": {set[uint8](elf.EI_VERSION, 2), "unknown version", nil},
		"another version in the header":      {set[uint32](20, 3), "unknown version", nil},
		"another machine": {
			set(18, uint16(elf.EM_AARCH64)), "it is for EM_AARCH64, this machine is EM_X86_64", ErrMachine,
		},
		"another machine's, truncated": {
			func(b []byte) []byte { return set(18, uint16(elf.EM_386))(b)[:200] }, "EM_386", ErrMachine,
		},
		"an object file": {
			set(16, uint16(elf.ET_REL)), "not a shared library but ET_REL", nil,
		},
		"a program": {
			set(16, uint16(elf.ET_EXEC)), "not a shared library but ET_EXEC", nil,
		},
		"no program headers":                 {set[uint16](56, 0), "no usable program headers", nil},
		"program headers of another size":    {set[uint16](54, 57), "no usable program headers", nil},
		"program headers past the end":       {set(32, uint64(size)), "truncated", errTruncated},
		"program headers at 2^63":            {set[uint64](32, 1<<63), "truncated", errTruncated},
		"program headers at the last number": {set(32, ^uint64(0)), "truncated", errTruncated},
		"as many program headers as can be":  {set[uint16](56, 0xffff), "truncated", errTruncated},
		"a segment that begins past the end": {
			set(program(last, pOffset), uint64(size)+1), "truncated", errTruncated,
		},
		"a segment that ends past the end": {
			set(program(0, pSize), uint64(size)+1), "truncated", errTruncated,
		},
		"a segment at 2^63":                   {set[uint64](program(1, pOffset), 1<<63), "truncated", errTruncated},
		"a segment of 2^64-1 bytes":           {set(program(1, pSize), ^uint64(0)), "truncated", errTruncated},
		"a segment whose end overflows to 0":  {set(program(1, pSize), -uint64(size)), "truncated", errTruncated},
		"section headers past the end":        {set[uint16](60, 0xffff), "truncated", errTruncated},
		"section headers at the last number":  {set(40, ^uint64(0)), "truncated", errTruncated},
		"section headers that overlap others": {set[uint64](40, 0), "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := read(c.change(library(t)))
			if (f == nil) == (err == nil) {
				t.Fatalf("got %v and the error %v, want exactly one", f, err)
			}
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) || c.is != nil &&
				!errors.Is(err, c.is) {
				t.Errorf("got the error %v, want %q in it", err, c.want)
			}
		})
	}
}

func TestReadRefusesEveryPrefixOfALibrary(t *testing.T) {
	whole := library(t)
	for n := range whole {
		if _, err := read(whole[:n]); err == nil {
			t.Fatalf("the first %d of %d bytes are accepted", n, len(whole))
		}
	}
}

// failing is a file that cannot be read past an offset.
type failing struct {
	io.ReaderAt
	from int64
}

var errDisk = errors.New("input/output error")

func (f failing) ReadAt(p []byte, off int64) (int, error) {
	if off+int64(len(p)) > f.from {
		return 0, errDisk
	}
	return f.ReaderAt.ReadAt(p, off)
}

func TestReadReturnsTheErrorOfTheDisk(t *testing.T) {
	data := library(t)
	if f, err := ReadLibrary(failing{bytes.NewReader(data), 0}, int64(len(data)), x86); f != nil ||
		!errors.Is(err, errDisk) {
		t.Errorf("in the header: %v, %v", f, err)
	}
	data = append(data, make([]byte, 64<<10)...)
	table := data[len(data)-programSize:]
	copy(table, data[headerSize:])
	data = set[uint16](56, 1)(set(32, uint64(len(data)-programSize))(data))
	if f, err := ReadLibrary(failing{bytes.NewReader(data), 4096}, int64(len(data)), x86); f != nil ||
		!errors.Is(err, errDisk) {
		t.Errorf("in the program headers: %v, %v", f, err)
	}
}

func TestReadOfAFileThatBecomesShorter(t *testing.T) {
	data := library(t)
	for n := range data {
		f, err := ReadLibrary(bytes.NewReader(data[:n]), int64(len(data)), x86)
		soname := ""
		if err == nil {
			soname, err = f.SONAME()
		}
		// The section headers at the end are not read.
		if !errors.Is(err, errTruncated) && (err != nil || soname != "libcuda.so.1") {
			t.Fatalf("%d of %d bytes are left: %q, %v", n, len(data), soname, err)
		}
	}
}

func TestMachineOf(t *testing.T) {
	for goarch, want := range map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		if got := MachineOf(goarch); got != want {
			t.Errorf("%s is %s, want %s", goarch, got, want)
		}
	}
}

// endless is a file of 1 TiB without memory: a beginning, then zeros.
type endless []byte

const endlessSize = 1 << 40

func (e endless) ReadAt(p []byte, off int64) (int, error) {
	clear(p)
	if off < int64(len(e)) {
		copy(p, e[off:])
	}
	return len(p), nil
}

func TestMemoryIsBounded(t *testing.T) {
	for name, change := range map[string]func([]byte) []byte{
		"as many program headers as can be": set[uint16](56, 0xffff),
		"a segment of 1 TiB":                set[uint64](program(dynamicLoad, pSize), endlessSize/2),
		"a dynamic table of 1 TiB":          set[uint64](program(table, pSize), endlessSize/2),
		"a string table of 1 TiB": func(b []byte) []byte {
			return setEntry(t, elf.DT_STRSZ, endlessSize/2)(set[uint64](program(headersLoad, pSize), endlessSize)(b))
		},
	} {
		data := change(library(t))
		before := allocated()
		if f, err := ReadLibrary(endless(data), endlessSize, x86); err == nil {
			_, _ = f.SONAME()
		}
		if used := allocated() - before; used > 8<<20 {
			t.Errorf("%s costs %d bytes", name, used)
		}
	}
}

func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

func FuzzRead(f *testing.F) {
	whole := library(f)
	f.Add(whole)
	f.Add(whole[:200])
	f.Add([]byte(elf.ELFMAG))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := read(data)
		if (file == nil) == (err == nil) {
			t.Fatalf("got %v and the error %v, want exactly one", file, err)
		}
		if err != nil {
			return
		}
		soname, err := file.SONAME()
		checkName(t, err, soname)
		checkSegments(t, data)
	})
}

func checkName(t *testing.T, err error, name string) {
	t.Helper()
	if err != nil && name != "" || len(name) >= maxName || strings.Contains(name, "\x00") {
		t.Errorf("got %q and the error %v", name, err)
	}
}

// checkSegments checks with debug/elf that a file has all its segments.
func checkSegments(t *testing.T, data []byte) {
	t.Helper()
	parsed, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return // debug/elf is stricter about parts that a loader does not read
	}
	for _, p := range parsed.Progs {
		if p.Filesz == 0 {
			continue
		}
		if _, err := p.ReadAt(make([]byte, 1), int64(p.Filesz)-1); err != nil {
			t.Errorf("segment at %#x of %#x bytes: %v", p.Off, p.Filesz, err)
		}
	}
}
