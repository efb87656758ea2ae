package nvml

import (
	"sync"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// The number of driver calls is that of the package's documentation.
func TestNumberOfDriverCalls(t *testing.T) {
	if !runAlone(t) {
		return
	}
	session, _ := openNode(t, createNode(t, "dgx-h100"))
	calls, has := map[string]int{}, session.library.has
	var mu sync.Mutex
	session.library.has = func(function string) bool { // is asked before each call
		mu.Lock()
		defer mu.Unlock()
		calls[function]++
		return has(function)
	}
	for name, c := range map[string]struct {
		read func() error
		want int
	}{
		"devices": {func() error { _, _, err := session.read(t.Context()); return err }, 3 + 8*9},
		// Of each GPU 18 links and the answer that there is no more, 18 ends of links and four switches; and the pairs.
		"topology": {func() error { _, err := session.readTopology(t.Context()); return err }, 3 + 8*(9+19+18+4) + 28},
	} {
		clear(calls)
		testenv.Must(t, c.read())
		total := 0
		for _, n := range calls {
			total += n
		}
		if total != c.want {
			t.Errorf("%s: %d calls, want %d: %v", name, total, c.want, calls)
		}
	}
}
