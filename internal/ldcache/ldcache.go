// Package ldcache parses, changes and writes the cache of glibc's dynamic loader, /etc/ld.so.cache. It opens no file.
//
// The layouts are those of glibc's sysdeps/generic/dl-cache.h, the order of entries is that of elf/dl-cache.c and
// elf/cache.c.
package ldcache

import (
	"errors"
	"path"
	"slices"
	"strings"
	"unicode"
)

// MaxSize is the size in bytes, and MaxEntries the number of entries, of the largest cache that Parse reads. A
// distribution with every package installed needs less than a tenth of both. Within the limits a hostile cache costs at
// most about two seconds and 100 MB of memory.
const (
	MaxSize    = 16 << 20
	MaxEntries = 1 << 17
)

// Flags of an entry: an ELF library for glibc (0x003), with the architecture's bits. The loader uses only entries with
// exactly its own flags.
const (
	FlagsX8664   int32 = 0x0303
	FlagsAArch64 int32 = 0x0a03
)

// FlagsFor returns the flags of 64-bit libraries for a GOARCH. ok is false for an unknown one.
func FlagsFor(goarch string) (flags int32, ok bool) {
	switch goarch {
	case "amd64":
		return FlagsX8664, true
	case "arm64":
		return FlagsAArch64, true
	}
	return 0, false
}

// errFormat is the error of data that is not a loader cache, is damaged, or is larger than Parse's limits.
var errFormat = errors.New("not a usable ld.so.cache")

// Cache is the content of a loader cache.
type Cache struct {
	// Entries are in the order of the file. Of several with the same name and flags the loader uses the first, but
	// prefers the best one of a glibc-hwcaps directory for the machine.
	Entries []Entry
	// HWCaps are the names of glibc-hwcaps directories ("x86-64-v3"). Entries refer to them by index.
	HWCaps []string
	// Generator names the program that wrote the file. ldconfig -p prints it. It may be empty.
	Generator string
}

// Entry is one library: its SONAME, by which programs load it, and its file. Neither contains a NUL.
type Entry struct {
	Name, Path string
	Flags      int32
	// OSVersion is the oldest kernel for the library, 0 for any. Only glibc before 2.36 uses it.
	OSVersion uint32
	// HWCap is 0 for a library for every machine. If bit 62 is set, the low half is an index into HWCaps.
	HWCap uint64
}

const hwcapExtension = 1 << 62

// isHWCap reports whether the entry is from a glibc-hwcaps directory, as dl_cache_hwcap_extension does. The bits
// between the mark and the index have the ISA level.
func (e Entry) isHWCap() bool { return e.HWCap>>42 == hwcapExtension>>42 }

// DropInvalid removes entries that ldconfig never writes, and returns their number. A valid one has a name without a
// slash, an absolute path, and no control characters. Paths may contain "..", since lines of ld.so.conf may.
func (c *Cache) DropInvalid() int {
	n := len(c.Entries)
	c.Entries = slices.DeleteFunc(c.Entries, func(e Entry) bool {
		return !isName(e.Name) || !path.IsAbs(e.Path) || !isText(e.Path)
	})
	for i, name := range c.HWCaps {
		if !isName(name) {
			c.HWCaps[i] = "" // entries refer to the others by index
		}
	}
	if !isText(c.Generator) {
		c.Generator = ""
	}
	return n - len(c.Entries)
}

func isName(s string) bool { return s != "" && !strings.Contains(s, "/") && isText(s) }

func isText(s string) bool { return !strings.ContainsFunc(s, unicode.IsControl) }

// Lookup returns the path of the first library with that name and flags for every machine.
func (c *Cache) Lookup(name string, flags int32) (string, bool) {
	for _, e := range c.Entries {
		if e.Name == name && e.Flags == flags && !e.isHWCap() {
			return e.Path, true
		}
	}
	return "", false
}

// Prepend inserts entries before all others. It removes the other entries of their names and flags, also those of
// glibc-hwcaps directories. Of several new entries with one name only the first is inserted.
func (c *Cache) Prepend(entries ...Entry) {
	type key struct {
		name  string
		flags int32
	}
	seen := make(map[key]bool, len(entries))
	var first []Entry
	for _, e := range entries {
		if k := (key{e.Name, e.Flags}); !seen[k] {
			seen[k] = true
			first = append(first, e)
		}
	}
	others := slices.DeleteFunc(slices.Clone(c.Entries), func(e Entry) bool { return seen[key{e.Name, e.Flags}] })
	c.Entries = append(first, others...)
}
