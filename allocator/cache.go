package allocator

import (
	"hash/maphash"
	"sync/atomic"
)

// cacheSlots is how many answers a Node remembers at most.
const cacheSlots = 64

// question is what an answer depends on, besides the node.
type question struct {
	policy Policy
	query  query
	k      int
}

type answer struct {
	question
	all []found
}

// cache remembers some answers. A slot holds the last that fell to it; nobody waits for anybody.
type cache struct {
	seed  maphash.Seed
	slots [cacheSlots]atomic.Pointer[answer]
}

func (c *cache) slot(q question) *atomic.Pointer[answer] {
	return &c.slots[maphash.Comparable(c.seed, q)%cacheSlots]
}

// get returns the answer, which must not be changed, or nil.
func (c *cache) get(q question) []found {
	if a := c.slot(q).Load(); a != nil && a.question == q {
		return a.all
	}
	return nil
}

func (c *cache) put(q question, all []found) { c.slot(q).Store(&answer{q, all}) }
