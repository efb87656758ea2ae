package hook

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Limits for the parts of a hostile ELF file, several times what real ones have.
const (
	maxSections = 4096
	maxNames    = 1 << 20 // bytes
	maxNote     = 1 << 16 // bytes
)

const (
	noteSection = ".note.cuda.fwd_compatibility"
	noteOwner   = "NVIDIA Corporation"
	sectionNote = 7 // SHT_NOTE
)

// errNoNote is the error of a library that does not say which drivers it works with. Those before CUDA 12.9 do not.
var errNoNote = errors.New("no forward compatibility note")

// compatNote is the note's JSON.
type compatNote struct {
	Format int
	// Driver lists the branches of the kernel driver that the library works with.
	Driver []int
}

func (n compatNote) admits(driver version) bool {
	return n.Format == 1 && slices.Contains(n.Driver, driver.major())
}

// readCompatNote reads the forward compatibility note of a libcuda. debug/elf is not made for hostile files, so the few
// fields that lead to the note are read here: a 64-bit little-endian file's section header table (System V ABI,
// chapter 4), the section of that name, and the first note in it.
func readCompatNote(r io.ReaderAt) (compatNote, error) {
	data, err := findSection(r, noteSection)
	if err != nil {
		return compatNote{}, err
	}
	desc, err := parseNote(data)
	if err != nil {
		return compatNote{}, err
	}
	var n compatNote
	if err := json.Unmarshal(desc, &n); err != nil {
		return compatNote{}, fmt.Errorf("%s: %w", noteSection, err)
	}
	return n, nil
}

type section struct {
	name, kind   uint32
	offset, size uint64
}

func findSection(r io.ReaderAt, name string) ([]byte, error) {
	sections, namesAt, err := readSections(r)
	if err != nil {
		return nil, err
	}
	names, err := readPart(r, sections[namesAt], maxNames)
	if err != nil {
		return nil, fmt.Errorf("section names: %w", err)
	}
	for _, s := range sections {
		if s.kind == sectionNote && cString(names, s.name) == name {
			return readPart(r, s, maxNote)
		}
	}
	return nil, errNoNote
}

// readSections reads the section header table, and which section holds the names.
func readSections(r io.ReaderAt) ([]section, int, error) {
	var head [64]byte
	if _, err := r.ReadAt(head[:], 0); err != nil {
		return nil, 0, fmt.Errorf("ELF header: %w", err)
	}
	if string(head[:6]) != "\x7fELF\x02\x01" {
		return nil, 0, errors.New("not a 64-bit little-endian ELF file")
	}
	le := binary.LittleEndian
	at, size, n, names := le.Uint64(head[40:]), le.Uint16(head[58:]), int(le.Uint16(head[60:])), int(le.Uint16(head[62:]))
	if n == 0 {
		return nil, 0, errNoNote
	}
	if size != 64 || n > maxSections || names >= n {
		return nil, 0, fmt.Errorf("%d section headers of %d bytes, names in number %d", n, size, names)
	}
	table, err := readPart(r, section{offset: at, size: uint64(n) * 64}, maxSections*64)
	if err != nil {
		return nil, 0, fmt.Errorf("section headers: %w", err)
	}
	sections := make([]section, n)
	for i := range sections {
		raw := table[i*64:]
		sections[i] = section{le.Uint32(raw), le.Uint32(raw[4:]), le.Uint64(raw[24:]), le.Uint64(raw[32:])}
	}
	return sections, names, nil
}

func readPart(r io.ReaderAt, s section, limit uint64) ([]byte, error) {
	if s.size > limit || s.offset > 1<<40 {
		return nil, fmt.Errorf("%d bytes at %d, the limit is %d", s.size, s.offset, limit)
	}
	data := make([]byte, s.size)
	if _, err := r.ReadAt(data, int64(s.offset)); err != nil && s.size > 0 {
		return nil, err
	}
	return data, nil
}

func cString(data []byte, at uint32) string {
	if uint64(at) >= uint64(len(data)) {
		return ""
	}
	s, _, _ := strings.Cut(string(data[at:min(len(data), int(at)+256)]), "\x00")
	return s
}

// parseNote is the descriptor of a note: sizes of name and descriptor, a type, and both, padded to 4 bytes.
func parseNote(data []byte) ([]byte, error) {
	if len(data) < 12 {
		return nil, fmt.Errorf("%s: truncated", noteSection)
	}
	le := binary.LittleEndian
	nameSize, descSize := uint64(le.Uint32(data)), uint64(le.Uint32(data[4:]))
	desc := 12 + (nameSize+3)&^3
	if desc+descSize > uint64(len(data)) {
		return nil, fmt.Errorf("%s: truncated", noteSection)
	}
	if owner := strings.TrimRight(string(data[12:12+nameSize]), "\x00"); owner != noteOwner {
		return nil, fmt.Errorf("%s: owner is %.40q", noteSection, owner)
	}
	return []byte(strings.TrimRight(string(data[desc:desc+descSize]), "\x00")), nil
}
