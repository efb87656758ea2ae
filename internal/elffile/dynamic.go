package elffile

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
)

// Limits on the parts of a file, many times larger than in real files.
const (
	maxTable = 1 << 20 // bytes of the dynamic table; a driver library's has about 600
	maxName  = 4096    // bytes of a name: PATH_MAX of Linux
)

// SONAME returns the library's name for the dynamic loader, or "" if it has none.
func (f *File) SONAME() (string, error) {
	name, err := f.soname()
	if err != nil {
		return "", fmt.Errorf("read SONAME: %w", err)
	}
	return name, nil
}

func (f *File) soname() (string, error) {
	entries, err := f.dynamic()
	if err != nil {
		return "", err
	}
	var at, addr, size uint64 // the name's offset in the string table; address and size of that table
	var has bool
	for _, e := range entries { // if an entry is repeated, the loader uses the last one
		switch elf.DynTag(e.Tag) {
		case elf.DT_SONAME:
			at, has = e.Val, true
		case elf.DT_STRTAB:
			addr = e.Val
		case elf.DT_STRSZ:
			size = e.Val
		}
	}
	if !has {
		return "", nil
	}
	table, ok := f.locate(addr, size)
	switch {
	case !ok:
		return "", fmt.Errorf("the string table of %d bytes at %#x is in no loaded segment", size, addr)
	case at >= size:
		return "", fmt.Errorf("a name at %d in a string table of %d bytes", at, size)
	}
	text, err := readValues[byte](f, table+at, min(maxName, size-at))
	if err != nil {
		return "", err
	}
	name, _, ended := bytes.Cut(text, []byte{0})
	if !ended {
		return "", fmt.Errorf("a name at %d without a NUL in %d bytes", at, len(text))
	}
	return string(name), nil
}

// dynamic reads the entries of the dynamic table up to its end marker. If there are several tables, it reads the last
// one, like the loader. A file without a dynamic table has no entries.
func (f *File) dynamic() ([]elf.Dyn64, error) {
	var table *elf.Prog64
	for i := range f.segments {
		if elf.ProgType(f.segments[i].Type) == elf.PT_DYNAMIC {
			table = &f.segments[i]
		}
	}
	if table == nil {
		return nil, nil
	}
	if table.Filesz > maxTable {
		return nil, fmt.Errorf("a dynamic table of %d bytes, the limit is %d", table.Filesz, maxTable)
	}
	offset, ok := f.locate(table.Vaddr, table.Filesz)
	if !ok {
		return nil, fmt.Errorf("the dynamic table of %d bytes at %#x is in no loaded segment", table.Filesz, table.Vaddr)
	}
	entries, err := readValues[elf.Dyn64](f, offset, table.Filesz/entrySize)
	if err != nil {
		return nil, err
	}
	for i, e := range entries {
		if elf.DynTag(e.Tag) == elf.DT_NULL {
			return entries[:i], nil
		}
	}
	return nil, errors.New("the dynamic table has no end tag")
}

// locate returns the offset in the file of n bytes that the loader maps at addr. If several segments have them, the
// last one counts.
func (f *File) locate(addr, n uint64) (offset uint64, ok bool) {
	for i := len(f.segments) - 1; i >= 0; i-- {
		s := &f.segments[i]
		if elf.ProgType(s.Type) != elf.PT_LOAD || addr < s.Vaddr || addr-s.Vaddr >= s.Filesz {
			continue
		}
		return s.Off + (addr - s.Vaddr), n <= s.Filesz-(addr-s.Vaddr)
	}
	return 0, false
}
