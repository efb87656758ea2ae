package nvml

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
)

// platform is what depends on the machine's architecture: the number in ELF headers and Debian's directory name.
type platform struct {
	machine   elf.Machine
	multiarch string
}

// thisPlatform is the platform of the running program. NVIDIA has drivers for these two.
func thisPlatform() platform {
	if runtime.GOARCH == "arm64" {
		return platform{elf.EM_AARCH64, "aarch64-linux-gnu"}
	}
	return platform{elf.EM_X86_64, "x86_64-linux-gnu"}
}

// checkLibrary says why the file cannot be loaded, before the loader maps it: reading a mapping of a truncated file
// would kill the process.
func checkLibrary(path string, p platform) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%w: %w", ErrLibraryNotFound, err)
	case err != nil:
		return fmt.Errorf("%w: %w", ErrLibraryUnusable, err)
	case info.IsDir():
		return fmt.Errorf("%w: %s is a directory", ErrLibraryUnusable, path)
	case !info.Mode().IsRegular():
		return fmt.Errorf("%w: %s is not a regular file", ErrLibraryUnusable, path)
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrLibraryUnusable, err)
	}
	defer f.Close()
	if err := checkELF(f, info.Size(), p.machine); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrLibraryUnusable, path, err)
	}
	return nil
}

var errTruncated = errors.New("the file is truncated")

// checkELF checks that the file of that size is a 64-bit little-endian shared library for the machine and that all
// segments that a loader maps are in it.
func checkELF(r io.ReaderAt, size int64, machine elf.Machine) error {
	var ident [elf.EI_NIDENT]byte
	if n, _ := r.ReadAt(ident[:], 0); n < len(elf.ELFMAG) || string(ident[:len(elf.ELFMAG)]) != elf.ELFMAG {
		return errors.New("not an ELF file")
	}
	if class := elf.Class(ident[elf.EI_CLASS]); class != elf.ELFCLASS64 {
		return fmt.Errorf("a library of class %s, want %s", class, elf.ELFCLASS64)
	}
	if data := elf.Data(ident[elf.EI_DATA]); data != elf.ELFDATA2LSB {
		return fmt.Errorf("a library with data encoding %s, want %s", data, elf.ELFDATA2LSB)
	}
	var header elf.Header64
	if err := readStruct(r, 0, &header); err != nil {
		return err
	}
	if m := elf.Machine(header.Machine); m != machine {
		return fmt.Errorf("a library for %s, this machine is %s", m, machine)
	}
	if t := elf.Type(header.Type); t != elf.ET_DYN {
		return fmt.Errorf("not a shared library but %s", t)
	}
	if end := header.Shoff + uint64(header.Shnum)*uint64(header.Shentsize); end < header.Shoff || end > uint64(size) {
		return errTruncated // section headers are not needed, but they are at the end
	}
	return checkSegments(r, size, &header)
}

func checkSegments(r io.ReaderAt, size int64, header *elf.Header64) error {
	const entry = 56 // bytes of an elf.Prog64
	if header.Phentsize != entry || header.Phnum == 0 {
		return errors.New("no usable program headers")
	}
	if header.Phoff > uint64(size) {
		return errTruncated
	}
	for i := range int64(header.Phnum) {
		var segment elf.Prog64
		if err := readStruct(r, int64(header.Phoff)+i*entry, &segment); err != nil {
			return err
		}
		if end := segment.Off + segment.Filesz; end < segment.Off || end > uint64(size) {
			return errTruncated
		}
	}
	return nil
}

// readStruct reads a structure of fixed size.
func readStruct(r io.ReaderAt, off int64, v any) error {
	buf := make([]byte, binary.Size(v))
	if _, err := r.ReadAt(buf, off); err != nil {
		if errors.Is(err, io.EOF) {
			return errTruncated
		}
		return err
	}
	return binary.Read(bytes.NewReader(buf), binary.LittleEndian, v)
}
