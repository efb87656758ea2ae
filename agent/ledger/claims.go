package ledger

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"gpu-cdi-plugin/resource"
)

// claim is what a ResourceClaim has.
type claim struct {
	name    string // like "default/claim-1"
	devices []*resource.Device
	since   time.Time
}

// HeldError means that a claim cannot have a device, since a container or another claim has it.
type HeldError struct {
	UUID string
	Why  string // names the holder, which may be another tenant's
}

func (e *HeldError) Error() string { return e.UUID + ": " + e.Why }

// TakeClaim records that a ResourceClaim, given by its UID and "NAMESPACE/NAME", has devices. It returns a HeldError if
// a container has one of them under any name, or another claim has it, and then records nothing. A claim may take its
// devices again. Unlike Take it always reads the kubelet first, and gives nothing while it is unknown which containers
// hold devices: the kubelet repeats the call.
func (l *Ledger) TakeClaim(ctx context.Context, uid, name string, devices []*resource.Device) error {
	if _, err := l.Read(ctx); err != nil {
		return fmt.Errorf("it is unknown which containers hold the devices: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range devices {
		if why := cmp.Or(l.containerOf(d), l.claimOf(d, uid)); why != "" {
			return &HeldError{d.UUID, why}
		}
	}
	since := time.Now().UTC().Truncate(time.Second) // as on record
	if c, again := l.claims[uid]; again {
		since = c.since
	}
	l.claims[uid] = claim{name, devices, since}
	l.opts.Changed.Wake()
	return nil
}

// RestoreClaim records what a claim has since a time in an earlier process, whoever else has it.
func (l *Ledger) RestoreClaim(uid, name string, since time.Time, devices []*resource.Device) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claims[uid] = claim{name, devices, since}
	l.opts.Changed.Wake()
}

// DropClaim records that a claim has no devices any more.
func (l *Ledger) DropClaim(uid string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.claims, uid)
	l.opts.Changed.Wake()
}

// noUID is the UID of no claim.
const noUID = ""

// Claim says which claim has a device, its GPU or a part of it, or is empty.
func (l *Ledger) Claim(d *resource.Device) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.claimOf(d, noUID)
}

// claimOf says which claim, other than the one with the UID, has a device, its GPU or a part of it, or is empty.
func (l *Ledger) claimOf(d *resource.Device, except string) string {
	for uid, c := range l.claims {
		for _, other := range c.devices {
			if uid != except && (other.UUID == d.UUID || other.UUID == d.Parent || other.Parent == d.UUID) {
				return "ResourceClaim " + c.name + " holds it as " + other.UUID
			}
		}
	}
	return ""
}

// containerOf says which container has a device or its GPU by the device plugin, under any name, or is empty.
func (l *Ledger) containerOf(d *resource.Device) string {
	of := func(id string) bool { uuid := resource.UUIDOf(id); return uuid == d.UUID || uuid == d.Parent }
	for _, h := range l.holders {
		if slices.ContainsFunc(h.Devices, of) {
			return h.String() + " holds it"
		}
	}
	for _, g := range l.given {
		if of(g.id) {
			return "a container that is starting holds it"
		}
	}
	for _, e := range l.ending {
		if of(e.id) {
			return e.holder.String() + ", which is ending, holds it"
		}
	}
	return ""
}
