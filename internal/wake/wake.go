// Package wake wakes a waiting goroutine: from another goroutine, when a directory changes, or when work that repeats
// is due. Waking never blocks.
package wake

// Chan wakes the one goroutine that receives from it. Make it with New.
type Chan chan struct{}

// New returns a Chan with room for one wake-up.
func New() Chan { return make(Chan, 1) }

// Wake wakes the receiver, or makes its next receive return at once. It never blocks. Several calls before a receive
// count as one.
func (c Chan) Wake() {
	select {
	case c <- struct{}{}:
	default:
	}
}
