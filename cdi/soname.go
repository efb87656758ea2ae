package cdi

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
)

// Limits on what is read of a library. The largest of driver 580 has about 120 MB and a string table below 1 MB.
const (
	maxLibrary      = 2 << 30
	maxDynamicTable = 1 << 20
	maxStringTable  = 16 << 20
)

var errWrongMachine = errors.New("not for this machine")

// readSONAME reads the name that a shared library is asked for by; it is the file's own name if it has none. The error
// wraps errWrongMachine if it is a sound library for another machine.
func readSONAME(path string, m machine) (string, error) {
	f, err := openRegular(path, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	soname, err := parseSONAME(f, info.Size(), m)
	if err == nil && soname == "" {
		soname = filepath.Base(path)
	}
	return soname, err
}

// parseSONAME is readSONAME on a file's content. debug/elf is not meant for hostile files; hence the limits, and hence
// a panic of it is an error.
func parseSONAME(r io.ReaderAt, size int64, m machine) (soname string, err error) {
	defer func() {
		if p := recover(); p != nil {
			soname, err = "", fmt.Errorf("read ELF file: %v", p)
		}
	}()
	if size > maxLibrary {
		return "", fmt.Errorf("the file has %d bytes, the limit is %d", size, int64(maxLibrary))
	}
	f, err := elf.NewFile(io.NewSectionReader(r, 0, size))
	if err != nil {
		return "", fmt.Errorf("not a usable ELF file: %w", err)
	}
	if err := checkELF(f, size, m); err != nil {
		return "", err
	}
	names, err := f.DynString(elf.DT_SONAME)
	if err != nil {
		return "", fmt.Errorf("read SONAME: %w", err)
	}
	if len(names) == 0 {
		return "", nil
	}
	if !fs.ValidPath(names[0]) || filepath.Base(names[0]) != names[0] || !isPlain(names[0]) {
		return "", fmt.Errorf("SONAME %.100q is not a plain file name", names[0])
	}
	return names[0], nil
}

func checkELF(f *elf.File, size int64, m machine) error {
	want := elf.EM_X86_64
	if m.goarch == "arm64" {
		want = elf.EM_AARCH64
	}
	if f.Class != elf.ELFCLASS64 || f.Machine != want {
		return fmt.Errorf("%w: %s, %s", errWrongMachine, f.Machine, f.Class)
	}
	if f.Type != elf.ET_DYN {
		return fmt.Errorf("not a shared library but %s", f.Type)
	}
	for _, p := range f.Progs {
		if end := p.Off + p.Filesz; end < p.Off || end > uint64(size) {
			return errors.New("the file is truncated")
		}
	}
	return checkTables(f)
}

// checkTables limits what DynString reads into memory.
func checkTables(f *elf.File) error {
	for _, s := range f.Sections {
		if s.Type != elf.SHT_DYNAMIC {
			continue
		}
		if s.Size > maxDynamicTable || s.Flags&elf.SHF_COMPRESSED != 0 {
			return fmt.Errorf("a dynamic section of %d bytes, the limit is %d", s.Size, maxDynamicTable)
		}
		if int64(s.Link) >= int64(len(f.Sections)) {
			return errors.New("a dynamic section without a string table")
		}
		if t := f.Sections[s.Link]; t.Size > maxStringTable || t.Flags&elf.SHF_COMPRESSED != 0 {
			return fmt.Errorf("a string table of %d bytes, the limit is %d", t.Size, maxStringTable)
		}
	}
	return nil
}
