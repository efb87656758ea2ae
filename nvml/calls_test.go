package nvml

import (
	"context"
	"sync"
	"testing"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// The number of driver calls is what the package's documentation says.
func TestNumberOfDriverCalls(t *testing.T) {
	if !alone(t) {
		return
	}
	l, h := opened(t, nodeOf(t, "dgx-h100"))
	calls, has := map[string]int{}, l.driver.has
	var mu sync.Mutex
	l.driver.has = func(function string) bool { // is asked before each call
		mu.Lock()
		defer mu.Unlock()
		calls[function]++
		return has(function)
	}
	for name, c := range map[string]struct {
		read func(context.Context, host.Host) (*gpu.Snapshot, error)
		want int
	}{
		"devices": {l.Devices, 3 + 8*8},
		// Of each GPU 18 links and the answer that there is no more, 18 ends of links and four switches; and the pairs.
		"snapshot": {l.Snapshot, 3 + 8*(8+19+18+4) + 28},
	} {
		clear(calls)
		if _, err := c.read(t.Context(), h); err != nil {
			t.Fatal(err)
		}
		total := 0
		for _, n := range calls {
			total += n
		}
		if total != c.want {
			t.Errorf("%s: %d calls, want %d: %v", name, total, c.want, calls)
		}
	}
}
