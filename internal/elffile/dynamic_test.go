package elffile

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/sim"
)

// fields are the results of all methods.
type fields struct {
	SONAME, Interp string
	Needed         []string
}

func readFields(f *File) (a fields, err error) {
	if a.SONAME, err = f.SONAME(); err != nil {
		return a, err
	}
	if a.Needed, err = f.Needed(); err != nil {
		return a, err
	}
	a.Interp, err = f.Interp()
	return a, err
}

func readAllFields(data []byte) (fields, error) {
	f, err := read(data)
	if err != nil {
		return fields{}, err
	}
	return readFields(f)
}

// dynamicTable returns the offset and the size of a simulated library's dynamic table.
func dynamicTable(data []byte) (offset, size int) {
	le := binary.LittleEndian
	return int(le.Uint64(data[program(table, pOffset):])), int(le.Uint64(data[program(table, pSize):]))
}

// entry returns the offset of the first entry with a tag.
func entry(t testing.TB, data []byte, tag elf.DynTag) int {
	t.Helper()
	offset, size := dynamicTable(data)
	for at := offset; at < offset+size; at += entrySize {
		if elf.DynTag(binary.LittleEndian.Uint64(data[at:])) == tag {
			return at
		}
	}
	t.Fatalf("no entry %s", tag)
	return 0
}

func setEntry(t testing.TB, tag elf.DynTag, value uint64) func([]byte) []byte {
	return func(data []byte) []byte { return set(entry(t, data, tag)+8, value)(data) }
}

// retag changes the tag of the first entry with that tag.
func retag(t testing.TB, from, to elf.DynTag) func([]byte) []byte {
	return func(data []byte) []byte { return set(entry(t, data, from), uint64(to))(data) }
}

// withInterp appends the path of a loader, and makes the last program header refer to it.
func withInterp(path string) func([]byte) []byte {
	return func(data []byte) []byte {
		end := uint64(len(data))
		set(program(last, pType), uint32(elf.PT_INTERP))(data)
		set(program(last, pOffset), end)(data)
		set(program(last, pSize), uint64(len(path)))(data)
		return append(data, path...)
	}
}

// withoutSections removes everything after the last segment, with the section headers.
func withoutSections(data []byte) []byte {
	clear(data[40:48])
	clear(data[58:64])
	offset, size := dynamicTable(data)
	return data[:offset+size]
}

// headersAtTheEnd moves the program headers to the end, as patchelf does, after more other headers than the first read
// covers.
func headersAtTheEnd(data []byte) []byte {
	own := bytes.Clone(data[headerSize:program(last+1, 0)])
	set(32, uint64(len(data)))(data)
	set(56, uint16(50+last+1))(data)
	return append(append(data, make([]byte, 50*programSize)...), own...)
}

// twoTables makes the last program header that of a second dynamic table, which is valid. The first becomes invalid.
func twoTables(data []byte) []byte {
	copy(data[program(last, 0):], data[program(table, 0):program(table+1, 0)])
	return set(program(table, pAddr), ^uint64(0))(data)
}

// covered adds a segment with another name at the address of the first.
func covered(data []byte) []byte {
	end := len(data)
	data = append(data, bytes.ReplaceAll(data, []byte("libcuda"), []byte("libover"))...)
	copy(data[program(last, 0):], data[program(headersLoad, 0):program(headersLoad+1, 0)])
	return set(program(last, pOffset), uint64(end))(data)
}

func TestFields(t *testing.T) {
	all := fields{SONAME: "libcuda.so.1", Needed: []string{"libc.so.6", "libm.so.6"}}
	loader := "/lib64/ld-linux-x86-64.so.2"
	withLoader := all
	withLoader.Interp = loader
	long := strings.Repeat("x", 3000) + ".so"
	many := make([]string, 300)
	for i := range many {
		many[i] = fmt.Sprintf("lib%d.so", i)
	}
	for name, c := range map[string]struct {
		file []byte
		want fields
	}{
		"a library":                         {library(t), all},
		"a library without section headers": {withoutSections(library(t)), all},
		"program headers at the end":        {headersAtTheEnd(library(t)), all},
		"a library without names":           {makeLibrary(t, sim.Library{}), fields{}},
		"an empty name":                     {setEntry(t, elf.DT_SONAME, 0)(library(t)), fields{Needed: all.Needed}},
		"a name of thousands of bytes":      {makeLibrary(t, sim.Library{SONAME: long}), fields{SONAME: long}},
		"hundreds of needed libraries":      {makeLibrary(t, sim.Library{Needed: many}), fields{Needed: many}},
		"two names, the last is used": {
			retag(t, elf.DT_NEEDED, elf.DT_SONAME)(library(t)), fields{SONAME: "libcuda.so.1", Needed: all.Needed[1:]},
		},
		"two tables, the last is used": {twoTables(library(t)), all},
		"a segment that covers another": {
			covered(library(t)), fields{SONAME: "libover.so.1", Needed: all.Needed},
		},
		"no dynamic table": {
			set(program(table, pType), uint32(elf.PT_NOTE))(library(t)), fields{},
		},
		"a program":                         {withInterp(loader + "\x00")(library(t)), withLoader},
		"a program without section headers": {withInterp(loader + "\x00")(withoutSections(library(t))), withLoader},
		"bytes after the loader's NUL":      {withInterp(loader + "\x00\x00x\x00")(library(t)), withLoader},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := readAllFields(c.file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestDamagedFieldsAreErrors(t *testing.T) {
	size := uint64(len(library(t)))
	tooMany := make([]string, maxNames+1)
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"a dynamic table that is not loaded": {
			set(program(dynamicLoad, pType), uint32(elf.PT_NOTE))(library(t)), "dynamic table of",
		},
		"a dynamic table at another address": {
			set(program(table, pAddr), ^uint64(0))(library(t)), "is in no loaded segment",
		},
		"a dynamic table beyond its segment": {
			set(program(table, pSize), size)(set(program(table, pOffset), uint64(0))(library(t))),
			"is in no loaded segment",
		},
		"an empty dynamic table": {
			set(program(table, pSize), uint64(0))(library(t)), "the dynamic table has no end",
		},
		"a dynamic table without an end": {
			set(program(table, pSize), uint64(entrySize+1))(library(t)), "the dynamic table has no end",
		},
		"a dynamic table above the limit": {aboveTheLimit(library(t)), "the limit is 1048576"},
		"a string table at another address": {
			setEntry(t, elf.DT_STRTAB, 1<<63)(library(t)), "is in no loaded segment",
		},
		"a string table at the last address": {
			setEntry(t, elf.DT_STRTAB, ^uint64(0))(library(t)), "is in no loaded segment",
		},
		"a string table beyond its segment": {
			setEntry(t, elf.DT_STRSZ, size)(library(t)), "is in no loaded segment",
		},
		"a string table whose end overflows to 0": {
			setEntry(t, elf.DT_STRSZ, ^uint64(0))(library(t)), "is in no loaded segment",
		},
		"an empty string table": {
			setEntry(t, elf.DT_STRSZ, 0)(library(t)), "in a string table of 0 bytes",
		},
		"no string table": {
			retag(t, elf.DT_STRTAB, elf.DT_DEBUG)(retag(t, elf.DT_STRSZ, elf.DT_FLAGS)(library(t))), "string table",
		},
		"a name past the string table": {
			setEntry(t, elf.DT_SONAME, size)(library(t)), "read SONAME: a name at",
		},
		"a name at the last number": {
			setEntry(t, elf.DT_SONAME, ^uint64(0))(library(t)), "read SONAME: a name at",
		},
		"a name without an end": {unterminated(t, library(t)), "without a NUL"},
		"a name above the limit": {
			makeLibrary(t, sim.Library{SONAME: strings.Repeat("x", maxPath)}), "without a NUL in 4096 bytes",
		},
		"a needed library past the string table": {
			setEntry(t, elf.DT_NEEDED, size)(library(t)), "needed libraries: a name at",
		},
		"too many needed libraries": {
			makeLibrary(t, sim.Library{Needed: tooMany}), "more than 1024 entries with the tag 1",
		},
		"a loader whose path has no NUL": {
			withInterp("/lib/ld.so")(library(t)), "the loader's path has no NUL at its end",
		},
		"a loader without a path": {withInterp("\x00")(library(t)), "the loader's path has 1 bytes"},
		"a loader whose path has more than PATH_MAX": {
			withInterp(strings.Repeat("/", maxPath) + "\x00")(library(t)), "the loader's path has 4097 bytes",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := readAllFields(c.file); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %+v and the error %v, want %q in it", got, err, c.want)
			}
		})
	}
}

// aboveTheLimit makes the dynamic table larger than the limit.
func aboveTheLimit(data []byte) []byte {
	set(program(table, pSize), uint64(maxTable+entrySize))(data)
	return append(data, make([]byte, maxTable+entrySize)...)
}

// unterminated ends the string table inside its last string, the SONAME.
func unterminated(t testing.TB, data []byte) []byte {
	size := binary.LittleEndian.Uint64(data[entry(t, data, elf.DT_STRSZ)+8:])
	return setEntry(t, elf.DT_STRSZ, size-1)(data)
}

func TestEveryChangedByteGivesAResultOrAnError(t *testing.T) {
	whole := withInterp("/lib/ld.so\x00")(library(t))
	for i := range whole {
		for _, b := range []byte{0, 1, 0x7f, 0x80, 0xff} {
			data := bytes.Clone(whole)
			data[i] = b
			f, err := read(data)
			if err != nil {
				continue
			}
			soname, err := f.SONAME()
			checkNames(t, err, soname)
			needed, err := f.Needed()
			checkNames(t, err, needed...)
			interp, err := f.Interp()
			checkNames(t, err, interp)
		}
	}
}

// counting counts the reads of a file.
type counting struct {
	io.ReaderAt
	reads int
}

func (c *counting) ReadAt(p []byte, off int64) (int, error) {
	c.reads++
	return c.ReaderAt.ReadAt(p, off)
}

// A spec needs the SONAMEs of the driver's fifty libraries.
func TestASONAMECostsThreeReads(t *testing.T) {
	data := library(t)
	r := &counting{ReaderAt: bytes.NewReader(data)}
	f, err := Read(r, int64(len(data)), x86)
	if err != nil {
		t.Fatal(err)
	}
	if r.reads != 1 {
		t.Errorf("the headers cost %d reads, want 1", r.reads)
	}
	if _, err := f.SONAME(); err != nil || r.reads != 3 {
		t.Errorf("the name costs %d reads, error %v; want 3", r.reads, err)
	}
}
