// Package backoff computes the pauses between attempts that fail: they double up to a limit.
package backoff

import "time"

// Backoff computes pauses that double from First to Last.
type Backoff struct {
	First, Last time.Duration
	// Steady is how long a success must last for the pause after it to be First again.
	Steady time.Duration

	next time.Duration
}

// After returns the pause that follows an attempt which succeeded for a time, or for 0 failed.
func (b *Backoff) After(success time.Duration) time.Duration {
	if success >= b.Steady {
		b.Reset()
	}
	pause := max(b.next, b.First)
	b.next = min(2*pause, b.Last)
	return pause
}

// Reset makes the next pause First.
func (b *Backoff) Reset() { b.next = 0 }
