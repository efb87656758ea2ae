package main

import (
	"context"
	"errors"
	"reflect"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/nvml"
)

// linksInterval is how often links are read if nothing happens: one that fails and one that comes back is not told of.
const linksInterval = 5 * time.Minute

// linksDelay is what the registration has the processors to itself for: it takes a few milliseconds.
const linksDelay = 100 * time.Millisecond

// links reads how the GPUs are linked, when others than before are there and now and then. It takes many more calls of the
// driver than all else, so the start does not wait for it: each look at the GPUs has the links that were last read. A look
// waits while they are read; requests wait for neither.
func (s *service) links(ctx context.Context) error {
	t := time.NewTicker(linksInterval)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(linksDelay):
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.unlinked:
		case <-t.C:
		}
		changed, err := s.driver.readLinks(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			s.app.log.Warn("GPUs whose links are unknown are taken to be connected alike", "error", err)
		case changed:
			s.inv.Kick()
		}
	}
}

// weigh prepares what requests for the best connected GPUs are answered from, and asks for links that are not known.
func (s *service) weigh(snapshot *gpu.Snapshot) {
	node, err := s.node.Load().Renew(snapshot, s.app.plugin.Allocation.Weights)
	if err != nil {
		s.app.log.Error("GPUs are taken to be connected alike", "error", err)
	}
	s.node.Store(node)
	usable := 0
	for i := range snapshot.Devices {
		if snapshot.Devices[i].Usable() {
			usable++
		}
	}
	if len(snapshot.Links) < usable*(usable-1)/2 {
		select {
		case s.unlinked <- struct{}{}:
		default: // they are asked for already
		}
	}
}

// readLinks reads how the GPUs are linked, for later snapshots, and reports whether that is new.
func (d *nodeDriver) readLinks(ctx context.Context) (changed bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.open(ctx); err != nil {
		return false, err
	}
	s, err := d.lib.Snapshot(ctx, d.host)
	if err != nil && !errors.Is(err, nvml.ErrNoDevices) {
		return false, err
	}
	changed = d.linked == nil || !reflect.DeepEqual(d.linked.Links, s.Links)
	d.linked = s
	return changed, nil
}

// linksOf are the links among the snapshot's GPUs, as they were last read. A GPU may have another index since.
func (d *nodeDriver) linksOf(s *gpu.Snapshot) []gpu.Link {
	if d.linked == nil {
		return nil
	}
	before := map[string]int{} // the index of then, by UUID
	for i := range d.linked.Devices {
		if g := &d.linked.Devices[i]; g.Usable() {
			before[g.UUID] = g.Index
		}
	}
	var links []gpu.Link
	for i := range s.Devices {
		for j := i + 1; j < len(s.Devices); j++ {
			a, okA := before[s.Devices[i].UUID]
			b, okB := before[s.Devices[j].UUID]
			if l, ok := d.linked.Link(a, b); okA && okB && ok && s.Devices[i].Usable() && s.Devices[j].Usable() {
				l.A, l.B = s.Devices[i].Index, s.Devices[j].Index
				links = append(links, l)
			}
		}
	}
	return links
}
