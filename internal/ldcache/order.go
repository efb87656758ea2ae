package ldcache

import (
	"cmp"
	"runtime"
	"slices"
)

// compareNames compares names like the loader's _dl_cache_libcmp: byte by byte, but runs of digits as numbers, and
// digits after all other bytes. It is negative if a comes before b in ascending order; caches are sorted in descending
// order.
func compareNames(a, b string) int {
	i, j := 0, 0
	for i < len(a) {
		x, y := a[i], at(b, j)
		switch {
		case isDigit(x) && isDigit(y):
			var m, n int32
			m, i = number(a, i)
			n, j = number(b, j)
			if m != n {
				return int(m - n)
			}
		case isDigit(x):
			return 1
		case isDigit(y):
			return -1
		case x != y:
			return char(x) - char(y)
		default:
			i++
			j++
		}
	}
	return -char(at(b, j))
}

// at returns a byte of a string, or the NUL that ends a C string if i is its length.
func at(s string, i int) byte {
	if i < len(s) {
		return s[i]
	}
	return 0
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// number parses the digits that begin at s[i]. It overflows like the loader's int: with another order the loader would
// not find some entries.
func number(s string, i int) (n int32, end int) {
	for ; i < len(s) && isDigit(s[i]); i++ {
		n = n*10 + int32(s[i]-'0')
	}
	return n, i
}

// char converts a byte to a C char, which is signed on x86 and unsigned on ARM.
func char(c byte) int {
	if runtime.GOARCH == "amd64" {
		return int(int8(c))
	}
	return int(c)
}

// sorted returns the entries in the order that the loader's binary search requires. The sort is stable: of entries
// with one name, the first stays first.
func (c *Cache) sorted() []Entry {
	entries := slices.Clone(c.Entries)
	slices.SortStableFunc(entries, compareEntries)
	return entries
}

// compareEntries is the function compare of glibc's elf/cache.c. Of entries with one name, those from glibc-hwcaps
// directories come first: the loader stops at the first other entry.
func compareEntries(a, b Entry) int {
	rank := func(e Entry) int {
		if e.isHWCap() {
			return 0
		}
		return 1
	}
	return cmp.Or(compareNames(b.Name, a.Name), cmp.Compare(b.Flags, a.Flags), rank(a)-rank(b))
}
