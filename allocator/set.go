package allocator

import "math/bits"

// set is a set of the GPUs of a node, by their places.
type set [MaxGPUs / 64]uint64

func (s *set) add(g int)     { s[g/64] |= 1 << (g % 64) }
func (s *set) remove(g int)  { s[g/64] &^= 1 << (g % 64) }
func (s set) has(g int) bool { return s[g/64]>>(g%64)&1 != 0 }

func (s set) len() int {
	n := 0
	for _, w := range s {
		n += bits.OnesCount64(w)
	}
	return n
}

// word is the set of a node that has a table.
func (s set) word() uint32 { return uint32(s[0]) }

func (s set) with(t set) set {
	for i := range s {
		s[i] |= t[i]
	}
	return s
}

func (s set) and(t set) set {
	for i := range s {
		s[i] &= t[i]
	}
	return s
}

func (s set) without(t set) set {
	for i := range s {
		s[i] &^= t[i]
	}
	return s
}

// before tells which of two sets of the same size has the lower GPUs: the one with the first in which they differ.
func (s set) before(t set) bool {
	for i := range s {
		if differ := s[i] ^ t[i]; differ != 0 {
			return s[i]&(differ&-differ) != 0
		}
	}
	return false
}

// places are the GPUs in order.
func (s set) places() []int {
	all := make([]int, 0, s.len())
	for i, w := range s {
		for ; w != 0; w &= w - 1 {
			all = append(all, i*64+bits.TrailingZeros64(w))
		}
	}
	return all
}

// compress is the set in terms of a part of the node: the GPU at places[i] becomes GPU i.
func (s set) compress(places []int) set {
	var part set
	for i, g := range places {
		if s.has(g) {
			part.add(i)
		}
	}
	return part
}

// expand is what compress was called on.
func (s set) expand(places []int) set {
	var whole set
	for _, i := range s.places() {
		whole.add(places[i])
	}
	return whole
}
