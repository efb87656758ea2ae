package admission

import "math/bits"

// bitset is a set of indices.
type bitset []uint64

func newBitset(n int) bitset { return make(bitset, (n+63)/64) }

func (b bitset) add(i int) { b[i/64] |= 1 << (i % 64) }

func (b bitset) remove(i int) { b[i/64] &^= 1 << (i % 64) }

func (b bitset) has(i int) bool { return b[i/64]&(1<<(i%64)) != 0 }

func (b bitset) count() int {
	n := 0
	for _, word := range b {
		n += bits.OnesCount64(word)
	}
	return n
}

// without returns the members of b that are not in c. Both sets have the same size.
func (b bitset) without(c bitset) bitset {
	left := make(bitset, len(b))
	for i := range b {
		left[i] = b[i] &^ c[i]
	}
	return left
}

// and returns the members of both b and c, which have the same size.
func (b bitset) and(c bitset) bitset {
	both := make(bitset, len(b))
	for i := range b {
		both[i] = b[i] & c[i]
	}
	return both
}

// addAll adds the members of c to b, which has the same size.
func (b bitset) addAll(c bitset) {
	for i := range b {
		b[i] |= c[i]
	}
}

// members yields the members in ascending order.
func (b bitset) members(yield func(int) bool) {
	for i, word := range b {
		for ; word != 0; word &= word - 1 {
			if !yield(i*64 + bits.TrailingZeros64(word)) {
				return
			}
		}
	}
}
