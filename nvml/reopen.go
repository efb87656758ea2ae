package nvml

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// The library is opened again for the same GPU after minReopenPause, then after pauses that double. While it is closed,
// no events of any GPU are received.
const (
	minReopenPause = 10 * time.Second
	maxReopenPause = 10 * time.Minute
)

// reopenings are the GPUs for which the library is to be opened again, and when. A GPU is forgotten when it has not
// needed that for maxReopenPause: one that works for some seconds each time begins no new pauses.
type reopenings struct {
	first time.Duration // the pause before the first time

	mu   sync.Mutex
	gpus map[string]*reopening // by PCI address
}

type reopening struct {
	wanted    bool          // want was called since done or clear
	last      time.Time     // when it was last wanted
	notBefore time.Time     // when it may be done
	pause     time.Duration // the last one
}

// want notes that the library is to be opened again for a GPU. It reports whether that is new, and due now.
func (r *reopenings) want(gpu string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(r.gpus, func(_ string, g *reopening) bool { return now.Sub(g.last) > maxReopenPause })
	g := r.gpus[gpu]
	if g == nil {
		g = &reopening{notBefore: now.Add(r.first), pause: r.first}
		if r.gpus == nil {
			r.gpus = map[string]*reopening{}
		}
		r.gpus[gpu] = g
	}
	before := g.wanted
	g.wanted, g.last = true, now
	return !before && !now.Before(g.notBefore)
}

// due reports whether the library is to be opened again now.
func (r *reopenings) due() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.gpus {
		if g.wanted && !time.Now().Before(g.notBefore) {
			return true
		}
	}
	return false
}

// keep forgets all but these GPUs: one that has gone needs no pauses when it comes back.
func (r *reopenings) keep(gpus []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.gpus, func(address string, _ *reopening) bool { return !slices.Contains(gpus, address) })
}

// clear forgets what is wanted, but not the pauses.
func (r *reopenings) clear() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.gpus {
		g.wanted = false
	}
}

// done notes that the library was closed, for all that wanted it.
func (r *reopenings) done() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.gpus {
		if g.wanted {
			g.pause = min(max(2*g.pause, minReopenPause), maxReopenPause)
			g.wanted, g.notBefore = false, time.Now().Add(g.pause)
		}
	}
}
