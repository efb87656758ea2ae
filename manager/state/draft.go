package state

import (
	"strings"

	"go.etcd.io/bbolt"
)

// draft is the state with changes that are not durable yet.
type draft struct {
	base    map[string]stored
	changed map[string]*stored // nil for one that was removed
	total   total
	last    uint64 // the last placement's place
}

// apply makes the changes of a batch, and writes the new total.
func (d *draft) apply(b *bbolt.Bucket, batch []*change) error {
	b.FillPercent = fillPercent
	for _, c := range batch {
		for _, u := range c.updates {
			if err := d.applyOne(b, u); err != nil {
				return err
			}
		}
	}
	d.total.tx = uint64(b.Tx().ID())
	value, _ := seal([]byte(keyTotal), d.total.payload())
	return b.Put([]byte(keyTotal), value)
}

func (d *draft) applyOne(b *bbolt.Bucket, u update) error {
	old := d.find(u.identity)
	if u.payload == nil && old == nil {
		return nil
	}
	if old != nil {
		d.total.remove(old.sum)
	}
	if u.payload == nil {
		d.changed[u.identity] = nil
		return b.Delete(old.key)
	}
	return d.put(b, record{u.identity, d.key(u.identity, old), u.payload})
}

func (d *draft) find(identity string) *stored {
	if r, ok := d.changed[identity]; ok {
		return r
	}
	if r, ok := d.base[identity]; ok {
		return &r
	}
	return nil
}

// key returns the key of a record: that of the one that it replaces, or the next place.
func (d *draft) key(identity string, old *stored) []byte {
	if old != nil {
		return old.key
	}
	if !strings.HasPrefix(identity, podPrefix) {
		return []byte(identity)
	}
	d.last++
	return placementKey(d.last)
}

func (d *draft) put(b *bbolt.Bucket, r record) error {
	value, sum := seal(r.key, r.payload)
	d.total.add(sum)
	d.changed[r.identity] = &stored{r.key, sum}
	return b.Put(r.key, value)
}

// fill writes the content of a new file.
func (s *Store) fill(c *content) error {
	records, err := c.records()
	if err != nil {
		return err
	}
	d := &draft{changed: make(map[string]*stored, len(records)), last: c.last()}
	err = s.db.Update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucket(bucket)
		if err != nil {
			return err
		}
		b.FillPercent = fillPercent
		for _, r := range records {
			if err := d.put(b, r); err != nil {
				return err
			}
		}
		return d.apply(b, nil)
	})
	if err == nil {
		s.accept(d)
	}
	return err
}
