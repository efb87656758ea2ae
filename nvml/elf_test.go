package nvml

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// library is the smallest file that passes for a shared library of the machine: headers and one segment of a page.
func library(machine elf.Machine) []byte {
	header := elf.Header64{
		Type: uint16(elf.ET_DYN), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT),
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1,
	}
	copy(header.Ident[:], elf.ELFMAG)
	header.Ident[elf.EI_CLASS] = byte(elf.ELFCLASS64)
	header.Ident[elf.EI_DATA] = byte(elf.ELFDATA2LSB)
	header.Ident[elf.EI_VERSION] = byte(elf.EV_CURRENT)
	segment := elf.Prog64{Type: uint32(elf.PT_LOAD), Filesz: 4096, Memsz: 4096}
	var file bytes.Buffer
	for _, part := range []any{header, segment} {
		if err := binary.Write(&file, binary.LittleEndian, part); err != nil {
			panic(err)
		}
	}
	return append(file.Bytes(), make([]byte, 4096-file.Len())...)
}

func TestCheckLibrary(t *testing.T) {
	for name, c := range map[string]struct {
		file []byte
		want string // part of the error; empty if there is none
	}{
		"a library":                   {library(elf.EM_X86_64), ""},
		"a linker script":             {[]byte("/* GNU ld script */\nGROUP ( libm.so.6 )\n"), "not an ELF file"},
		"a library of a phone":        {library(elf.EM_ARM), "it is for EM_ARM, this machine is EM_X86_64"},
		"a program":                   {set(library(elf.EM_X86_64), 16, byte(elf.ET_EXEC)), "not a shared library but ET_EXEC"},
		"a library whose end is gone": {library(elf.EM_X86_64)[:4095], "the file is truncated"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
			if err := os.WriteFile(path, c.file, 0o600); err != nil {
				t.Fatal(err)
			}
			err := checkLibrary(path, x86)
			if c.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if !errors.Is(err, ErrLibraryUnusable) || !strings.Contains(err.Error(), path+": ") || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got the error %v, want %q in it", err, c.want)
			}
		})
	}
}

func set(file []byte, at int, value byte) []byte {
	file[at] = value
	return file
}

func TestCheckLibraryOfWhatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		path string
		want error
	}{
		"absent":              {filepath.Join(dir, "absent"), ErrLibraryNotFound},
		"a directory":         {dir, ErrLibraryUnusable},
		"a device":            {os.DevNull, ErrLibraryUnusable},
		"below a file":        {os.DevNull + "/x", ErrLibraryUnusable},
		"a link to nowhere":   {symlink(t, filepath.Join(dir, "link"), "nowhere"), ErrLibraryNotFound},
		"a link that circles": {symlink(t, filepath.Join(dir, "loop"), "loop"), ErrLibraryUnusable},
	} {
		t.Run(name, func(t *testing.T) {
			if err := checkLibrary(c.path, thisPlatform()); !errors.Is(err, c.want) {
				t.Errorf("got the error %v, want %v", err, c.want)
			}
		})
	}
}

func symlink(t testing.TB, path, target string) string {
	t.Helper()
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	return path
}
