package dra

import (
	"sync"

	"gpu-cdi-plugin/node"
)

// published is the last state of the node. Its methods may be called concurrently.
type published struct {
	mu      sync.Mutex
	state   *node.State   // nil before the first one
	changed chan struct{} // closed and replaced when the state is
}

func newPublished() *published { return &published{changed: make(chan struct{})} }

// set replaces the state.
func (p *published) set(s *node.State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state = s
	close(p.changed)
	p.changed = make(chan struct{})
}

// get returns the state, or nil, and a channel that is closed when there is another one.
func (p *published) get() (s *node.State, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state, p.changed
}
