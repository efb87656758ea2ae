package state

import (
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"gpu-cdi-plugin/manager/model"
)

// With -args -every-byte each byte of the file is tried, and not a sample.
var everyByte = flag.Bool("every-byte", false, "damage each byte of a state file")

// TestNoDamageIsSilent damages the file of some hundred pods in many ways. What is read is either all of it, or the
// damage is noticed. Then no device is held twice, and no placement is there that never was.
func TestNoDamageIsSilent(t *testing.T) {
	h := makeHistory(t)
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same damage in each run
	silent, noticed := 0, 0
	try := func(what string, data []byte) {
		t.Helper()
		if h.check(t, what, data) {
			noticed++
		} else {
			silent++
			if random.IntN(10) == 0 {
				h.use(t, what, data)
			}
		}
	}
	flip := func(at int) {
		data := slices.Clone(h.data)
		data[at] ^= 1 << random.IntN(8)
		try(fmt.Sprintf("a flipped bit in byte %d", at), data)
	}
	if *everyByte {
		for at := range h.data {
			flip(at)
		}
	}
	for range 2000 {
		flip(random.IntN(len(h.data)))
	}
	// The first bytes of a page say what the others are.
	for page := range len(h.data) / pageSize {
		for range 8 {
			flip(page*pageSize + random.IntN(3*elementSize))
		}
	}
	for page := range len(h.data) / pageSize {
		try(fmt.Sprintf("the end of the file at page %d", page), h.data[:page*pageSize])
		try(fmt.Sprintf("the end of the file in page %d", page), h.data[:page*pageSize+random.IntN(pageSize)])
		data := slices.Clone(h.data)
		clear(data[page*pageSize:][:pageSize])
		try(fmt.Sprintf("page %d has zeros", page), data)
		other := random.IntN(len(h.data) / pageSize)
		copy(data[page*pageSize:][:pageSize], h.data[other*pageSize:])
		try(fmt.Sprintf("page %d has the content of page %d", page, other), data)
		if old := h.old[min(page*pageSize, len(h.old)):]; page > 1 && len(old) >= pageSize {
			copy(data[page*pageSize:][:pageSize], old)
			try(fmt.Sprintf("page %d has its content of an earlier time", page), data)
		}
	}
	t.Logf("%d pages, %d pods: %d damages changed nothing, %d were noticed", len(h.data)/pageSize, len(h.want), silent,
		noticed)
	// If nothing or all were noticed, the test would damage the wrong bytes.
	if silent == 0 || noticed < 1000 {
		t.Errorf("%d damages changed nothing, %d were noticed", silent, noticed)
	}
}

// history is a file with all placements that were ever in it.
type history struct {
	data, old []byte // the file now, and some changes before
	want      []model.Placement
	ever      map[string][]model.Placement // by UID
}

func makeHistory(t *testing.T) *history {
	t.Helper()
	path := filepath.Join(t.TempDir(), "state.db")
	s, _, err := Open(path, Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	s.db.NoSync = true // no power cut here
	h := &history{ever: map[string][]model.Placement{}}
	for i := range 300 {
		h.put(t, s, testPlacement(i))
		if i%5 == 4 {
			h.remove(t, s, i-2)
		}
		if i%7 == 6 {
			ended := testPlacement(i)
			ended.Ended = []string{"main"}
			h.put(t, s, ended)
		}
		if i == 280 {
			h.old = read(t, path)
		}
	}
	// Devices of pods that are gone are given to others.
	for i := 2; i < 300; i += 10 {
		p := testPlacement(i)
		p.Pod.UID = "second of " + p.Pod.UID
		h.put(t, s, p)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	h.data = read(t, path)
	return h
}

func (h *history) put(t *testing.T, s *Store, p model.Placement) {
	t.Helper()
	if err := s.Put(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	uid := p.Pod.UID
	h.ever[uid] = append(h.ever[uid], p)
	i := slices.IndexFunc(h.want, func(other model.Placement) bool { return other.Pod.UID == uid })
	if i >= 0 {
		h.want[i] = p
	} else {
		h.want = append(h.want, p)
	}
}

func (h *history) remove(t *testing.T, s *Store, i int) {
	t.Helper()
	uid := testPlacement(i).Pod.UID
	if err := s.Delete(t.Context(), uid); err != nil {
		t.Fatal(err)
	}
	h.want = slices.DeleteFunc(h.want, func(p model.Placement) bool { return p.Pod.UID == uid })
}

// check reads a damaged file and reports whether the damage was noticed.
func (h *history) check(t *testing.T, what string, data []byte) bool {
	t.Helper()
	c, err := parse(data)
	got := c.loaded().Placements
	if err == nil {
		if !reflect.DeepEqual(got, h.want) {
			t.Errorf("%s: nothing is said, and %d of %d placements are there", what, len(got), len(h.want))
		}
		return false
	}
	holders := map[device]string{}
	for _, p := range got {
		if !slices.ContainsFunc(h.ever[p.Pod.UID], func(q model.Placement) bool { return reflect.DeepEqual(p, q) }) {
			t.Errorf("%s: there never was the placement %v", what, p)
		}
		for _, d := range heldDevices(&p) {
			if holders[d] != "" {
				t.Errorf("%s: %s has the device %v of %s", what, p.Pod.UID, d, holders[d])
			}
			holders[d] = p.Pod.UID
		}
	}
	return true
}

// use checks that a file without damage that was noticed can be changed.
func (h *history) use(t *testing.T, what string, data []byte) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "state.db")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	s, _, err := Open(path, Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	s.db.NoSync = true
	used := &history{want: slices.Clone(h.want), ever: map[string][]model.Placement{}}
	for i := range 300 {
		if i%3 == 0 {
			used.put(t, s, testPlacement(1000+i))
		} else {
			used.remove(t, s, i)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if used.check(t, what+", then changed", read(t, path)) {
		t.Errorf("%s: then changed, the file is damaged", what)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func testPlacement(i int) model.Placement {
	return model.Placement{
		Pod: model.Pod{UID: fmt.Sprintf("pod-%d", i), Name: "pod"},
		Allocations: []model.Allocation{{
			Container: "main", Resource: "nvidia.com/gpu", IDs: []string{fmt.Sprintf("GPU-%d", i)},
			Response: make([]byte, 300),
		}},
	}
}
