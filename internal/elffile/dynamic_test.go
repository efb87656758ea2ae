package elffile

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"io"
	"strings"
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

func sonameOf(data []byte) (string, error) {
	f, err := read(data)
	if err != nil {
		return "", err
	}
	return f.SONAME()
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

func TestSONAME(t *testing.T) {
	const soname = "libcuda.so.1"
	long := strings.Repeat("x", 3000) + ".so"
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"a library":                         {library(t), soname},
		"a library without section headers": {withoutSections(library(t)), soname},
		"program headers at the end":        {headersAtTheEnd(library(t)), soname},
		"a library without names":           {makeLibrary(t, sim.Library{}), ""},
		"an empty name":                     {setEntry(t, elf.DT_SONAME, 0)(library(t)), ""},
		"a name of thousands of bytes":      {makeLibrary(t, sim.Library{SONAME: long}), long},
		"two names, the last is used":       {retag(t, elf.DT_NEEDED, elf.DT_SONAME)(library(t)), soname},
		"two tables, the last is used":      {twoTables(library(t)), soname},
		"a segment that covers another":     {covered(library(t)), "libover.so.1"},
		"no dynamic table":                  {set(program(table, pType), uint32(elf.PT_NOTE))(library(t)), ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := sonameOf(c.file); err != nil || got != c.want {
				t.Errorf("got %q and the error %v, want %q", got, err, c.want)
			}
		})
	}
}

func TestADamagedSONAMEIsAnError(t *testing.T) {
	size := uint64(len(library(t)))
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
			makeLibrary(t, sim.Library{SONAME: strings.Repeat("x", maxName)}), "without a NUL in 4096 bytes",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := sonameOf(c.file); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %q and the error %v, want %q in it", got, err, c.want)
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
	whole := library(t)
	for i := range whole {
		for _, b := range []byte{0, 1, 0x7f, 0x80, 0xff} {
			data := bytes.Clone(whole)
			data[i] = b
			f, err := read(data)
			if err != nil {
				continue
			}
			soname, err := f.SONAME()
			checkName(t, err, soname)
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
func TestASONAMECostsFourReads(t *testing.T) {
	data := library(t)
	r := &counting{ReaderAt: bytes.NewReader(data)}
	f, err := ReadLibrary(r, int64(len(data)), x86)
	testenv.Must(t, err)
	if r.reads != 2 {
		t.Errorf("the headers cost %d reads, want 2", r.reads)
	}
	if _, err := f.SONAME(); err != nil || r.reads != 4 {
		t.Errorf("the name costs %d reads, error %v; want 4", r.reads, err)
	}
}
