package ldcache

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
)

// sample uses every part of the format: several ABIs and hwcaps of one name, a name that its path does not end with, a
// path with two names.
func sample() *Cache {
	return &Cache{
		Entries: []Entry{
			{Name: "libz.so.1", Path: "/lib/libz.so.1", Flags: FlagsX8664},
			{Name: "libfoo.so.10", Path: "/lib/libfoo.so.10", Flags: FlagsX8664},
			{
				Name: "libfoo.so.9", Path: "/lib/glibc-hwcaps/x86-64-v3/libfoo.so.9", Flags: FlagsX8664,
				HWCap: 1<<62 | 3<<32 | 1,
			},
			{Name: "libfoo.so.9", Path: "/lib/libfoo.so.9.1", Flags: FlagsX8664},
			{Name: "libfoo.so.9", Path: "/lib32/libfoo.so.9", Flags: 3, OSVersion: 0x020620},
			{Name: "libfoo.so", Path: "/lib/libfoo.so.9.1", Flags: FlagsX8664},
		},
		HWCaps:    []string{"x86-64-v2", "x86-64-v3"},
		Generator: "ldconfig (GNU libc) stable release version 2.36",
	}
}

func TestParseDecodesMarshal(t *testing.T) {
	for name, c := range map[string]*Cache{
		"everything":            sample(),
		"no entry":              {Entries: []Entry{}},
		"no extension":          {Entries: sample().Entries[:2]},
		"a generator only":      {Entries: sample().Entries[:2], Generator: "x"},
		"hardware names only":   {Entries: sample().Entries, HWCaps: []string{"x86-64-v2"}},
		"a name without a path": {Entries: []Entry{{Name: "libx.so", Flags: 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			data := c.Marshal()
			got, err := Parse(data)
			testenv.Must(t, err)
			if diff := cmp.Diff(c, got); diff != "" {
				t.Errorf("Parse(Marshal()) (-want +got):\n%s", diff)
			}
			if !bytes.Equal(got.Marshal(), data) {
				t.Error("marshalling again gives other bytes")
			}
		})
	}
}

func TestMarshalSorts(t *testing.T) {
	want := sample().Entries
	for i := range want {
		c := &Cache{Entries: slices.Concat(want[i:], want[:i])}
		before := slices.Clone(c.Entries)
		got, err := Parse(c.Marshal())
		testenv.Must(t, err)
		if diff := cmp.Diff(want, got.Entries); diff != "" {
			t.Errorf("rotated by %d (-want +got):\n%s", i, diff)
		}
		if !slices.Equal(before, c.Entries) {
			t.Error("Marshal changed the cache")
		}
	}
}

func TestCompare(t *testing.T) {
	// Ascending; every name is less than all that follow it.
	names := []string{
		"", "-", "a", "aa", "lib.so", "liba", "libcuda.so", "libcuda.so.", "libcuda.so.1", "libcuda.so.1.0",
		"libcuda.so.1x", "libcuda.so.2", "libcuda.so.10",
		"lib0", "lib0a", "lib0a0", "lib0a1", "lib2", "lib2a", "lib10", "1",
	}
	for i, a := range names {
		for j, b := range names {
			if got := compareNames(a, b); sign(got) != sign(i-j) {
				t.Errorf("compareNames(%q, %q) = %d, want the sign of %d", a, b, got, i-j)
			}
		}
	}
	for a, b := range map[string]string{
		"libx.so.01": "libx.so.1", "libx.so.0": "libx.so.000", "lib00a": "lib0a", "0": "00",
	} {
		if n := compareNames(a, b); n != 0 {
			t.Errorf("compareNames(%q, %q) = %d, want 0, since leading zeros do not matter", a, b, n)
		}
	}
}

func sign(n int) int {
	switch {
	case n < 0:
		return -1
	case n > 0:
		return 1
	}
	return 0
}

func TestPrepend(t *testing.T) {
	c := sample()
	c.Prepend(
		Entry{Name: "libfoo.so.9", Path: "/driver/libfoo.so.9", Flags: FlagsX8664},
		Entry{Name: "libfoo.so.9", Path: "/later/libfoo.so.9", Flags: FlagsX8664},
		Entry{Name: "libz.so.1", Path: "/driver/libz.so.1", Flags: FlagsX8664},
	)
	want := []Entry{
		{Name: "libz.so.1", Path: "/driver/libz.so.1", Flags: FlagsX8664},
		{Name: "libfoo.so.10", Path: "/lib/libfoo.so.10", Flags: FlagsX8664},
		{Name: "libfoo.so.9", Path: "/driver/libfoo.so.9", Flags: FlagsX8664},
		{Name: "libfoo.so.9", Path: "/lib32/libfoo.so.9", Flags: 3, OSVersion: 0x020620},
		{Name: "libfoo.so", Path: "/lib/libfoo.so.9.1", Flags: FlagsX8664},
	}
	if diff := cmp.Diff(want, c.sorted()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestDropInvalid(t *testing.T) {
	c := sample()
	if n := c.DropInvalid(); n != 0 || !cmp.Equal(c, sample()) {
		t.Errorf("%d entries of a usual cache were dropped: %s", n, cmp.Diff(sample(), c))
	}
	odd := []Entry{{Name: "libx.so.1", Path: "/opt/a/../b/libx.so.1"}, {Name: "lib x+ü.so", Path: "//lib/lib x+ü.so"}}
	c.Entries = slices.Concat(odd, []Entry{
		{Name: "", Path: "/lib/x"},
		{Name: "a/b", Path: "/lib/b"},
		{Name: "lib\nx", Path: "/lib/x"},
		{Name: "lib\x7f", Path: "/lib/x"},
		{Name: "libx", Path: ""},
		{Name: "libx", Path: "lib/x"},
		{Name: "libx", Path: "/lib/\tx"},
	})
	c.HWCaps, c.Generator = []string{"x86-64-v2", "pass/word", "x86-64-v3", "a\nb"}, "a\x01b"
	if n := c.DropInvalid(); n != 7 || !slices.Equal(c.Entries, odd) {
		t.Errorf("%d entries were dropped, want 7, and %v are left", n, c.Entries)
	}
	if want := []string{"x86-64-v2", "", "x86-64-v3", ""}; !slices.Equal(c.HWCaps, want) || c.Generator != "" {
		t.Errorf("hardware names %q and generator %q are left, want %q and none", c.HWCaps, c.Generator, want)
	}
}

func TestLookup(t *testing.T) {
	c := sample()
	if got, ok := c.Lookup("libfoo.so.9", FlagsX8664); got != "/lib/libfoo.so.9.1" || !ok {
		t.Errorf("got %q, %v, want the library that every machine can use", got, ok)
	}
	if got, ok := c.Lookup("libfoo.so.9", FlagsAArch64); ok {
		t.Errorf("found %q for another architecture", got)
	}
}

func TestParseBehindTheOldLayout(t *testing.T) {
	noExtension := &Cache{Entries: sample().Entries}
	for entries := range 4 { // with and without padding in front of the new header
		both := le.AppendUint32([]byte(magicOld+"\x00"), uint32(entries))
		both = append(both, make([]byte, (entries*entryOld+7)&^7)...)
		c, err := Parse(append(both, noExtension.Marshal()...))
		testenv.Must(t, err)
		if diff := cmp.Diff(noExtension.Entries, c.Entries); diff != "" {
			t.Errorf("new behind %d old entries (-want +got):\n%s", entries, diff)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	change := func(at int, n uint32) []byte {
		data := sample().Marshal()
		le.PutUint32(data[at:], n)
		return data
	}
	extension := int(le.Uint32(sample().Marshal()[extensionAt:]))
	noExtension := (&Cache{Entries: sample().Entries}).Marshal()
	long := &Cache{Entries: []Entry{{Name: strings.Repeat("x", maxName+1)}}}
	for name, data := range map[string][]byte{
		"nothing":                            nil,
		"another file":                       []byte("#!/bin/sh\n"),
		"the magic only":                     []byte(magicNew),
		"the old magic only":                 []byte(magicOld),
		"a truncated header":                 sample().Marshal()[:headerNew-1],
		"truncated entries":                  sample().Marshal()[:headerNew+entryNew],
		"truncated strings":                  sample().Marshal()[:headerNew+7*entryNew],
		"a truncated extension":              sample().Marshal()[:extension+12],
		"more entries than fit":              change(countAt, 7e4),
		"more entries than the limit":        change(countAt, MaxEntries+1),
		"a count that overflows":             change(countAt, 0xffffffff),
		"a name past the end":                change(headerNew+4, 0xfffffff0),
		"a path past the end":                change(headerNew+8, 0xfffffff0),
		"another byte order":                 change(flagsAt, 3),
		"an extension past the end":          change(extensionAt, 0xfffffffe),
		"an extension with another magic":    change(extension, 1),
		"too many sections":                  change(extension+4, 1000),
		"a section past the end":             change(extension+8+8, 0xfffffff0),
		"hardware names of odd length":       change(extension+8+sectionSize+12, 3),
		"a hardware name past the end":       change(len(sample().Marshal())-4, 0xfffffff0),
		"a name longer than a file name":     long.Marshal(),
		"a string without an end":            noExtension[:len(noExtension)-1],
		"the old layout only":                []byte(magicOld + "\x00\x00\x00\x00\x00"),
		"an old cache with too many entries": []byte(magicOld + "\x00\xff\xff\xff\x7f"),
		"too large":                          make([]byte, MaxSize+1),
		"strings that overlap":               overlapping(5000),
	} {
		t.Run(name, func(t *testing.T) {
			c, err := Parse(data)
			if !errors.Is(err, errFormat) || c != nil {
				t.Errorf("got %v and error %v, want errFormat only", c, err)
			}
		})
	}
}

// overlapping returns a cache of n entries whose paths are suffixes of one string.
func overlapping(n int) []byte {
	path := strings.Repeat("/", maxPath)
	data := (&Cache{Entries: slices.Repeat([]Entry{{Name: "libx.so", Path: path}}, n)}).Marshal()
	for i := range n {
		raw := data[headerNew+i*entryNew+8:]
		le.PutUint32(raw, le.Uint32(raw)+uint32(i%100))
	}
	return data
}

func FuzzParse(f *testing.F) {
	f.Add(sample().Marshal())
	f.Add(append([]byte(magicOld+"\x00\x00\x00\x00\x00"), sample().Marshal()...))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse(data)
		if (c == nil) == (err == nil) {
			t.Fatalf("got %v and error %v, want exactly one", c, err)
		}
		if err != nil {
			return
		}
		again := c.Marshal()
		if len(again) > MaxSize {
			return // names may share any bytes of a string; Marshal shares only whole strings and suffixes
		}
		c2, err := Parse(again)
		if err != nil {
			t.Fatalf("the output of Marshal: %v", err)
		}
		if !bytes.Equal(c2.Marshal(), again) {
			t.Error("marshalling the output again gives other bytes")
		}
	})
}

func BenchmarkParseAndMarshal(b *testing.B) {
	c := &Cache{Entries: make([]Entry, 0, 1000)}
	for i := range 1000 {
		name := "libsomething" + strings.Repeat("x", i%20) + ".so." + string(rune('0'+i%10))
		c.Entries = append(c.Entries, Entry{Name: name, Path: "/usr/lib/x86_64-linux-gnu/" + name, Flags: FlagsX8664})
	}
	data := c.Marshal()
	for b.Loop() {
		c, err := Parse(data)
		testenv.Must(b, err)
		c.Prepend(Entry{Name: "libcuda.so.1", Path: "/usr/lib/libcuda.so.580", Flags: FlagsX8664})
		c.Marshal()
	}
}
