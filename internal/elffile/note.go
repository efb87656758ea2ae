package elffile

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
)

// Limits for what is read to find a note, many times larger than in real files.
const (
	maxSections     = 4096
	maxSectionNames = 1 << 20 // bytes
	maxNote         = 1 << 16 // bytes
)

// Note returns the descriptor of the first note in a section, without padding. If the note has another owner, that is
// an error. The result is nil if the section or the section headers are missing.
func (f *File) Note(section, owner string) ([]byte, error) {
	data, err := f.noteSection(section)
	if err != nil {
		return nil, fmt.Errorf("read the section %s: %w", section, err)
	}
	if data == nil {
		return nil, nil
	}
	// A note has the sizes of its name and its descriptor, a type, the name, and the descriptor. Name and descriptor
	// are padded to 4 bytes.
	const noteHeaderSize = 12
	if len(data) < noteHeaderSize {
		return nil, fmt.Errorf("the section %s has %d bytes, fewer than a note", section, len(data))
	}
	le := binary.LittleEndian
	nameSize, descSize := uint64(le.Uint32(data)), uint64(le.Uint32(data[4:]))
	desc := noteHeaderSize + (nameSize+3)&^3
	if desc+descSize > uint64(len(data)) {
		return nil, fmt.Errorf("the note in the section %s is longer than the section", section)
	}
	name := bytes.TrimRight(data[noteHeaderSize:noteHeaderSize+nameSize], "\x00")
	if string(name) != owner {
		return nil, fmt.Errorf("the note in the section %s has the owner %.40q, expected %q", section, name, owner)
	}
	content := bytes.TrimRight(data[desc:desc+descSize], "\x00")
	if len(content) == 0 {
		return nil, fmt.Errorf("the note in the section %s is empty", section)
	}
	return content, nil
}

// noteSection reads a section of notes by its name, or returns nil if the file has none. It does not use segments,
// since notes need not be in one.
func (f *File) noteSection(name string) ([]byte, error) {
	h := &f.header
	if h.Shnum == 0 {
		return nil, nil
	}
	if h.Shentsize != sectionSize || h.Shnum > maxSections || h.Shstrndx >= h.Shnum {
		return nil, fmt.Errorf("unusable section headers: %d of %d bytes, names in section %d",
			h.Shnum, h.Shentsize, h.Shstrndx)
	}
	sections, err := readValues[elf.Section64](f, h.Shoff, uint64(h.Shnum))
	if err != nil {
		return nil, err
	}
	names, err := f.content(&sections[h.Shstrndx], maxSectionNames)
	if err != nil {
		return nil, fmt.Errorf("section names: %w", err)
	}
	for i := range sections {
		s := &sections[i]
		isNamed := uint64(s.Name) < uint64(len(names)) && bytes.HasPrefix(names[s.Name:], []byte(name+"\x00"))
		if isNamed && elf.SectionType(s.Type) == elf.SHT_NOTE {
			return f.content(s, maxNote)
		}
	}
	return nil, nil
}

// content reads a section of at most limit bytes.
func (f *File) content(s *elf.Section64, limit uint64) ([]byte, error) {
	if s.Size > limit {
		return nil, fmt.Errorf("%d bytes, the limit is %d", s.Size, limit)
	}
	return readValues[byte](f, s.Off, s.Size)
}
