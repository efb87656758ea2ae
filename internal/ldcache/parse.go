package ldcache

import (
	"bytes"
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
	maxPath   = 4095 // PATH_MAX without the NUL
	maxHWCaps = 256  // glibc has 4
)

var le = binary.LittleEndian

// Parse parses a cache in the layout of glibc 2.2 and later; the older layout may come before it. It returns an error
// for a cache that the loader would ignore or could use only in part. Unknown sections of the extension block are
// dropped. The strings of the result share one copy of data.
func Parse(data []byte) (*Cache, error) {
	if len(data) > MaxSize {
		return nil, fmt.Errorf("%w: %d bytes, the limit is %d", errFormat, len(data), MaxSize)
	}
	start := 0
	if bytes.HasPrefix(data, []byte(magicOld)) {
		n, err := count(data, 12, headerOld, entryOld)
		if err != nil {
			return nil, err
		}
		start = (headerOld + n*entryOld + 7) &^ 7
	}
	if start > len(data) || !bytes.HasPrefix(data[start:], []byte(magicNew)) {
		return nil, fmt.Errorf("%w: no known magic number", errFormat)
	}
	c := &Cache{}
	text := string(data)
	if err := c.parseEntries(data[start:], text[start:]); err != nil {
		return nil, err
	}
	if at := le.Uint32(data[start+extensionAt:]); at != 0 {
		if err := c.parseExtension(data, text, at); err != nil {
			return nil, fmt.Errorf("extension block: %w", err)
		}
	}
	return c, nil
}

// count reads the number of entries at an offset, and checks that the data has room for them after the header.
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

// parseEntries parses the entries. String offsets are relative to the header; text is data as a string.
func (c *Cache) parseEntries(data []byte, text string) error {
	n, err := count(data, countAt, headerNew, entryNew)
	if err != nil {
		return err
	}
	if endian := data[flagsAt]; endian != 0 && endian&endianMask != endianLittle {
		return fmt.Errorf("%w: not little-endian", errFormat)
	}
	c.Entries = make([]Entry, n)
	left := MaxSize // for all strings: strings that overlap in the file need more bytes when they are written
	for i := range c.Entries {
		e, raw := &c.Entries[i], data[headerNew+i*entryNew:]
		if e.Name, err = stringAt(text, le.Uint32(raw[4:]), maxName); err != nil {
			return fmt.Errorf("entry %d: name: %w", i, err)
		}
		if e.Path, err = stringAt(text, le.Uint32(raw[8:]), maxPath); err != nil {
			return fmt.Errorf("entry %d: path: %w", i, err)
		}
		if left -= len(e.Name) + len(e.Path); left < 0 {
			return fmt.Errorf("%w: names and paths of more than %d bytes together", errFormat, MaxSize)
		}
		e.Flags, e.OSVersion, e.HWCap = int32(le.Uint32(raw)), le.Uint32(raw[12:]), le.Uint64(raw[16:])
	}
	return nil
}

// stringAt returns the NUL-terminated string at an offset.
func stringAt(text string, at uint32, limit int) (string, error) {
	if int64(at) >= int64(len(text)) {
		return "", fmt.Errorf("%w: offset %d is past the end", errFormat, at)
	}
	s := text[at:]
	s = s[:min(len(s), limit+1)]
	n := strings.IndexByte(s, 0)
	if n < 0 {
		return "", fmt.Errorf("%w: the string at %d has no NUL or is longer than %d bytes", errFormat, at, limit)
	}
	return s[:n], nil
}

// parseExtension parses the extension block, whose offsets are relative to the start of the file; text is the file as a
// string.
func (c *Cache) parseExtension(file []byte, text string, at uint32) error {
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
		switch {
		case err != nil:
		case tag == tagGenerator:
			c.Generator, _, _ = strings.Cut(string(data[:min(len(data), maxName)]), "\x00")
		case tag == tagHWCaps:
			c.HWCaps, err = parseHWCaps(data, text)
		}
		if err != nil {
			return fmt.Errorf("section with tag %d: %w", tag, err)
		}
	}
	return nil
}

// parseHWCaps parses a list of name offsets.
func parseHWCaps(list []byte, text string) ([]string, error) {
	if len(list)%4 != 0 || len(list)/4 > maxHWCaps {
		return nil, fmt.Errorf("%w: %d bytes of names", errFormat, len(list))
	}
	names := make([]string, len(list)/4)
	for i := range names {
		var err error
		if names[i], err = stringAt(text, le.Uint32(list[4*i:]), maxName); err != nil {
			return nil, err
		}
	}
	return names, nil
}

// part returns size bytes of a file.
func part(file []byte, at, size uint32) ([]byte, error) {
	if int64(at)+int64(size) > int64(len(file)) {
		return nil, fmt.Errorf("%w: %d bytes at %d are past the end", errFormat, size, at)
	}
	return file[at:][:size], nil
}
