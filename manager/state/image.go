package state

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
)

// bbolt trusts its file: a damaged one makes it panic in a goroutine of its own, loop, or write over pages that are in
// use. So bbolt opens a file only after everything that it relies on was verified here, by bbolt's format:
// https://pkg.go.dev/go.etcd.io/bbolt/internal/common.
const (
	pageSize       = 4096
	pageHeaderSize = 16 // id, flags, count, overflow
	elementSize    = 16 // of branch and leaf pages

	branchPage = 1
	leafPage   = 2
	bucketFlag = 1

	metaMagic   = 0xED0CDAED
	metaVersion = 2
	metaSumAt   = 56
	noFreeList  = 1<<64 - 1
)

// image is the bytes of a file, and what is wrong with them.
type image struct {
	data    []byte
	visited []bool // by page
	end     uint64 // the first page that was never used
	// lastKey is the key of the last leaf element, and branchKey that of the last branch element. bbolt finds a page in
	// its branch page by its first key, so both have the same.
	lastKey, branchKey []byte
	damage             error
}

func newImage(data []byte) *image {
	return &image{data: data, visited: make([]bool, len(data)/pageSize)}
}

// damaged keeps the first damage, which is what others follow from.
func (m *image) damaged(format string, args ...any) {
	if m.damage == nil {
		m.damage = fmt.Errorf(format, args...)
	}
}

// meta is the root of a file's pages, as the last change has left it.
type meta struct {
	root, freeList uint64
	end            uint64
	txid           uint64
}

// meta returns the newest meta page. bbolt goes back to the other one if that is damaged, which would lose the last
// change without a word.
func (m *image) meta() (newest meta, ok bool) {
	for i := range uint64(2) {
		found, err := parseMeta(m.page(i))
		if err == nil && found.txid%2 != i {
			err = errors.New("it is that of another page")
		}
		if err != nil {
			m.damaged("page %d: %w", i, err)
			continue
		}
		if !ok || found.txid > newest.txid {
			newest, ok = found, true
		}
	}
	if ok && newest.freeList != noFreeList {
		m.damaged("another program has written it")
	}
	if newest.end > uint64(len(m.visited)) {
		m.damaged("it has %d pages of %d", len(m.visited), newest.end)
	}
	m.end = min(newest.end, uint64(len(m.visited)))
	return newest, ok
}

func parseMeta(page []byte) (meta, error) {
	if page == nil {
		return meta{}, errors.New("it is missing")
	}
	page = page[pageHeaderSize:]
	if binary.NativeEndian.Uint32(page) != metaMagic {
		return meta{}, errors.New("it is not that of a bbolt database")
	}
	h := fnv.New64a()
	_, _ = h.Write(page[:metaSumAt]) // never fails
	if binary.NativeEndian.Uint64(page[metaSumAt:]) != h.Sum64() {
		return meta{}, errors.New("its checksum is wrong")
	}
	if v := binary.NativeEndian.Uint32(page[4:]); v != metaVersion {
		return meta{}, fmt.Errorf("%w: bbolt's format is %d, the known one is %d", ErrNewer, v, metaVersion)
	}
	if size := binary.NativeEndian.Uint32(page[8:]); size != pageSize {
		return meta{}, fmt.Errorf("its pages have %d bytes, not %d", size, pageSize)
	}
	number := func(at int) uint64 { return binary.NativeEndian.Uint64(page[at:]) }
	return meta{root: number(16), freeList: number(32), end: number(40), txid: number(48)}, nil
}

// page returns the bytes from a page to the end of the file, or nil if it is not in the file.
func (m *image) page(id uint64) []byte {
	if id >= uint64(len(m.data)/pageSize) {
		return nil
	}
	return m.data[id*pageSize:]
}

// element is a key of a page with its value, or with the page below it.
type element struct {
	key, value []byte
	child      uint64
	flags      uint32
}

// walk calls leaf for the elements of the leaf pages below a page, in their order. Each page is visited once, so that
// the walk ends whatever the pages say.
func (m *image) walk(id uint64, leaf func(element)) {
	page := m.page(id)
	if page == nil || binary.NativeEndian.Uint64(page) != id {
		m.damaged("page %d is missing", id)
		return
	}
	count := 1 + uint64(binary.NativeEndian.Uint32(page[12:])) // a large record needs more than one
	for i := id; i < id+count; i++ {
		if i >= m.end || m.visited[i] {
			m.damaged("page %d is missing", i)
			return
		}
		m.visited[i] = true
	}
	m.walkElements(page[:count*pageSize], leaf)
}

func (m *image) walkElements(page []byte, leaf func(element)) {
	elements, branch, err := parseElements(page)
	if err != nil {
		m.damaged("page %d: %w", binary.NativeEndian.Uint64(page), err)
	}
	for i, e := range elements {
		if i == 0 && m.branchKey != nil && !bytes.Equal(e.key, m.branchKey) ||
			m.lastKey != nil && bytes.Compare(e.key, m.lastKey) <= 0 {
			m.damaged("page %d: its records are not in order", binary.NativeEndian.Uint64(page))
		}
		if branch {
			m.branchKey = e.key
			m.walk(e.child, leaf)
		} else {
			m.lastKey = e.key
			leaf(e)
		}
	}
}

// parseElements returns the elements of a page that are whole. Others are an error.
func parseElements(page []byte) (elements []element, branch bool, err error) {
	flags, count := binary.NativeEndian.Uint16(page[8:]), int(binary.NativeEndian.Uint16(page[10:]))
	if flags != branchPage && flags != leafPage {
		return nil, false, fmt.Errorf("it has the type %#x", flags)
	}
	if pageHeaderSize+count*elementSize > len(page) {
		return nil, false, fmt.Errorf("it cannot have %d records", count)
	}
	branch = flags == branchPage
	for i := range count {
		at := page[pageHeaderSize+i*elementSize:]
		e, ok := parseElement(at, branch)
		if !ok {
			err = errors.Join(err, fmt.Errorf("record %d is not within it", i))
			continue
		}
		elements = append(elements, e)
	}
	return elements, branch, err
}

func parseElement(at []byte, branch bool) (e element, ok bool) {
	number := func(i int) uint64 { return uint64(binary.NativeEndian.Uint32(at[4*i:])) }
	var pos, keySize, valueSize uint64
	if branch {
		pos, keySize, e.child = number(0), number(1), binary.NativeEndian.Uint64(at[8:])
	} else {
		e.flags, pos, keySize, valueSize = uint32(number(0)), number(1), number(2), number(3)
	}
	if pos+keySize+valueSize > uint64(len(at)) {
		return element{}, false
	}
	e.key, e.value = at[pos:pos+keySize], at[pos+keySize:pos+keySize+valueSize]
	return e, true
}

// walkBucket calls leaf for the elements of the bucket.
func (m *image) walkBucket(root uint64, leaf func(element)) {
	found := false
	m.walk(root, func(e element) {
		if !bytes.Equal(e.key, bucket) || e.flags != bucketFlag || len(e.value) < elementSize || found {
			m.damaged("the database has other content")
			return
		}
		found = true
		m.lastKey, m.branchKey = nil, nil // of the database's buckets, of which there is one
		if child := binary.NativeEndian.Uint64(e.value); child != 0 {
			m.walk(child, leaf)
			return
		}
		// A small bucket has its page in the value, without a number and more pages.
		inline := e.value[elementSize:]
		if len(inline) < pageHeaderSize || binary.NativeEndian.Uint64(inline) != 0 ||
			binary.NativeEndian.Uint32(inline[12:]) != 0 {
			m.damaged("the page of the placements is missing")
			return
		}
		m.walkElements(inline, leaf)
	})
	if !found {
		m.damaged("the database has no placements")
	}
}
