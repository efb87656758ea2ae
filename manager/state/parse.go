package state

import (
	"cmp"
	"encoding/binary"
	"errors"
	"slices"

	"gpu-cdi-plugin/manager/model"
)

// parse returns the content of a file. If the file is damaged, it is what is readable, with an error that says what is
// wrong. The error wraps ErrNewer for a file that is whole, but of a newer version.
func parse(data []byte) (content, error) {
	m := newImage(data)
	c := content{index: map[string]stored{}}
	var want total
	var newer error
	read := func(e element) {
		payload, sum, ok := unseal(e.key, e.value)
		if !ok || e.flags != 0 {
			m.damaged("the record %q has a wrong checksum", e.key)
			return
		}
		if string(e.key) == keyTotal && len(payload) == 3*sumSize {
			want = parseTotal(payload)
			return
		}
		c.total.add(sum)
		if err := c.read(e.key, payload, sum); errors.Is(err, ErrNewer) {
			newer = err
		} else if err != nil {
			m.damaged("the record %q: %w", e.key, err)
		}
	}
	root, ok := m.meta()
	c.total.tx = root.txid
	if ok {
		m.walkBucket(root.root, read)
	}
	if newer != nil || errors.Is(m.damage, ErrNewer) {
		return content{}, cmp.Or(newer, m.damage)
	}
	if c.total != want || want.count == 0 {
		m.damaged("%d of %d records are readable, of the change %d of %d",
			c.total.count, want.count, want.tx, root.txid)
	}
	if m.damage != nil {
		m.scan(&c)
		c.placements = resolve(c.placements)
	}
	return c, m.damage
}

// scan adds the placements of pages that the walk has not found. Some of them are old: later changes have replaced or
// deleted their placements.
func (m *image) scan(c *content) {
	for id := range uint64(len(m.visited)) {
		page := m.page(id)
		if m.visited[id] || binary.NativeEndian.Uint64(page) != id {
			continue
		}
		elements, branch, _ := parseElements(page)
		for _, e := range elements {
			payload, sum, ok := unseal(e.key, e.value)
			if ok && !branch && len(e.key) == placementKeySize {
				_ = c.read(e.key, payload, sum) // what is unreadable is left out
			}
		}
	}
}

// resolve returns the placements of a damaged file in their order. Of two placements that exclude each other, since
// they are of the same pod or hold the same device, the later stays. Of two versions of a placement, the one that holds
// more devices stays.
func resolve(placements []placement) []placement {
	slices.SortStableFunc(placements, func(a, b placement) int {
		return cmp.Or(cmp.Compare(b.place, a.place), cmp.Compare(len(a.Ended), len(b.Ended)))
	})
	pods, holders := map[string]bool{}, map[device]bool{}
	var kept []placement
	for _, p := range placements {
		held := heldDevices(&p.Placement)
		if pods[p.Pod.UID] || slices.ContainsFunc(held, func(d device) bool { return holders[d] }) {
			continue
		}
		pods[p.Pod.UID] = true
		for _, d := range held {
			holders[d] = true
		}
		kept = append(kept, p)
	}
	slices.Reverse(kept)
	return kept
}

type device struct{ resource, id string }

func heldDevices(p *model.Placement) (held []device) {
	for _, a := range p.Held() {
		for _, id := range a.IDs {
			held = append(held, device{a.Resource, id})
		}
	}
	return held
}
