// Package ledger knows which container holds which GPU or MIG device, under which name. A device has one holder even if
// its ID or its resource changes: a device that is held under a name which is not advertised any more is not given to
// another container. ResourceClaims are holders too: a claim and a container of the device plugin never have the same
// device. Several claims can have parts of the memory of one device, together no more than there is.
//
// The kubelet accounts only for names that are advertised. The ledger reads what it knows of all names (PodResources),
// and adds what Allocate has given since. The kubelet forgets a pod that is deleted while its containers still end, so
// the ledger keeps a container that the kubelet has forgotten as long as its device is in use.
package ledger

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
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
	// gracePeriod is how long a container may still use its device after the kubelet has forgotten it, where that cannot
	// be checked. It is the default of Kubernetes.
	gracePeriod = 30 * time.Second
)

// Options are the parameters of a Ledger. All are required.
type Options struct {
	// List returns the containers that hold devices, of any plugin. An error means that they are unknown.
	List func(context.Context) ([]podresources.Holder, error)
	// InUse reports whether a container uses a device, given by its UUID. An error means that this is unknown.
	InUse func(ctx context.Context, uuid string) (bool, error)
	// Changed is woken when Reason, Claim, Unknown or Unrecognised may have another result.
	Changed wake.Chan
	Log     *slog.Logger
}

// Ledger is the ledger of a host. It is an actor. All methods may be called concurrently.
type Ledger struct {
	opts Options

	reading sync.Mutex // held while the kubelet is read, so that an older answer does not replace a newer one

	mu      sync.Mutex
	offered map[name]bool         // the advertised names
	ours    map[string]bool       // the advertised resources, also those without devices
	uuids   map[string]bool       // of the advertised devices and their GPUs
	holders []podresources.Holder // the last answer of the kubelet
	known   bool                  // the kubelet has answered once
	err     error                 // why the last read failed
	given   []given               // what Allocate gave and the kubelet may not list yet
	ending  []ending              // what the kubelet has forgotten, until the containers have ended
	held    map[string]string     // who holds a device under a name that is not advertised, by the device's UUID
	foreign string                // what Unrecognised returns
	claims  map[string]claim      // what ResourceClaims have, by the claim's UID
	lost    map[string]bool       // the UIDs of claims of which it is unknown what they have
}

// name is the name under which the kubelet knows a device.
type name struct{ resource, id string }

// given is a device that Allocate gave.
type given struct {
	name
	at time.Time
}

// ending is a device of a container that the kubelet has forgotten.
type ending struct {
	name
	holder podresources.Holder
	since  time.Time
}

// New returns a Ledger; call Run.
func New(opts Options) *Ledger {
	return &Ledger{opts: opts, held: map[string]string{}, claims: map[string]claim{}, lost: map[string]bool{}}
}

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
		l.checkEnding(ctx)
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
	l.addEnding(holders)
	l.holders, l.known = holders, true
	l.given = slices.DeleteFunc(l.given, func(g given) bool {
		return begun.Sub(g.at) > settled || slices.ContainsFunc(holders, g.isOf)
	})
	l.update()
	return holders, nil
}

// addEnding records the devices that containers had at the last read and do not have any more. A container that the
// kubelet lists again is not ending: a kubelet that starts knows no pods at first.
func (l *Ledger) addEnding(now []podresources.Holder) {
	listed := func(holder string, of name) bool {
		return slices.ContainsFunc(now, func(h podresources.Holder) bool { return h.String() == holder && of.isOf(h) })
	}
	l.ending = slices.DeleteFunc(l.ending, func(e ending) bool { return listed(e.holder.String(), e.name) })
	for _, h := range l.holders {
		for r, ids := range h.ByResource {
			for _, id := range ids {
				if of := (name{r, id}); hasUUID(id) && !listed(h.String(), of) {
					l.ending = append(l.ending, ending{of, h, time.Now()})
				}
			}
		}
	}
}

// checkEnding removes the devices from l.ending that are not in use any more. If that is unknown, or if other
// containers have the device too, it removes them after the grace period.
func (l *Ledger) checkEnding(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	l.mu.Lock()
	uuids := map[string]bool{}
	for _, e := range l.ending {
		uuids[resource.UUIDOf(e.id)] = true
	}
	l.mu.Unlock()
	for uuid := range uuids {
		used, err := l.opts.InUse(ctx, uuid)
		l.endEnding(uuid, err == nil && used, err == nil)
	}
}

func (l *Ledger) endEnding(uuid string, used, certain bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	shared := slices.ContainsFunc(l.holders, func(h podresources.Holder) bool { return slices.Contains(h.UUIDs(), uuid) })
	l.ending = slices.DeleteFunc(l.ending, func(e ending) bool {
		switch {
		case resource.UUIDOf(e.id) != uuid:
			return false
		case certain && !used:
			return true
		}
		return (shared || !certain) && time.Since(e.since) > gracePeriod
	})
	l.update()
}

// isOf reports whether a container is listed with the device.
func (n name) isOf(h podresources.Holder) bool {
	return slices.Contains(h.ByResource[n.resource], n.id)
}

// setError records the error of a read, or nil.
func (l *Ledger) setError(err error) {
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

// Held returns the UUIDs of the devices that containers hold under any name, as of the last read, of those that
// Allocate has given since, and of those that claims have.
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
	for _, g := range l.given {
		uuids[resource.UUIDOf(g.id)] = true
	}
	for _, c := range l.claims {
		for _, p := range c.portions {
			uuids[p.Device.UUID] = true
		}
	}
	for uuid := range l.uuids {
		if l.lostClaimOf(&resource.Device{UUID: uuid}, "") != "" {
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

// Offer sets the devices that the device plugin advertises from now on, and those that only claims can get. If the
// advertised names differ from those before, it reads the kubelet first: a container may hold a device under one of the
// old names.
func (l *Ledger) Offer(advertised []resource.Resource, claimable ...resource.Resource) {
	names, uuids, ours := map[name]bool{}, map[string]bool{}, map[string]bool{}
	for i, r := range slices.Concat(advertised, claimable) {
		ours[r.Name] = true
		for _, d := range r.Devices {
			if i < len(advertised) {
				names[name{r.Name, d.ID}] = true
			}
			uuids[d.UUID], uuids[d.Parent] = true, true
		}
	}
	if l.offer(names, uuids, ours) {
		_, _ = l.Read(context.Background()) // Unknown has the error, and Run reads again
	}
}

// offer sets the advertised names, UUIDs and resources, and reports whether the names differ from those before.
func (l *Ledger) offer(names map[name]bool, uuids, ours map[string]bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	same := len(names) == len(l.offered)
	for n := range names {
		same = same && l.offered[n]
	}
	l.offered, l.uuids, l.ours = names, uuids, ours
	l.update()
	return !same
}

// update finds the devices that are held under names which are not advertised.
func (l *Ledger) update() {
	if text := l.unrecognised(); text != l.foreign {
		l.foreign = text
		l.opts.Changed.Wake()
	}
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
	for _, e := range l.ending {
		add(e.name, e.holder.String()+", which is ending,")
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

// Unrecognised says which containers have devices of an advertised resource under IDs that name no GPU, or is empty.
func (l *Ledger) Unrecognised() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.foreign
}

func (l *Ledger) unrecognised() string {
	var list []string
	for _, h := range l.holders {
		for _, r := range slices.Sorted(maps.Keys(h.ByResource)) {
			for _, id := range h.ByResource[r] {
				if l.ours[r] && !hasUUID(id) {
					list = append(list, fmt.Sprintf("%s holds %q of %s", h.String(), wording.Shorten(id, shortID), r))
				}
			}
		}
	}
	if len(list) == 0 {
		return ""
	}
	return "it is unknown which GPUs these containers have, so other containers may get them too: " +
		wording.ShortenList(list, 8, ", ") + "; another device plugin gave the IDs, so end the pods"
}

// shortID is more than the length of the IDs of known plugins.
const shortID = 80

// hasUUID reports whether a device plugin ID has the UUID of a GPU or MIG device.
func hasUUID(id string) bool { return strings.HasPrefix(id, "GPU-") || strings.HasPrefix(id, "MIG-") }

// Reason says who holds a device, or its GPU, under a name that is not advertised, or is empty.
func (l *Ledger) Reason(d *resource.Device) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reason(d)
}

func (l *Ledger) reason(d *resource.Device) string { return cmp.Or(l.held[d.UUID], l.held[d.Parent]) }

// HeldAs reports whether a container holds a device of a resource under an ID that is not advertised, as of the last
// read and of what Allocate has given since.
func (l *Ledger) HeldAs(resourceName, id string) bool {
	n := name{resourceName, id}
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.offered[n] && (slices.ContainsFunc(l.holders, n.isOf) ||
		slices.ContainsFunc(l.given, func(g given) bool { return g.name == n }))
}

// Take records that a container gets devices of a resource. It returns an error if another container holds one under a
// name that is not advertised. It reads the kubelet only if that has not answered yet. If that fails, Take gives the
// devices: not every program that serves as a kubelet says which containers hold devices, and nothing is known against
// giving them. Unknown says so meanwhile.
func (l *Ledger) Take(ctx context.Context, resourceName string, devices []*resource.Device) error {
	if !l.answered() {
		_, _ = l.Read(ctx)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range devices {
		if why := cmp.Or(l.reason(d), l.claimOf(d)); why != "" {
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
