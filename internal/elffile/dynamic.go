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
	maxNames = 1024    // entries with one tag in it
	minPath  = 2       // bytes of the loader's path including its NUL, as in Linux
	maxPath  = 4096    // bytes of any name, PATH_MAX of Linux

	shortName = 256 // bytes of the first attempt to read a name
)

// SONAME is the library's name for the dynamic loader, empty if it has none.
func (f *File) SONAME() (string, error) {
	names, err := f.names(tagSONAME)
	if err != nil {
		return "", fmt.Errorf("read SONAME: %w", err)
	}
	if len(names) == 0 {
		return "", nil
	}
	return names[len(names)-1], nil // the loader uses the last one
}

// Needed are the SONAMEs of the libraries that the file needs. A static program needs none.
func (f *File) Needed() ([]string, error) {
	names, err := f.names(tagNeeded)
	if err != nil {
		return nil, fmt.Errorf("read the names of needed libraries: %w", err)
	}
	return names, nil
}

// Interp is the path of a program's dynamic loader, empty for a library and a static program.
func (f *File) Interp() (string, error) {
	for _, s := range f.segments {
		if s.kind != interpSegment {
			continue
		}
		if s.size < minPath || s.size > maxPath {
			return "", fmt.Errorf("the loader's path has %d bytes, allowed are %d to %d", s.size, minPath, maxPath)
		}
		path := f.room(s.size)
		if err := f.read(path, s.offset); err != nil {
			return "", fmt.Errorf("read the loader's path: %w", err)
		}
		if path[len(path)-1] != 0 {
			return "", errors.New("the loader's path has no NUL at its end")
		}
		return string(path[:bytes.IndexByte(path, 0)]), nil
	}
	return "", nil
}

// names reads the strings of the entries with one tag in the dynamic table.
func (f *File) names(of tag) ([]string, error) {
	var at []uint64
	var table segment // the string table
	err := f.walk(func(t tag, value uint64) error {
		switch t {
		case of:
			at = append(at, value)
		case tagStrings:
			table.addr = value
		case tagSize:
			table.size = value
		}
		if len(at) > maxNames {
			return fmt.Errorf("more than %d entries with the tag %d", maxNames, of)
		}
		return nil
	})
	if err != nil || len(at) == 0 {
		return nil, err
	}
	var ok bool
	if table.offset, ok = f.locate(table.addr, table.size); !ok {
		return nil, fmt.Errorf("the string table of %d bytes at %#x is in no loaded segment", table.size, table.addr)
	}
	names := make([]string, len(at))
	for i := range at {
		if names[i], err = f.name(table, at[i]); err != nil {
			return nil, err
		}
	}
	return names, nil
}

// name reads the string at an offset in the string table.
func (f *File) name(table segment, at uint64) (string, error) {
	if at >= table.size {
		return "", fmt.Errorf("a name at %d in a string table of %d bytes", at, table.size)
	}
	for _, limit := range []uint64{shortName, maxPath} {
		part := f.room(min(limit, table.size-at))
		if err := f.read(part, table.offset+at); err != nil {
			return "", err
		}
		if name, _, ended := bytes.Cut(part, []byte{0}); ended {
			return string(name), nil
		}
	}
	return "", fmt.Errorf("a name at %d without a NUL in %d bytes", at, min(maxPath, table.size-at))
}

// walk calls visit for each entry of the dynamic table, if there is one.
func (f *File) walk(visit func(t tag, value uint64) error) error {
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
			if err := visit(t, binary.LittleEndian.Uint64(part[8:])); err != nil {
				return err
			}
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
