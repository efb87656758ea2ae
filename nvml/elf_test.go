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
	segment := elf.Prog64{Type: uint32(elf.PT_LOAD), Filesz: 4096, Memsz: 4096}
	var file bytes.Buffer
	for _, part := range []any{header, segment} {
		if err := binary.Write(&file, binary.LittleEndian, part); err != nil {
			panic(err)
		}
	}
	return append(file.Bytes(), make([]byte, 4096-file.Len())...)
}

func TestCheckELF(t *testing.T) {
	good := library(elf.EM_X86_64)
	for name, c := range map[string]struct {
		change func(b []byte) []byte
		want   string // part of the error; empty if there is none
	}{
		"a library":                          {func(b []byte) []byte { return b }, ""},
		"an empty file":                      {func([]byte) []byte { return nil }, "not an ELF file"},
		"a linker script":                    {func([]byte) []byte { return []byte("/* GNU ld script */\nGROUP ( libm.so.6 )\n") }, "not an ELF file"},
		"a 32-bit library":                   {set(elf.EI_CLASS, byte(elf.ELFCLASS32)), "class ELFCLASS32"},
		"big-endian":                         {set(elf.EI_DATA, byte(elf.ELFDATA2MSB)), "encoding"},
		"another machine":                    {set(18, byte(elf.EM_AARCH64)), "this machine is EM_X86_64"},
		"a program":                          {set(16, byte(elf.ET_EXEC)), "not a shared library but ET_EXEC"},
		"cut in the header":                  {cut(40), "truncated"},
		"cut in the program headers":         {cut(100), "truncated"},
		"cut in the segment":                 {cut(4095), "truncated"},
		"a segment at an impossible place":   {set(64+8+7, 0xff), "truncated"},
		"no program headers":                 {set(56, 0), "no usable program headers"},
		"program headers of another size":    {set(54, 1), "no usable program headers"},
		"program headers behind the end":     {set(34, 1), "truncated"},
		"section headers behind the end":     {set(42, 1), "truncated"},
		"program headers at offset 2^63 + x": {set(39, 0x80), "truncated"},
	} {
		t.Run(name, func(t *testing.T) {
			file := c.change(bytes.Clone(good))
			err := checkELF(bytes.NewReader(file), int64(len(file)), elf.EM_X86_64)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("got the error %v, want %q in it", err, c.want)
			}
		})
	}
}

func set(at int, value byte) func([]byte) []byte {
	return func(b []byte) []byte { b[at] = value; return b }
}

func cut(at int) func([]byte) []byte { return func(b []byte) []byte { return b[:at] } }

func TestCheckELFTakesNoPrefixForTheWhole(t *testing.T) {
	good := library(elf.EM_X86_64)
	for n := range good {
		if err := checkELF(bytes.NewReader(good[:n]), int64(n), elf.EM_X86_64); err == nil {
			t.Fatalf("the first %d of %d bytes pass for a library", n, len(good))
		}
	}
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

func FuzzCheckELF(f *testing.F) {
	good := library(elf.EM_X86_64)
	f.Add(good[:200])
	f.Add([]byte(elf.ELFMAG))
	f.Fuzz(func(t *testing.T, file []byte) {
		if err := checkELF(bytes.NewReader(file), int64(len(file)), elf.EM_X86_64); err != nil {
			return
		}
		// What passes has all its segments, by the judgement of another reader.
		parsed, err := elf.NewFile(bytes.NewReader(file))
		if err != nil {
			return // it is stricter about parts that a loader does not read
		}
		for _, p := range parsed.Progs {
			if p.Filesz > 0 {
				if _, err := p.ReadAt(make([]byte, 1), int64(p.Filesz)-1); err != nil {
					t.Errorf("segment at %#x of %#x bytes: %v", p.Off, p.Filesz, err)
				}
			}
		}
	})
}
