// Package elffile reads what of an ELF file decides what becomes of it: whether it is a program or a library for this
// machine, whether it is whole, its own name, the names of the libraries that it needs and the path of its loader.
//
// It goes by the program headers, as the dynamic loader does, so that it agrees with the loader and also reads a file
// without section headers. Every number in a file is hostile: what is read is bounded, and an offset or a size leads
// nowhere but into the file. The standard library's debug/elf gives no such promise, reads every section header, and
// brings decompressors into the program, which run some code at each start even if all that is used of it is a name.
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
	// ErrMachine is wrapped by errors about a file for another machine: of another architecture, of 32 bits, or of the
	// other byte order.
	ErrMachine = errors.New("not for this machine")
	// ErrTruncated is wrapped by errors about a file that ends before what its headers say is in it.
	ErrTruncated = errors.New("the file is truncated")
)

// File is what the headers of a program or of a library say. It reads more of the file when it is asked for it, and is
// for one goroutine at a time.
type File struct {
	// Type is Program or Library.
	Type Type

	r        io.ReaderAt
	size     uint64
	segments []segment
	// buf is for one read after the other. It has room for the headers and for the dynamic table of nearly all files.
	buf [1024]byte
}

// segment is a program header: size bytes from offset on in the file, which are at addr in memory.
type segment struct {
	kind               uint32
	offset, addr, size uint64
}

// Read reads the headers of a program or a library of size bytes and checks that it is for the machine and that all that
// a loader maps is in it. Its errors wrap ErrMachine, ErrTruncated, that of the read, or none of them if the file is no
// ELF file or a damaged one.
func Read(r io.ReaderAt, size int64, machine Machine) (*File, error) {
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

// ReadLibrary is Read for a file that must be a shared library. A program that can be loaded anywhere passes for one.
func ReadLibrary(r io.ReaderAt, size int64, machine Machine) (*File, error) {
	f, err := Read(r, size, machine)
	if err != nil {
		return nil, err
	}
	if f.Type != Library {
		return nil, fmt.Errorf("not a shared library but %s", f.Type)
	}
	return f, nil
}

// checkIdent checks what stands in front of everything whose size and order it tells.
func checkIdent(head []byte) error {
	if !bytes.HasPrefix(head, []byte(magic)) {
		return errors.New("not an ELF file")
	}
	if len(head) < identSize {
		return ErrTruncated
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
		return ErrTruncated
	}
	le := binary.LittleEndian
	f.Type = Type(le.Uint16(head[16:]))
	if m := Machine(le.Uint16(head[18:])); m != machine {
		return fmt.Errorf("%w: it is for %s, this machine is %s", ErrMachine, m, machine)
	}
	if f.Type != Library && f.Type != Program {
		return fmt.Errorf("neither a program nor a shared library but %s", f.Type)
	}
	if err := checkVersion(le.Uint32(head[20:])); err != nil {
		return err
	}
	// Nobody needs the section headers, but they are at the end: a file without them was cut.
	if !f.has(le.Uint64(head[40:]), uint64(le.Uint16(head[58:]))*uint64(le.Uint16(head[60:]))) {
		return ErrTruncated
	}
	return nil
}

// readSegments reads the program headers, of which there are fewer than 65,536, and checks that the segments are in the
// file.
func (f *File) readSegments(head []byte) error {
	le := binary.LittleEndian
	at, n := le.Uint64(head[32:]), uint64(le.Uint16(head[56:]))
	if le.Uint16(head[54:]) != programSize || n == 0 {
		return errors.New("no usable program headers")
	}
	if !f.has(at, n*programSize) {
		return ErrTruncated
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
			return ErrTruncated
		}
		f.segments = append(f.segments, s)
	}
	return nil
}

// has reports whether n bytes at that offset are in the file.
func (f *File) has(offset, n uint64) bool { return offset <= f.size && n <= f.size-offset }

// room is a place for n bytes until the next is asked for.
func (f *File) room(n uint64) []byte {
	if n <= uint64(len(f.buf)) {
		return f.buf[:n]
	}
	return make([]byte, n)
}

// read fills p with what is at that offset, which must be in the file.
func (f *File) read(p []byte, offset uint64) error {
	n, err := f.r.ReadAt(p, int64(offset))
	switch {
	case n == len(p):
		return nil
	case errors.Is(err, io.EOF):
		return ErrTruncated // it became shorter
	}
	return fmt.Errorf("read %d bytes at %d: %w", len(p), offset, err)
}
