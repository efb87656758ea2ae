package driver

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"

	"gpu-cdi-plugin/internal/elffile"
	"gpu-cdi-plugin/internal/regular"
)

// readSONAME reads the name that a shared library is asked for by; it is the file's own name if it has none. The error
// wraps elffile.ErrMachine if it is a library for another machine.
func readSONAME(path string, m machine) (string, error) {
	f, info, err := regular.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	soname, err := parseSONAME(f, info.Size(), m)
	if err == nil && soname == "" {
		soname = filepath.Base(path)
	}
	return soname, err
}

// parseSONAME is readSONAME on a file's content.
func parseSONAME(r io.ReaderAt, size int64, m machine) (string, error) {
	f, err := elffile.ReadLibrary(r, size, elffile.MachineOf(m.goarch))
	if errors.Is(err, elffile.ErrMachine) {
		return "", err
	}
	if err != nil {
		return "", fmt.Errorf("not a usable ELF file: %w", err)
	}
	soname, err := f.SONAME()
	if err != nil || soname == "" {
		return "", err
	}
	if !fs.ValidPath(soname) || filepath.Base(soname) != soname || !isPlain(soname) {
		return "", fmt.Errorf("SONAME %.100q is not a plain file name", soname)
	}
	return soname, nil
}
