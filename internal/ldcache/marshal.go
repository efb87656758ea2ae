package ldcache

import "strings"

// Marshal encodes the cache in the new layout, with the entries in the order that the loader requires. The result is
// deterministic: if it is parsed and encoded again, the bytes are the same.
func (c *Cache) Marshal() []byte {
	entries := c.sorted()
	start := headerNew + len(entries)*entryNew
	b := builder{data: make([]byte, start, start+len(entries)*64), known: make(map[string]uint32, len(entries))}
	copy(b.data, magicNew)
	le.PutUint32(b.data[countAt:], uint32(len(entries)))
	b.data[flagsAt] = endianLittle
	for i, e := range entries {
		path := b.text(e.Path)
		name := path + uint32(len(e.Path)-len(e.Name))
		if !strings.HasSuffix(e.Path, e.Name) {
			name = b.text(e.Name)
		}
		raw := b.data[headerNew+i*entryNew:]
		le.PutUint32(raw, uint32(e.Flags))
		le.PutUint32(raw[4:], name)
		le.PutUint32(raw[8:], path)
		le.PutUint32(raw[12:], e.OSVersion)
		le.PutUint64(raw[16:], e.HWCap)
	}
	hwcaps := make([]byte, 0, 4*len(c.HWCaps))
	for _, name := range c.HWCaps {
		hwcaps = le.AppendUint32(hwcaps, b.text(name))
	}
	le.PutUint32(b.data[stringsAt:], uint32(len(b.data)-start))
	b.extension(c.Generator, hwcaps)
	return b.data
}

// builder builds a cache file. `known` has the offsets of the strings that are in it already.
type builder struct {
	data  []byte
	known map[string]uint32
}

func (b *builder) text(s string) uint32 {
	at, ok := b.known[s]
	if !ok {
		at = uint32(len(b.data))
		b.data = append(append(b.data, s...), 0)
		b.known[s] = at
	}
	return at
}

// extension appends the extension block unless it would be empty: first the table of its sections, then their
// contents.
func (b *builder) extension(generator string, hwcaps []byte) {
	type section struct {
		tag  uint32
		data []byte
	}
	var sections []section
	if generator != "" {
		sections = append(sections, section{tagGenerator, []byte(generator)})
	}
	if len(hwcaps) > 0 {
		sections = append(sections, section{tagHWCaps, hwcaps})
	}
	if len(sections) == 0 {
		return
	}
	b.align()
	le.PutUint32(b.data[extensionAt:], uint32(len(b.data)))
	b.data = le.AppendUint32(b.data, extensionMagic)
	b.data = le.AppendUint32(b.data, uint32(len(sections)))
	table := len(b.data)
	b.data = append(b.data, make([]byte, len(sections)*sectionSize)...)
	for i, s := range sections {
		b.align()
		raw := b.data[table+i*sectionSize:]
		le.PutUint32(raw, s.tag)
		le.PutUint32(raw[8:], uint32(len(b.data)))
		le.PutUint32(raw[12:], uint32(len(s.data)))
		b.data = append(b.data, s.data...)
	}
}

// align pads to a multiple of 4 bytes, as the numbers of the extension block require.
func (b *builder) align() {
	for len(b.data)%4 != 0 {
		b.data = append(b.data, 0)
	}
}
