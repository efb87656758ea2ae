package allocator

import "math/bits"

// set is a set of GPUs, by index.
type set [maxGPUs / 64]uint64

func (s *set) add(g int)          { s[g/64] |= 1 << (g % 64) }
func (s set) contains(g int) bool { return s[g/64]>>(g%64)&1 != 0 }

// word returns the set as bits. There must be at most MaxExact GPUs.
func (s set) word() uint32 { return uint32(s[0]) }

func (s set) len() int {
	n := 0
	for _, w := range s {
		n += bits.OnesCount64(w)
	}
	return n
}

func (s set) intersection(t set) set {
	for i := range s {
		s[i] &= t[i]
	}
	return s
}

func (s set) difference(t set) set {
	for i := range s {
		s[i] &^= t[i]
	}
	return s
}

// before reports whether s contains the first GPU that is in only one of s and t.
func (s set) before(t set) bool {
	for i := range s {
		if differ := s[i] ^ t[i]; differ != 0 {
			return s[i]&(differ&-differ) != 0
		}
	}
	return false
}

// members returns the GPUs in order.
func (s set) members() []int {
	all := make([]int, 0, s.len())
	for i, w := range s {
		for ; w != 0; w &= w - 1 {
			all = append(all, i*64+bits.TrailingZeros64(w))
		}
	}
	return all
}
