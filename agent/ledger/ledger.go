// Package ledger knows which container holds which GPU or MIG device, under which name. A device has one holder even if
// its ID or its resource changes: a device that is held under a name which is not advertised any more is not given to
// another container.
//
// The kubelet accounts only for names that are advertised. The ledger reads what it knows of all names (PodResources),
// and adds what Allocate has given since.
package ledger

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/resource"
)

const (
	// interval is the time between two reads, and retryInterval that after a read that failed.
	interval      = 5 * time.Second
	retryInterval = time.Second
	// readLimit is how long a read may take.
	readLimit = 2 * time.Second
	// settled is how long after Allocate the kubelet may not list the container yet. It takes milliseconds.
	settled = 10 * time.Second
)

// Options are the parameters of a Ledger. All are required.
type Options struct {
	// List returns the containers that hold devices, of any plugin. An error means that they are unknown.
	List func(context.Context) ([]podresources.Holder, error)
	// Changed is woken when Reason or Unknown may have another result.
	Changed wake.Chan
	Log     *slog.Logger
}

// Ledger is the ledger of a host. It is an actor. All methods may be called concurrently.
type Ledger struct {
	opts Options

	reading sync.Mutex // held while the kubelet is read, so that an older answer does not replace a newer one

	mu      sync.Mutex
	offered map[name]bool         // the advertised names
	uuids   map[string]bool       // of the advertised devices and their GPUs
	holders []podresources.Holder // the last answer of the kubelet
	known   bool                  // the kubelet has answered once
	err     error                 // why the last read failed
	given   []given               // what Allocate gave and the kubelet may not list yet
	held    map[string]string     // who holds a device under a name that is not advertised, by the device's UUID
}

// name is the name under which the kubelet knows a device.
type name struct{ resource, id string }

// given is a device that Allocate gave.
type given struct {
	name
	at time.Time
}

// New returns a Ledger; call Run.
func New(opts Options) *Ledger { return &Ledger{opts: opts, held: map[string]string{}} }

// Run reads the kubelet until ctx ends.
func (l *Ledger) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		pause := interval
		if _, err := l.Read(ctx); err != nil {
			pause = retryInterval
		}
		timer.Reset(pause)
	}
}

// Read reads the kubelet, and returns the containers that hold devices. An error means that they are unknown; the
// ledger then keeps those that it knew.
func (l *Ledger) Read(ctx context.Context) ([]podresources.Holder, error) {
	l.reading.Lock()
	defer l.reading.Unlock()
	limited, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	begun := time.Now()
	holders, err := l.opts.List(limited)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.setError(err)
	if err != nil {
		return nil, err
	}
	l.holders, l.known = holders, true
	l.given = slices.DeleteFunc(l.given, func(g given) bool {
		return begun.Sub(g.at) > settled || slices.ContainsFunc(holders, g.isOf)
	})
	l.update()
	return holders, nil
}

// isOf reports whether a container is listed with the device.
func (n name) isOf(h podresources.Holder) bool {
	return slices.Contains(h.ByResource[n.resource], n.id)
}

// setError records the error of a read, or nil. It logs when the kubelet ceases to answer, and when it answers again.
func (l *Ledger) setError(err error) {
	switch {
	case err != nil && l.err == nil:
		l.opts.Log.Warn(unknown + wording.OneLine(err))
	case err == nil && l.err != nil:
		l.opts.Log.Info("the kubelet says again which containers hold devices")
	}
	if (err == nil) != (l.err == nil) {
		l.opts.Changed.Wake()
	}
	l.err = err
}

const unknown = "it is unknown which containers hold devices, so no GPU is reset and none is prepared for a container: "

// Unknown says why it is unknown which containers hold devices, or is empty.
func (l *Ledger) Unknown() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		return ""
	}
	return unknown + wording.OneLine(l.err)
}

// Held returns the UUIDs of the devices that containers hold under any name, as of the last read.
func (l *Ledger) Held() (map[string]bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return nil, l.err
	}
	uuids := map[string]bool{}
	for _, h := range l.holders {
		for _, uuid := range h.UUIDs() {
			uuids[uuid] = true
		}
	}
	return uuids, nil
}

// IDs returns the IDs of the devices that containers hold under any name, as of the last read, and of those that
// Allocate has given since.
func (l *Ledger) IDs() map[string]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	ids := map[string]bool{}
	for _, h := range l.holders {
		for _, id := range h.Devices {
			ids[id] = true
		}
	}
	for _, g := range l.given {
		ids[g.id] = true
	}
	return ids
}

// Offer sets the devices that are advertised from now on. If their names differ from those before, it reads the kubelet
// first: a container may hold a device under one of the old names.
func (l *Ledger) Offer(resources []resource.Resource) {
	names, uuids := map[name]bool{}, map[string]bool{}
	for i := range resources {
		for _, d := range resources[i].Devices {
			names[name{resources[i].Name, d.ID}] = true
			uuids[d.UUID], uuids[d.Parent] = true, true
		}
	}
	if l.offer(names, uuids) {
		_, _ = l.Read(context.Background()) // an error is logged, and Run reads again
	}
}

// offer sets the advertised names and UUIDs, and reports whether the names differ from those before.
func (l *Ledger) offer(names map[name]bool, uuids map[string]bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	same := len(names) == len(l.offered)
	for n := range names {
		same = same && l.offered[n]
	}
	l.offered, l.uuids = names, uuids
	l.update()
	return !same
}

// update finds the devices that are held under names which are not advertised.
func (l *Ledger) update() {
	before := l.held
	l.held = map[string]string{}
	add := func(n name, holder string) {
		if uuid := resource.UUIDOf(n.id); l.uuids[uuid] && !l.offered[n] && l.held[uuid] == "" {
			l.held[uuid] = holder + " holds it as " + n.id + " of " + n.resource
		}
	}
	for _, h := range l.holders {
		for _, r := range slices.Sorted(maps.Keys(h.ByResource)) {
			for _, id := range h.ByResource[r] {
				add(name{r, id}, h.String())
			}
		}
	}
	for _, g := range l.given {
		add(g.name, "a container that is starting")
	}
	if maps.Equal(before, l.held) {
		return
	}
	l.opts.Changed.Wake()
	for _, uuid := range slices.Sorted(maps.Keys(l.held)) {
		if l.held[uuid] != before[uuid] {
			l.opts.Log.Warn(uuid + " is given to no other container: " + l.held[uuid])
		}
	}
	for _, uuid := range slices.Sorted(maps.Keys(before)) {
		if l.held[uuid] == "" && l.uuids[uuid] {
			l.opts.Log.Info(uuid + " is not held under an older name any more")
		}
	}
}

// Reason says who holds a device, or its GPU, under a name that is not advertised, or is empty.
func (l *Ledger) Reason(d *resource.Device) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reason(d)
}

func (l *Ledger) reason(d *resource.Device) string { return cmp.Or(l.held[d.UUID], l.held[d.Parent]) }

// Take records that a container gets devices of a resource. It returns an error if another container holds one under a
// name that is not advertised. It only reads the kubelet if that has not answered yet.
func (l *Ledger) Take(ctx context.Context, resourceName string, devices []*resource.Device) error {
	if !l.answered() {
		_, _ = l.Read(ctx) // an error is logged
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range devices {
		if why := l.reason(d); why != "" {
			return fmt.Errorf("%s: %s", d.ID, why)
		}
	}
	for _, d := range devices {
		l.given = append(l.given, given{name{resourceName, d.ID}, time.Now()})
	}
	l.update() // the names may not be advertised any more
	return nil
}

func (l *Ledger) answered() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.known
}
