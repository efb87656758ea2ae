// Package ldcache reads and writes the dynamic loader's cache, /etc/ld.so.cache of glibc, as a value. It knows the
// file's format and the order in which the loader searches it; it opens no file.
//
// Layouts are those of glibc's sysdeps/generic/dl-cache.h, the order is that of elf/dl-cache.c and elf/cache.c.
package ldcache

import (
	"errors"
	"path"
	"slices"
	"strings"
	"unicode"
)

// MaxSize is the size in bytes, and MaxEntries the number of entries, of the largest cache that Parse reads. A
// distribution with every package installed stays below a tenth of both. The limits keep a hostile cache from costing
// more than about two seconds and 100 MB of memory.
const (
	MaxSize    = 16 << 20
	MaxEntries = 1 << 17
)

// Flags of an entry: an ELF library for glibc (0x003), with the architecture's bits. The loader considers only entries
// whose flags are exactly its own.
const (
	FlagsX8664   int32 = 0x0303
	FlagsAArch64 int32 = 0x0a03
)

// FlagsFor is the Flags value of 64-bit libraries of a GOARCH; false where none is known.
func FlagsFor(goarch string) (int32, bool) {
	switch goarch {
	case "amd64":
		return FlagsX8664, true
	case "arm64":
		return FlagsAArch64, true
	}
	return 0, false
}

// ErrFormat is the error of data that is not a loader cache, is damaged, or is larger than Parse's limits.
var ErrFormat = errors.New("not a usable ld.so.cache")

// Cache is the content of a loader cache.
type Cache struct {
	// Entries in the order of the file. Among entries of one name and flags the loader takes the first, but prefers
	// the best fitting one of a glibc-hwcaps directory.
	Entries []Entry
	// HWCaps are the names of glibc-hwcaps directories ("x86-64-v3"), which entries refer to by index.
	HWCaps []string
	// Generator says who wrote the file, as ldconfig -p prints it. It may be empty.
	Generator string
}

// Entry is one library: the name that programs ask for, which is its SONAME, and the file. Neither contains a NUL.
type Entry struct {
	Name, Path string
	Flags      int32
	// OSVersion is the oldest kernel that the library runs on, 0 for any; only glibc before 2.36 looks at it.
	OSVersion uint32
	// HWCap is 0 for a library that every machine can use. With bit 62 set its low half is an index into HWCaps.
	HWCap uint64
}

const hwcapExtension = 1 << 62

// named reports whether the entry comes from a glibc-hwcaps directory, as dl_cache_hwcap_extension does: the bits
// between hold the ISA level.
func (e Entry) named() bool { return e.HWCap>>42 == hwcapExtension>>42 }

// DropInvalid removes what no ldconfig writes, and says how many entries that were: a library has a plain name and an
// absolute path, and nothing has control characters. A path may contain "..", as a line of ld.so.conf may.
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

// Lookup is the path of the first library of that name and flags that every machine can use.
func (c *Cache) Lookup(name string, flags int32) (string, bool) {
	for _, e := range c.Entries {
		if e.Name == name && e.Flags == flags && !e.named() {
			return e.Path, true
		}
	}
	return "", false
}

// Prepend puts entries before all others, so that the loader finds them first. Other entries that it takes for the
// same name and flags go, those of glibc-hwcaps directories too. Of several entries with one name the first counts.
func (c *Cache) Prepend(entries ...Entry) {
	first := make([]Entry, 0, len(entries)+len(c.Entries))
	seen := make(map[key]bool, len(entries))
	for _, e := range entries {
		if k := keyOf(e); !seen[k] {
			seen[k] = true
			first = append(first, e)
		}
	}
	for _, e := range c.Entries {
		if !seen[keyOf(e)] {
			first = append(first, e)
		}
	}
	c.Entries = first
}

// key is equal for two entries that the loader takes for the same name.
type key struct {
	name  string
	flags int32
}

// keyOf drops leading zeros from runs of digits, since the loader compares those as numbers.
func keyOf(e Entry) key {
	k := key{e.Name, e.Flags}
	for i := 0; i+1 < len(e.Name); i++ {
		if e.Name[i] == '0' && isDigit(e.Name[i+1]) {
			k.name = dropZeros(e.Name)
			break
		}
	}
	return k
}

func dropZeros(s string) string {
	b := make([]byte, 0, len(s))
	for i := range len(s) {
		leading := s[i] == '0' && (len(b) == 0 || !isDigit(b[len(b)-1]))
		if leading && i+1 < len(s) && isDigit(s[i+1]) {
			continue
		}
		b = append(b, s[i])
	}
	return string(b)
}
