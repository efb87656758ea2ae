package wake

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestWaitsOfAllIntervalsEndTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, at := range []time.Duration{0, time.Nanosecond, time.Second, Tick - time.Nanosecond, 7 * time.Second} {
			time.Sleep(at)
			for _, interval := range []time.Duration{Tick, 2 * Tick, time.Minute} {
				wait := Next(interval)
				if wait <= 0 || wait > interval {
					t.Errorf("%v after the last moment the next one is %v away, want at most %v", at, wait, interval)
				}
				if off := time.Now().Add(wait).UnixNano() % int64(Tick); off != 0 {
					t.Errorf("a wait for a multiple of %v ends %v after a tick", interval, time.Duration(off))
				}
			}
		}
	})
}
