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

// MaxSize is the largest size in bytes, and MaxEntries the largest number of entries, of a cache that Parse accepts. A
// distribution with every package installed needs less than a tenth of either. Within these limits a malicious cache
// costs about two seconds and 100 MB of memory at most.
const (
	MaxSize    = 16 << 20
	MaxEntries = 1 << 17
)

// The flags of an entry say that it is an ELF library for glibc (0x003), and for which architecture. The loader uses
// only entries whose flags equal its own.
const (
	FlagsX8664   int32 = 0x0303
	FlagsAArch64 int32 = 0x0a03
)

// FlagsFor returns the flags of 64-bit libraries for a GOARCH. ok is false for an unknown GOARCH.
func FlagsFor(goarch string) (flags int32, ok bool) {
	switch goarch {
	case "amd64":
		return FlagsX8664, true
	case "arm64":
		return FlagsAArch64, true
	}
	return 0, false
}

// errFormat means that data is not a loader cache, is damaged, or exceeds Parse's limits.
var errFormat = errors.New("not a usable ld.so.cache")

// Cache is the content of a loader cache.
type Cache struct {
	// Entries are in the order of the file. If several entries have the same name and flags, the loader uses the one
	// from the best glibc-hwcaps directory that the machine's CPU supports, and otherwise the first.
	Entries []Entry
	// HWCaps are the names of glibc-hwcaps directories ("x86-64-v3"). Entries refer to them by index.
	HWCaps []string
	// Generator names the program that wrote the file; ldconfig -p prints it. It may be empty.
	Generator string
}

// Entry is a library: its SONAME, which programs load, and its file. Neither contains a NUL.
type Entry struct {
	Name, Path string
	Flags      int32
	// OSVersion is the oldest kernel that the library supports, 0 for any. Only glibc before 2.36 uses it.
	OSVersion uint32
	// HWCap is 0 for a library that every CPU can run. If bit 62 is set, the low half is an index into HWCaps.
	HWCap uint64
}

const hwcapExtension = 1 << 62

// isHWCap reports whether the entry is from a glibc-hwcaps directory, like dl_cache_hwcap_extension. It ignores bits
// 32 to 41, which have the ISA level.
func (e Entry) isHWCap() bool { return e.HWCap>>42 == hwcapExtension>>42 }

// DropInvalid removes entries that ldconfig never writes, and returns how many they are. A valid entry has a name
// without a slash, an absolute path, and no control characters. Paths may contain "..", as in lines of ld.so.conf.
func (c *Cache) DropInvalid() int {
	n := len(c.Entries)
	c.Entries = slices.DeleteFunc(c.Entries, func(e Entry) bool {
		return !isName(e.Name) || !path.IsAbs(e.Path) || !isText(e.Path)
	})
	for i, name := range c.HWCaps {
		if !isName(name) {
			c.HWCaps[i] = "" // keeps the indices of the other names
		}
	}
	if !isText(c.Generator) {
		c.Generator = ""
	}
	return n - len(c.Entries)
}

func isName(s string) bool { return s != "" && !strings.Contains(s, "/") && isText(s) }

func isText(s string) bool { return !strings.ContainsFunc(s, unicode.IsControl) }

// Lookup returns the path of the first library with that name and flags that is not limited to some CPUs
// (glibc-hwcaps).
func (c *Cache) Lookup(name string, flags int32) (string, bool) {
	for _, e := range c.Entries {
		if e.Name == name && e.Flags == flags && !e.isHWCap() {
			return e.Path, true
		}
	}
	return "", false
}

// Prepend inserts entries before all others. It removes existing entries with the same names and flags, including those
// of glibc-hwcaps directories. If new entries have the same name, only the first one is inserted.
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
