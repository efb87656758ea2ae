package backoff

import (
	"slices"
	"testing"
	"time"
)

func TestPausesDoubleUntilASuccessLasts(t *testing.T) {
	const ms = time.Millisecond
	b := Backoff{First: ms, Last: 5 * ms, Steady: time.Second}
	var got []time.Duration
	for _, success := range []time.Duration{0, 0, 0, 0, 0, 999 * ms, time.Second, 0} {
		got = append(got, b.After(success))
	}
	b.Reset()
	got = append(got, b.After(0))
	if want := []time.Duration{ms, 2 * ms, 4 * ms, 5 * ms, 5 * ms, 5 * ms, ms, 2 * ms, ms}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
