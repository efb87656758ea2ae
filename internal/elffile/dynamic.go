package elffile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// Limits on the parts of a file, many times what real files have.
const (
	maxTable = 1 << 20 // bytes of the dynamic table, a driver's library has about 600
	maxName  = 4096    // bytes of a name, PATH_MAX of Linux

	shortName = 256 // bytes of the first attempt to read a name
)

// SONAME is the library's name for the dynamic loader, empty if it has none.
func (f *File) SONAME() (string, error) {
	name, err := f.soname()
	if err != nil {
		return "", fmt.Errorf("read SONAME: %w", err)
	}
	return name, nil
}

func (f *File) soname() (string, error) {
	var at uint64
	var has bool
	var table segment // the string table
	err := f.walk(func(t tag, value uint64) {
		switch t {
		case tagSONAME:
			at, has = value, true // the loader uses the last one
		case tagStrings:
			table.addr = value
		case tagSize:
			table.size = value
		}
	})
	if err != nil || !has {
		return "", err
	}
	var ok bool
	if table.offset, ok = f.locate(table.addr, table.size); !ok {
		return "", fmt.Errorf("the string table of %d bytes at %#x is in no loaded segment", table.size, table.addr)
	}
	return f.name(table, at)
}

// name reads the string at an offset in the string table.
func (f *File) name(table segment, at uint64) (string, error) {
	if at >= table.size {
		return "", fmt.Errorf("a name at %d in a string table of %d bytes", at, table.size)
	}
	for _, limit := range []uint64{shortName, maxName} {
		part := f.room(min(limit, table.size-at))
		if err := f.read(part, table.offset+at); err != nil {
			return "", err
		}
		if name, _, ended := bytes.Cut(part, []byte{0}); ended {
			return string(name), nil
		}
	}
	return "", fmt.Errorf("a name at %d without a NUL in %d bytes", at, min(maxName, table.size-at))
}

// walk calls visit for each entry of the dynamic table, if there is one.
func (f *File) walk(visit func(t tag, value uint64)) error {
	table := f.dynamic()
	if table == nil {
		return nil
	}
	if table.size > maxTable {
		return fmt.Errorf("a dynamic table of %d bytes, the limit is %d", table.size, maxTable)
	}
	offset, ok := f.locate(table.addr, table.size)
	if !ok {
		return fmt.Errorf("the dynamic table of %d bytes at %#x is in no loaded segment", table.size, table.addr)
	}
	for done := uint64(0); done < table.size; {
		part := f.room(min(uint64(len(f.buf)), table.size-done))
		if err := f.read(part, offset+done); err != nil {
			return err
		}
		done += uint64(len(part))
		for ; len(part) >= entrySize; part = part[entrySize:] {
			t := tag(binary.LittleEndian.Uint64(part))
			if t == tagEnd {
				return nil
			}
			visit(t, binary.LittleEndian.Uint64(part[8:]))
		}
	}
	return errors.New("the dynamic table has no end tag")
}

// dynamic is the segment of the dynamic table, or nil. Of several the loader uses the last.
func (f *File) dynamic() *segment {
	for i := len(f.segments) - 1; i >= 0; i-- {
		if f.segments[i].kind == dynamicSegment {
			return &f.segments[i]
		}
	}
	return nil
}

// locate returns the file offset of the n bytes that the loader maps at addr. A later segment covers an earlier one.
func (f *File) locate(addr, n uint64) (offset uint64, ok bool) {
	for i := len(f.segments) - 1; i >= 0; i-- {
		s := &f.segments[i]
		if s.kind != loadSegment || addr < s.addr || addr-s.addr >= s.size {
			continue
		}
		return s.offset + (addr - s.addr), n <= s.size-(addr-s.addr)
	}
	return 0, false
}
