package ldcache

import (
	"encoding/binary"
	"fmt"
	"strings"
)

const (
	magicOld = "ld.so-1.7.0"
	magicNew = "glibc-ld.so.cache1.1"

	headerOld, entryOld = 16, 12
	headerNew, entryNew = 48, 24

	// Offsets in the new header.
	countAt, stringsAt, flagsAt, extensionAt = 20, 24, 28, 32

	endianMask, endianLittle = 3, 2

	extensionMagic  = 0xeaa42174
	extensionHeader = 8
	sectionSize     = 16
	tagGenerator    = 0
	tagHWCaps       = 1

	maxName   = 255  // NAME_MAX, since names have no slash
	maxPath   = 4095 // PATH_MAX less the NUL
	maxHWCaps = 256  // glibc has 4
)

var le = binary.LittleEndian

// Parse reads a cache in any of glibc's three layouts: new, old, and old followed by new, of which the new one is used.
// It refuses a cache that the loader would ignore or could use only in part. Unknown sections of the extension block
// are dropped. The strings of the result share one copy of data.
func Parse(data []byte) (*Cache, error) {
	if len(data) > MaxSize {
		return nil, fmt.Errorf("%w: %d bytes, the limit is %d", errFormat, len(data), MaxSize)
	}
	if hasMagic(data, magicNew) {
		return parseNew(data, 0)
	}
	if !hasMagic(data, magicOld) || len(data) < headerOld {
		return nil, fmt.Errorf("%w: no known magic number", errFormat)
	}
	n, err := count(data, 12, headerOld, entryOld)
	if err != nil {
		return nil, err
	}
	end := headerOld + n*entryOld
	if start := (end + 7) &^ 7; start < len(data) && hasMagic(data[start:], magicNew) {
		return parseNew(data, start)
	}
	return parseOld(data, n, end)
}

func hasMagic(data []byte, magic string) bool {
	return len(data) >= len(magic) && string(data[:len(magic)]) == magic
}

// count reads the number of entries at an offset, and checks that so many of that size follow the header.
func count(data []byte, at, header, size int) (int, error) {
	if len(data) < header {
		return 0, fmt.Errorf("%w: truncated header", errFormat)
	}
	n := int64(le.Uint32(data[at:]))
	if n > MaxEntries {
		return 0, fmt.Errorf("%w: %d entries, the limit is %d", errFormat, n, MaxEntries)
	}
	if int64(len(data)-header) < n*int64(size) {
		return 0, fmt.Errorf("%w: truncated in its %d entries", errFormat, n)
	}
	return int(n), nil
}

func parseOld(data []byte, n, end int) (*Cache, error) {
	c := &Cache{Entries: make([]Entry, 0, n)}
	strs := &texts{string(data[end:]), MaxSize}
	for i := range n {
		e, err := strs.entry(data[headerOld+i*entryOld:])
		if err != nil {
			return nil, fmt.Errorf("entry %d: %w", i, err)
		}
		c.Entries = append(c.Entries, e)
	}
	return c, nil
}

// parseNew reads the new layout at offset start. Offsets of entries are relative to start, those of the extension block
// to the beginning of the file.
func parseNew(file []byte, start int) (*Cache, error) {
	data := file[start:]
	n, err := count(data, countAt, headerNew, entryNew)
	if err != nil {
		return nil, err
	}
	if endian := data[flagsAt]; endian != 0 && endian&endianMask != endianLittle {
		return nil, fmt.Errorf("%w: not little-endian", errFormat)
	}
	c := &Cache{Entries: make([]Entry, 0, n)}
	strs := &texts{string(data), MaxSize}
	for i := range n {
		raw := data[headerNew+i*entryNew:]
		e, err := strs.entry(raw)
		if err != nil {
			return nil, fmt.Errorf("entry %d: %w", i, err)
		}
		e.OSVersion, e.HWCap = le.Uint32(raw[12:]), le.Uint64(raw[16:])
		c.Entries = append(c.Entries, e)
	}
	if at := le.Uint32(data[extensionAt:]); at != 0 {
		if err := c.parseExtension(file, at); err != nil {
			return nil, fmt.Errorf("extension block: %w", err)
		}
	}
	return c, nil
}

// texts are the strings of entries. Those of a hostile cache may overlap, and would need far more bytes when written.
// left is the number of bytes that are still allowed.
type texts struct {
	data string
	left int
}

// entry reads the part of an entry that both layouts have.
func (t *texts) entry(raw []byte) (e Entry, err error) {
	e.Flags = int32(le.Uint32(raw))
	if e.Name, err = text(t.data, le.Uint32(raw[4:]), maxName); err != nil {
		return e, fmt.Errorf("name: %w", err)
	}
	if e.Path, err = text(t.data, le.Uint32(raw[8:]), maxPath); err != nil {
		return e, fmt.Errorf("path: %w", err)
	}
	if t.left -= len(e.Name) + len(e.Path); t.left < 0 {
		return e, fmt.Errorf("%w: names and paths of more than %d bytes together", errFormat, MaxSize)
	}
	return e, nil
}

// text returns the NUL-terminated string at an offset.
func text(strs string, at uint32, limit int) (string, error) {
	if int64(at) >= int64(len(strs)) {
		return "", fmt.Errorf("%w: offset %d is past the end", errFormat, at)
	}
	s := strs[at:]
	s = s[:min(len(s), limit+1)]
	n := strings.IndexByte(s, 0)
	if n < 0 {
		return "", fmt.Errorf("%w: the string at %d has no NUL or is longer than %d bytes", errFormat, at, limit)
	}
	return s[:n], nil
}

func (c *Cache) parseExtension(file []byte, at uint32) error {
	block, err := part(file, at, extensionHeader)
	if err != nil {
		return err
	}
	if magic := le.Uint32(block); magic != extensionMagic {
		return fmt.Errorf("%w: magic %#x", errFormat, magic)
	}
	n := le.Uint32(block[4:])
	if n > 64 {
		return fmt.Errorf("%w: %d sections", errFormat, n)
	}
	sections, err := part(file, at+extensionHeader, n*sectionSize)
	if err != nil {
		return err
	}
	for ; len(sections) > 0; sections = sections[sectionSize:] {
		tag := le.Uint32(sections)
		data, err := part(file, le.Uint32(sections[8:]), le.Uint32(sections[12:]))
		if err == nil {
			err = c.parseSection(file, tag, data)
		}
		if err != nil {
			return fmt.Errorf("section with tag %d: %w", tag, err)
		}
	}
	return nil
}

func (c *Cache) parseSection(file []byte, tag uint32, data []byte) error {
	switch tag {
	case tagGenerator:
		c.Generator, _, _ = strings.Cut(string(data[:min(len(data), maxName)]), "\x00")
	case tagHWCaps:
		if len(data)%4 != 0 || len(data)/4 > maxHWCaps {
			return fmt.Errorf("%w: %d bytes of names", errFormat, len(data))
		}
		c.HWCaps = make([]string, 0, len(data)/4)
		for ; len(data) > 0; data = data[4:] {
			name, err := hwcapName(file, le.Uint32(data))
			if err != nil {
				return err
			}
			c.HWCaps = append(c.HWCaps, name)
		}
	}
	return nil
}

func hwcapName(file []byte, at uint32) (string, error) {
	name, err := part(file, at, 1)
	if err != nil {
		return "", err
	}
	return text(string(name[:min(cap(name), maxName+1)]), 0, maxName)
}

// part returns size bytes of a file. Its capacity reaches to the end of the file.
func part(file []byte, at, size uint32) ([]byte, error) {
	if int64(at)+int64(size) > int64(len(file)) {
		return nil, fmt.Errorf("%w: %d bytes at %d are past the end", errFormat, size, at)
	}
	return file[at:][: size : len(file)-int(at)], nil
}
