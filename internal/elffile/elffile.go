// Package elffile reads shared libraries from untrusted ELF files: whether a file is complete and for this machine, its
// SONAME, and its notes.
//
// Like the dynamic loader it uses the program headers, so that it finds the same SONAME as the loader, also in files
// without section headers. Only notes are found by section headers. Every number in a file is checked: reads are
// bounded and stay inside the file. The types come from the standard library's debug/elf, but not the reader, which
// reads and decompresses sections of any size.
package elffile

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

var (
	// ErrMachine means that a file is for another architecture, for 32 bits, or has the other byte order.
	ErrMachine = errors.New("not for this machine")
	// errTruncated means that a file ends before a part that its headers describe.
	errTruncated = errors.New("the file is truncated")
)

// Sizes in bytes of the structures of a 64-bit file.
const (
	headerSize  = 64
	programSize = 56
	sectionSize = 64
	entrySize   = 16 // of the dynamic table
)

// File is an open library with checked headers. Its methods read from the file.
type File struct {
	r        io.ReaderAt
	size     uint64
	header   elf.Header64
	segments []elf.Prog64
}

// MachineOf returns the ELF machine for a GOARCH: arm64, and amd64 for any other value. NVIDIA's drivers exist only
// for these two.
func MachineOf(goarch string) elf.Machine {
	if goarch == "arm64" {
		return elf.EM_AARCH64
	}
	return elf.EM_X86_64
}

// ReadLibrary reads the headers of a shared library of size bytes. It also accepts position-independent programs. It
// checks that the file is for the machine and contains everything that a loader maps. The error wraps ErrMachine for
// the file of another machine, and the error of r if that cannot be read.
func ReadLibrary(r io.ReaderAt, size int64, machine elf.Machine) (*File, error) {
	f := &File{r: r, size: uint64(max(size, 0))}
	head, err := readValues[byte](f, 0, min(headerSize, f.size))
	if err != nil {
		return nil, err
	}
	if !bytes.HasPrefix(head, []byte(elf.ELFMAG)) {
		return nil, errors.New("not an ELF file")
	}
	if _, err := binary.Decode(head, binary.LittleEndian, &f.header); err != nil {
		return nil, errTruncated
	}
	if err := f.checkHeader(machine); err != nil {
		return nil, err
	}
	if f.segments, err = readValues[elf.Prog64](f, f.header.Phoff, uint64(f.header.Phnum)); err != nil {
		return nil, err
	}
	for _, s := range f.segments {
		if !f.has(s.Off, s.Filesz) {
			return nil, errTruncated
		}
	}
	return f, nil
}

func (f *File) checkHeader(machine elf.Machine) error {
	h := &f.header
	class, order := elf.Class(h.Ident[elf.EI_CLASS]), elf.Data(h.Ident[elf.EI_DATA])
	switch {
	case class == elf.ELFCLASS32:
		return fmt.Errorf("%w: it is a 32-bit file", ErrMachine)
	case class != elf.ELFCLASS64:
		return fmt.Errorf("an ELF file of the unknown class %d", class)
	case order == elf.ELFDATA2MSB:
		return fmt.Errorf("%w: it is a big-endian file", ErrMachine)
	case order != elf.ELFDATA2LSB:
		return fmt.Errorf("an ELF file of the unknown byte order %d", order)
	case elf.Machine(h.Machine) != machine:
		return fmt.Errorf("%w: it is for %s, this machine is %s", ErrMachine, elf.Machine(h.Machine), machine)
	case elf.Type(h.Type) != elf.ET_DYN:
		return fmt.Errorf("not a shared library but %s", elf.Type(h.Type))
	case h.Ident[elf.EI_VERSION] != byte(elf.EV_CURRENT) || h.Version != uint32(elf.EV_CURRENT):
		return errors.New("an ELF file of an unknown version")
	case !f.has(h.Shoff, uint64(h.Shentsize)*uint64(h.Shnum)):
		// A loader needs no section headers, but they are at the end of a file: if they are missing, the file was
		// truncated.
		return errTruncated
	case h.Phentsize != programSize || h.Phnum == 0:
		return errors.New("no usable program headers")
	}
	return nil
}

// has reports whether the file has n bytes at an offset.
func (f *File) has(offset, n uint64) bool { return offset <= f.size && n <= f.size-offset }

// readValues reads n values at an offset in the file. The caller must have checked n against a limit.
func readValues[T any](f *File, offset, n uint64) ([]T, error) {
	values := make([]T, n)
	size := uint64(binary.Size(values))
	if !f.has(offset, size) {
		return nil, errTruncated
	}
	err := binary.Read(io.NewSectionReader(f.r, int64(offset), int64(size)), binary.LittleEndian, values)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return nil, errTruncated // the file has become shorter
	case err != nil:
		return nil, fmt.Errorf("read %d bytes at %d: %w", size, offset, err)
	}
	return values, nil
}
