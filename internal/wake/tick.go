package wake

import "time"

// Tick is the shortest interval of work that a service repeats for ever. Others are multiples of it.
const Tick = 2500 * time.Millisecond

// Next returns the time until the clock shows the next multiple of an interval. A service that repeats work waits for
// that, so that all its goroutines wake at the same moments: each moment at which a Go program wakes costs a
// millisecond of processor time, whatever it then does.
func Next(interval time.Duration) time.Duration {
	return interval - time.Duration(time.Now().UnixNano())%interval
}
