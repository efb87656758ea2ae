package hook

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const note575 = `{"Format":1,"CUDA Version":"12.9","Driver":[535,550,560,565,570,575],"Device":[1,2,7]}`

// elfNote is a note section's content.
func elfNote(owner, desc string) []byte {
	le := binary.LittleEndian
	data := le.AppendUint32(nil, uint32(len(owner)+1))
	data = le.AppendUint32(data, uint32(len(desc)))
	data = le.AppendUint32(data, 1)
	data = append(data, owner...)
	for data = append(data, 0); len(data)%4 != 0; {
		data = append(data, 0)
	}
	return append(data, desc...)
}

// elfWith is a minimal ELF file with a section of that name and content.
func elfWith(name string, content []byte) []byte {
	le := binary.LittleEndian
	names := "\x00" + name + "\x00"
	data := make([]byte, 64, 1024)
	copy(data, "\x7fELF\x02\x01\x01")
	data = append(append(data, names...), content...)
	le.PutUint64(data[40:], uint64(len(data)))
	le.PutUint16(data[58:], 64)
	le.PutUint16(data[60:], 3)
	le.PutUint16(data[62:], 1)
	for _, s := range []section{{}, {0, 3, 64, uint64(len(names))}, {1, sectionNote, 64 + uint64(len(names)), uint64(len(content))}} {
		raw := make([]byte, 64)
		le.PutUint32(raw, s.name)
		le.PutUint32(raw[4:], s.kind)
		le.PutUint64(raw[24:], s.offset)
		le.PutUint64(raw[32:], s.size)
		data = append(data, raw...)
	}
	return data
}

func TestReadCompatNote(t *testing.T) {
	got, err := readCompatNote(bytes.NewReader(elfWith(noteSection, elfNote(noteOwner, note575))))
	if err != nil {
		t.Fatal(err)
	}
	want := compatNote{Format: 1, Driver: []int{535, 550, 560, 565, 570, 575}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for driver, want := range map[string]bool{"570.1.2": true, "575.0": true, "580.65.06": false, "57.0": false} {
		v, _ := parseVersion(driver)
		if got.admits(v) != want {
			t.Errorf("admits(%s) = %v, want %v", driver, !want, want)
		}
	}
	got.Format = 2
	if v, _ := parseVersion("570.1"); got.admits(v) {
		t.Error("a note of an unknown format admits")
	}
}

func TestReadCompatNoteRefuses(t *testing.T) {
	good := elfWith(noteSection, elfNote(noteOwner, note575))
	change := func(at int, b ...byte) []byte {
		data := bytes.Clone(good)
		copy(data[at:], b)
		return data
	}
	table := len(good) - 3*64
	for name, data := range map[string][]byte{
		"nothing":                       nil,
		"a script":                      []byte("#!/bin/sh\n" + strings.Repeat("x", 100)),
		"a 32-bit file":                 change(4, 1),
		"another byte order":            change(5, 2),
		"headers of another size":       change(58, 40),
		"too many sections":             change(60, 0xff, 0xff),
		"names past the sections":       change(62, 9),
		"names just past the sections":  change(62, 3),
		"a table past the end":          change(40, 0xff, 0xff, 0xff),
		"a table at a negative offset":  change(40, 0, 0, 0, 0, 0, 0, 0, 0xff),
		"names past the end":            change(table+64+24, 0xff, 0xff, 0xff),
		"huge names":                    change(table+64+32, 0xff, 0xff, 0xff, 0xff),
		"a huge note":                   change(table+128+32, 0xff, 0xff, 0xff, 0xff),
		"a note past the end":           change(table+128+24, 0xff, 0xff, 0xff),
		"a truncated note":              change(table+128+32, 40),
		"a note shorter than its head":  change(table+128+32, 8),
		"a note of somebody else":       elfWith(noteSection, elfNote("GNU", note575)),
		"a note that is not JSON":       elfWith(noteSection, elfNote(noteOwner, "575")),
		"a note with an over-long name": elfWith(noteSection, []byte("\xff\xff\xff\xff\x04\x00\x00\x00\x01\x00\x00\x00NVIDIA")),
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := readCompatNote(bytes.NewReader(data)); err == nil || errors.Is(err, errNoNote) {
				t.Errorf("got %+v, %v, want an error", got, err)
			}
		})
	}
	for name, data := range map[string][]byte{
		"another section": elfWith(".note.gnu", elfNote("GNU", "")),
		"no section":      change(60, 0, 0),
		"another type":    change(table+128+4, 1),
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := readCompatNote(bytes.NewReader(data)); !errors.Is(err, errNoNote) {
				t.Errorf("got %+v, %v, want errNoNote", got, err)
			}
		})
	}
}

func FuzzReadCompatNote(f *testing.F) {
	f.Add(elfWith(noteSection, elfNote(noteOwner, note575)))
	f.Add(elfWith(".note.gnu", elfNote("GNU", "")))
	f.Fuzz(func(t *testing.T, data []byte) {
		note, err := readCompatNote(bytes.NewReader(data))
		if err != nil && note.Driver != nil {
			t.Errorf("got %+v and %v", note, err)
		}
	})
}
