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

// TestNoDamageIsSilent damages a file in many ways. What is read is either all of it, or the damage is noticed. Then no
// device is held twice, and no placement is there that never was. A file whose damage is not noticed can be used.
func TestNoDamageIsSilent(t *testing.T) {
	for name, c := range map[string]struct{ pods, flips int }{
		"over a hundred pods":           {120, 300},
		"four pods, in one page":        {4, 300},
		"no pods, in the parent's page": {0, 300},
	} {
		t.Run(name, func(t *testing.T) {
			d := damager{
				history: makeHistory(t, c.pods),
				random:  rand.New(rand.NewPCG(1, 2)),
			} //nolint:gosec // repeatable
			if *everyByte {
				for at := range d.data {
					d.flip(t, at, false)
				}
			}
			for range c.flips {
				d.flip(t, d.random.IntN(len(d.data)), false)
			}
			for page := range len(d.data) / pageSize {
				d.damagePage(t, page)
			}
			t.Logf("%d pages, %d pods: %d damages changed nothing, %d were noticed", len(d.data)/pageSize, len(d.want),
				d.silent, d.noticed)
			// If all or none were noticed, the test would damage the wrong bytes.
			if d.silent < 100 || d.noticed < 100 {
				t.Errorf("%d damages changed nothing, %d were noticed", d.silent, d.noticed)
			}
		})
	}
}

// damager damages a file.
type damager struct {
	*history
	random          *rand.Rand
	silent, noticed int
}

// try reads damaged data. A sample of those whose damage is not noticed is used, or all.
func (d *damager) try(t *testing.T, what string, data []byte, all bool) {
	t.Helper()
	if d.check(t, what, data) {
		d.noticed++
		return
	}
	d.silent++
	if all || d.random.IntN(30) == 0 {
		d.use(t, what, data)
	}
}

func (d *damager) flip(t *testing.T, at int, all bool) {
	t.Helper()
	data := slices.Clone(d.data)
	data[at] ^= 1 << d.random.IntN(8)
	d.try(t, fmt.Sprintf("a flipped bit in byte %d", at), data, all)
}

func (d *damager) damagePage(t *testing.T, page int) {
	t.Helper()
	start := page * pageSize
	d.try(t, fmt.Sprintf("the end of the file at page %d", page), d.data[:start], true)
	d.try(t, fmt.Sprintf("the end of the file in page %d", page), d.data[:start+d.random.IntN(pageSize)], true)
	with := func(content []byte) []byte {
		data := slices.Clone(d.data)
		copy(data[start:][:pageSize], content)
		return data
	}
	d.try(t, fmt.Sprintf("page %d has zeros", page), with(make([]byte, pageSize)), false)
	other := d.random.IntN(len(d.data) / pageSize)
	d.try(t, fmt.Sprintf("page %d is as page %d", page, other), with(d.data[other*pageSize:]), false)
	if page > 1 && start < len(d.old) { // an old meta page is an old file
		d.try(t, fmt.Sprintf("page %d is an old one", page), with(d.old[start:]), false)
	}
	// The first bytes say what the others are, and the keys of a branch page are not in a record with a checksum.
	if d.data[start+8] == branchPage {
		for range 40 {
			d.flip(t, start+d.random.IntN(pageSize), true)
		}
	}
	small := len(d.data) < 10*pageSize
	for at := range 5 * elementSize {
		if small || d.random.IntN(4) == 0 {
			d.flip(t, start+at, small)
		}
	}
}

// history is a file with all placements that were ever in it.
type history struct {
	data, old []byte // the file now, and some changes before
	want      []model.Placement
	ever      map[string][]model.Placement // by UID
}

func makeHistory(t *testing.T, pods int) *history {
	t.Helper()
	path := filepath.Join(t.TempDir(), "state.db")
	s, _, err := Open(path, Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	s.db.NoSync = true // no power cut here
	h := &history{ever: map[string][]model.Placement{}}
	for i := range pods {
		h.put(t, s, testPlacement(i))
		if i%5 == 4 {
			h.remove(t, s, i-2)
		}
		if i%7 == 6 {
			ended := testPlacement(i)
			ended.Ended = []string{"main"}
			h.put(t, s, ended)
		}
		if i == pods-20 {
			h.old = read(t, path)
		}
	}
	// Devices of pods that are gone are given to others.
	for i := 2; i < pods-2; i += 10 {
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
	defer func() {
		if t.Failed() {
			t.Logf("the damage was %s", what)
		}
	}()
	used := &history{want: slices.Clone(h.want), ever: map[string][]model.Placement{}}
	large := testPlacement(999) // moves a small bucket to pages of its own
	large.Allocations[0].Response = make([]byte, 2*pageSize)
	used.put(t, s, large)
	for i := range 150 {
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
