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
// driver than all else, so nobody waits for it, however long the driver takes: each look at the GPUs has the links that
// were last read.
func (s *service) links(ctx context.Context) error {
	t := time.NewTicker(linksInterval)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(linksDelay):
	}
	told := map[string]bool{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.unlinked:
		case <-t.C:
		}
		changed, err := s.driver.readLinks(ctx)
		switch {
		case errors.Is(err, errReopened):
			s.askForLinks()
		case err != nil && ctx.Err() == nil:
			s.app.log.Warn("GPUs whose links are unknown are taken to be connected alike", "error", err)
		case changed:
			s.inv.Kick()
		}
		told = s.tellUnread(told)
	}
}

// tellUnread says which GPUs' links cannot be read, once for as long as that lasts.
func (s *service) tellUnread(told map[string]bool) map[string]bool {
	now := map[string]bool{}
	for uuid, why := range s.driver.unread() {
		if now[uuid] = true; !told[uuid] {
			s.app.log.Warn("a GPU whose links cannot be read is taken to be connected like the others", "gpu", uuid, "error", why)
		}
	}
	return now
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
		s.askForLinks()
	}
}

func (s *service) askForLinks() {
	select {
	case s.unlinked <- struct{}{}:
	default: // they are asked for already
	}
}

// readLinks reads how the GPUs are linked, for later snapshots, and reports whether that is new.
func (d *nodeDriver) readLinks(ctx context.Context) (changed bool, err error) {
	var read *gpu.Snapshot
	err = d.use(ctx, func(ctx context.Context, lib *nvml.Library) error {
		s, err := lib.Snapshot(ctx, d.host)
		if errors.Is(err, nvml.ErrNoDevices) {
			err = nil
		}
		read = s
		return err
	})
	if err != nil {
		return false, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	changed = d.linked == nil || !reflect.DeepEqual(d.linked.Links, read.Links)
	d.linked = read
	return changed, nil
}

// unread are the GPUs, by UUID, that answer, but not when they are asked for their links, and why.
func (d *nodeDriver) unread() map[string]string {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := map[string]string{}
	if d.linked == nil || d.looked == nil {
		return all
	}
	for i := range min(len(d.linked.Devices), len(d.looked.Devices)) {
		then, now := &d.linked.Devices[i], &d.looked.Devices[i]
		same := then.UUID == "" || then.UUID == now.UUID // a GPU may have another index since
		if same && !then.Usable() && now.Usable() {
			all[now.UUID] = then.Error
		}
	}
	return all
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
