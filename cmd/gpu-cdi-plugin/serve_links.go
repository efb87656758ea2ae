package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"gpu-cdi-plugin/gpu"
)

// linksInterval is how often links are read if no GPU is new: one that fails and one that comes back is not told of.
const linksInterval = 5 * time.Minute

// nodeLinks is how the GPUs were linked when that was last read.
type nodeLinks struct {
	list  []gpu.Link
	gpus  []string // by index, the UUIDs of those that could be read
	hangs bool     // a call about them had not returned, and nothing was known
	read  time.Time
	// unread are the GPUs, by UUID, of which the driver does not say how they are linked.
	unread map[string]bool
}

// readLinks reads how the GPUs of a snapshot are linked. It takes many more calls of the driver than all else, so that is
// done when there are other GPUs than before, when a call that hung has returned, and now and then.
func (d *nodeDriver) readLinks(ctx context.Context, s *gpu.Snapshot) []gpu.Link {
	gpus := make([]string, len(s.Devices))
	for i := range s.Devices {
		if g := &s.Devices[i]; g.Usable() {
			gpus[i] = g.UUID
		}
	}
	l, now := &d.links, time.Now()
	if slices.Equal(gpus, l.gpus) && now.Sub(l.read) < linksInterval && (!l.hangs || d.lib.Hangs()) {
		return l.list
	}
	list, errs := d.lib.Links(ctx, d.host, s)
	unread := map[string]bool{}
	for i, err := range errs {
		if unread[gpus[i]] = true; !l.unread[gpus[i]] && ctx.Err() == nil {
			d.log.Warn(fmt.Sprintf("the driver does not say how GPU %d is linked; its place on PCIe and its NUMA node count", i),
				"gpu", gpus[i], "error", err)
		}
	}
	*l = nodeLinks{list: list, gpus: gpus, hangs: len(errs) > 0 && d.lib.Hangs(), read: now, unread: unread}
	return list
}
