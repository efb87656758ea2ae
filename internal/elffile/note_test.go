package elffile

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	section = ".note.cuda.fwd_compatibility"
	owner   = "NVIDIA Corporation"
	content = `{"Format":1,"Driver":[535,575]}`
)

// note encodes a note.
func note(owner, desc string) []byte {
	le := binary.LittleEndian
	data := le.AppendUint32(nil, uint32(len(owner)+1))
	data = le.AppendUint32(data, uint32(len(desc)))
	data = le.AppendUint32(data, 1)
	data = append(data, owner...)
	for data = append(data, 0); len(data)%4 != 0; {
		data = append(data, 0)
	}
	return append(data, desc...)
}

// addSection appends a note section with that name and content to a library, and new section headers.
func addSection(data []byte, name string, content []byte) []byte {
	le := binary.LittleEndian
	names := "\x00" + name + "\x00"
	namesAt := uint64(len(data))
	data = append(append(data, names...), content...)
	set(40, uint64(len(data)))(data)
	set[uint16](58, sectionSize)(data)
	set[uint16](60, 3)(data)
	set[uint16](62, 1)(data)
	for _, s := range []struct {
		name, kind   uint32
		offset, size int
	}{{}, {0, 3, 0, len(names)}, {1, uint32(elf.SHT_NOTE), len(names), len(content)}} {
		raw := make([]byte, sectionSize)
		le.PutUint32(raw, s.name)
		le.PutUint32(raw[4:], s.kind)
		le.PutUint64(raw[24:], namesAt+uint64(s.offset))
		le.PutUint64(raw[32:], uint64(s.size))
		data = append(data, raw...)
	}
	return data
}

func withNote(t testing.TB) []byte {
	t.Helper()
	return addSection(library(t), section, note(owner, content))
}

func TestNote(t *testing.T) {
	header := len(withNote(t)) - sectionSize // of the note's section
	for name, c := range map[string]struct {
		file []byte
		want string // empty without a note
	}{
		"a note":            {withNote(t), content},
		"padded with zeros": {addSection(library(t), section, note(owner, content+"\x00\x00")), content},
		"followed by another": {
			addSection(library(t), section, append(note(owner, content+"\x00"), note("GNU", "x")...)), content,
		},
		"another section":      {addSection(library(t), ".note.gnu", note("GNU", "")), ""},
		"a longer name":        {addSection(library(t), section+"2", note(owner, content)), ""},
		"a section of no note": {set[uint32](header+4, 1)(withNote(t)), ""},
		"no section headers":   {set[uint16](60, 0)(withNote(t)), ""},
		"no name":              {set[uint32](header, 9999)(withNote(t)), ""},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := read(c.file)
			testenv.Must(t, err)
			got, err := f.Note(section, owner)
			if string(got) != c.want || (got == nil) != (c.want == "") || err != nil {
				t.Errorf("got %q, %v, want %q", got, err, c.want)
			}
		})
	}
}

func TestNoteRefusesDamagedFiles(t *testing.T) {
	header := len(withNote(t)) - sectionSize
	names := header - sectionSize
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"section headers of another size": {set[uint16](58, 40)(withNote(t)), "unusable section headers"},
		"too many section headers": {
			set[uint16](60, maxSections+1)(append(withNote(t), make([]byte, 1<<20)...)), "unusable section headers",
		},
		"no section with the names": {set[uint16](62, 3)(withNote(t)), "unusable section headers"},
		"names past the end": {
			set[uint64](names+24, 1<<40)(withNote(t)), "section names: the file is truncated",
		},
		"names at the last number": {
			set(names+24, ^uint64(0))(withNote(t)), "section names: the file is truncated",
		},
		"names above the limit": {
			set[uint64](names+32, maxSectionNames+1)(withNote(t)), "the limit is 1048576",
		},
		"a note above the limit": {set[uint64](header+32, maxNote+1)(withNote(t)), "the limit is 65536"},
		"a note past the end": {
			set[uint64](header+24, 1<<40)(withNote(t)), section + ": the file is truncated",
		},
		"a section that ends in the note": {set[uint64](header+32, 40)(withNote(t)), "longer than the section"},
		"a section shorter than a note":   {set[uint64](header+32, 8)(withNote(t)), "fewer than a note"},
		"a note without content":          {addSection(library(t), section, note(owner, "\x00")), "is empty"},
		"another owner":                   {addSection(library(t), section, note("GNU", content)), `the owner "GNU"`},
		"an owner of 4 GiB": {
			addSection(library(t), section, []byte("\xff\xff\xff\xff\x04\x00\x00\x00\x01\x00\x00\x00NVIDIA")),
			"longer than the section",
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := read(c.file)
			testenv.Must(t, err)
			if got, err := f.Note(section, owner); got != nil || err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %q, %v, want an error with %q", got, err, c.want)
			}
		})
	}
}

// The assembler and the linker of the machine make the file here.
func TestNoteOfACompiledLibrary(t *testing.T) {
	file := filepath.Join(t.TempDir(), "libcuda.so.575.57")
	cmd := exec.Command(testenv.Command(t, "cc"), "-x", "assembler", "-shared", "-nostdlib", "-o", file, "-")
	cmd.Stdin = strings.NewReader(`.section ` + section + `, "a", %note
		.balign 4
		.long 2f-1f, 4f-3f, 1
		1: .asciz "` + owner + `"
		2: .balign 4
		3: .ascii "` + strings.ReplaceAll(content, `"`, `\"`) + `"
		4: .balign 4
		`)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	data, err := os.ReadFile(file)
	testenv.Must(t, err)
	f, err := ReadLibrary(bytes.NewReader(data), int64(len(data)), MachineOf(runtime.GOARCH))
	testenv.Must(t, err)
	if got, err := f.Note(section, owner); string(got) != content || err != nil {
		t.Errorf("got %q, %v, want %q", got, err, content)
	}
}

func TestNoteReturnsTheErrorOfTheDisk(t *testing.T) {
	data := withNote(t)
	f, err := ReadLibrary(failing{bytes.NewReader(data), int64(len(data) - 1)}, int64(len(data)), x86)
	testenv.Must(t, err)
	if got, err := f.Note(section, owner); got != nil || !errors.Is(err, errDisk) {
		t.Errorf("got %q, %v, want the error of the disk", got, err)
	}
}

func FuzzNote(f *testing.F) {
	f.Add(withNote(f))
	f.Add(addSection(library(f), ".note.gnu", note("GNU", "")))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := read(data)
		if err != nil {
			return
		}
		got, err := file.Note(section, owner)
		if got != nil && err != nil || len(got) > maxNote {
			t.Errorf("got %d bytes and the error %v", len(got), err)
		}
	})
}
