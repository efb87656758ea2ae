package elffile

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// Limits on the parts of a file that lead to a note, many times what real ones have.
const (
	maxSections     = 4096
	maxSectionNames = 1 << 20 // bytes
	maxNote         = 1 << 16 // bytes
)

// Note returns the descriptor of the first note in the section of that name, without the zeros that pad it. The note
// must have that owner. Without such a section, or without section headers, the result is nil.
func (f *File) Note(section, owner string) ([]byte, error) {
	data, err := f.noteSection(section)
	if err != nil {
		return nil, fmt.Errorf("read the section %s: %w", section, err)
	}
	if data == nil {
		return nil, nil
	}
	// A note is the sizes of its name and descriptor, a type, and both, each padded to 4 bytes.
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

// noteSection reads the section of notes with that name, nil if there is none. Notes are found by section, since they
// need not be in a segment.
func (f *File) noteSection(name string) ([]byte, error) {
	h := f.sections
	if h.count == 0 {
		return nil, nil
	}
	if h.entrySize != sectionSize || h.count > maxSections || h.names >= h.count {
		return nil, fmt.Errorf("unusable section headers: %d of %d bytes, names in section %d",
			h.count, h.entrySize, h.names)
	}
	table, err := f.part(h.offset, uint64(h.count)*sectionSize, maxSections*sectionSize)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	header := table[int(h.names)*sectionSize:]
	names, err := f.part(le.Uint64(header[24:]), le.Uint64(header[32:]), maxSectionNames)
	if err != nil {
		return nil, fmt.Errorf("section names: %w", err)
	}
	for ; len(table) > 0; table = table[sectionSize:] {
		at := uint64(le.Uint32(table))
		isNamed := at < uint64(len(names)) && bytes.HasPrefix(names[at:], []byte(name+"\x00"))
		if isNamed && le.Uint32(table[4:]) == noteType {
			return f.part(le.Uint64(table[24:]), le.Uint64(table[32:]), maxNote)
		}
	}
	return nil, nil
}

// part reads n bytes at an offset. More than limit bytes are an error.
func (f *File) part(offset, n, limit uint64) ([]byte, error) {
	if n > limit {
		return nil, fmt.Errorf("%d bytes, the limit is %d", n, limit)
	}
	if !f.has(offset, n) {
		return nil, errTruncated
	}
	data := make([]byte, n)
	return data, f.read(data, offset)
}
