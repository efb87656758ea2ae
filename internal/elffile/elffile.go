// Package elffile reads shared libraries from hostile ELF files: whether a file is one for this machine and complete,
// its SONAME, and notes.
//
// It uses the program headers, as the dynamic loader does, so that both agree and a file without section headers can be
// read. Only notes are found by section headers. Every number in a file is checked: reads are bounded and stay inside
// the file. The standard library's debug/elf is not made for hostile files. It also reads every section header and
// links decompressors, whose initialization costs time at each start of the program.
//
// The layout is that of the System V ABI, chapters 4 and 5, for 64-bit files.
package elffile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

var (
	// ErrMachine means that a file is for another machine: another architecture, 32 bits, or the other byte order.
	ErrMachine = errors.New("not for this machine")
	// errTruncated means that a file ends before a part that its headers describe.
	errTruncated = errors.New("the file is truncated")
)

// File is an open library whose headers have been checked. Its methods read from the file. It is not safe for
// concurrent use.
type File struct {
	r        io.ReaderAt
	size     uint64
	segments []segment
	sections sectionTable
	// buf is reused by every read. The headers and the dynamic table of nearly all files fit.
	buf [1024]byte
}

// sectionTable describes the section headers: where they are, and which section holds the names of all.
type sectionTable struct {
	offset                  uint64
	entrySize, count, names uint16
}

// segment is a program header: size bytes at offset in the file, loaded at addr.
type segment struct {
	kind               uint32
	offset, addr, size uint64
}

// ReadLibrary reads the headers of a shared library of size bytes; position-independent programs are accepted too. It
// checks that the file is for the machine and has everything that a loader maps. Errors wrap ErrMachine or the error of
// the read, or none of them if the file is damaged or no shared library.
func ReadLibrary(r io.ReaderAt, size int64, machine Machine) (*File, error) {
	f := &File{r: r, size: uint64(max(size, 0))}
	head := f.buf[:min(uint64(len(f.buf)), f.size)]
	if err := f.read(head, 0); err != nil {
		return nil, err
	}
	if err := checkIdent(head); err != nil {
		return nil, err
	}
	if err := f.checkHeader(head, machine); err != nil {
		return nil, err
	}
	if err := f.readSegments(head); err != nil {
		return nil, err
	}
	return f, nil
}

// checkIdent checks the first bytes, which define the layout of the rest.
func checkIdent(head []byte) error {
	if !bytes.HasPrefix(head, []byte(magic)) {
		return errors.New("not an ELF file")
	}
	if len(head) < identSize {
		return errTruncated
	}
	switch class, order := head[4], head[5]; {
	case class == class32:
		return fmt.Errorf("%w: it is a 32-bit file", ErrMachine)
	case class != class64:
		return fmt.Errorf("an ELF file of the unknown class %d", class)
	case order == bigEndian:
		return fmt.Errorf("%w: it is a big-endian file", ErrMachine)
	case order != littleEndian:
		return fmt.Errorf("an ELF file of the unknown byte order %d", order)
	}
	return checkVersion(uint32(head[6]))
}

func checkVersion(v uint32) error {
	if v != version {
		return fmt.Errorf("an ELF file of the unknown version %d", v)
	}
	return nil
}

func (f *File) checkHeader(head []byte, machine Machine) error {
	if len(head) < headerSize {
		return errTruncated
	}
	le := binary.LittleEndian
	if m := Machine(le.Uint16(head[18:])); m != machine {
		return fmt.Errorf("%w: it is for %s, this machine is %s", ErrMachine, m, machine)
	}
	if t := le.Uint16(head[16:]); t != libraryType {
		return fmt.Errorf("not a shared library but %s", typeName(t))
	}
	if err := checkVersion(le.Uint32(head[20:])); err != nil {
		return err
	}
	t := sectionTable{le.Uint64(head[40:]), le.Uint16(head[58:]), le.Uint16(head[60:]), le.Uint16(head[62:])}
	// A loader needs no section headers, but they are at the end: a file without them was cut.
	if !f.has(t.offset, uint64(t.entrySize)*uint64(t.count)) {
		return errTruncated
	}
	f.sections = t
	return nil
}

// readSegments reads the program headers, at most 65,535, and checks that the segments are in the file.
func (f *File) readSegments(head []byte) error {
	le := binary.LittleEndian
	at, n := le.Uint64(head[32:]), uint64(le.Uint16(head[56:]))
	if le.Uint16(head[54:]) != programSize || n == 0 {
		return errors.New("no usable program headers")
	}
	if !f.has(at, n*programSize) {
		return errTruncated
	}
	var table []byte
	if end := at + n*programSize; end <= uint64(len(head)) {
		table = head[at:end]
	} else {
		table = f.room(n * programSize)
		if err := f.read(table, at); err != nil {
			return err
		}
	}
	f.segments = make([]segment, 0, n)
	for ; len(table) > 0; table = table[programSize:] {
		s := segment{le.Uint32(table), le.Uint64(table[8:]), le.Uint64(table[16:]), le.Uint64(table[32:])}
		if !f.has(s.offset, s.size) {
			return errTruncated
		}
		f.segments = append(f.segments, s)
	}
	return nil
}

// has reports whether n bytes at that offset are in the file.
func (f *File) has(offset, n uint64) bool { return offset <= f.size && n <= f.size-offset }

// room returns a buffer of n bytes, valid until the next call.
func (f *File) room(n uint64) []byte {
	if n <= uint64(len(f.buf)) {
		return f.buf[:n]
	}
	return make([]byte, n)
}

// read fills p from the file. The caller has checked with has that the file is that long.
func (f *File) read(p []byte, offset uint64) error {
	n, err := f.r.ReadAt(p, int64(offset))
	switch {
	case n == len(p):
		return nil
	case errors.Is(err, io.EOF):
		return errTruncated // the file became shorter meanwhile
	}
	return fmt.Errorf("read %d bytes at %d: %w", len(p), offset, err)
}
