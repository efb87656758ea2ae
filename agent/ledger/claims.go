package ledger

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/resource"
)

// Portion is what a ResourceClaim has of a device.
type Portion struct {
	Device *resource.Device
	// Memory is the claim's part of the device's memory, in bytes. Other claims can have other parts. It is 0 if no other
	// claim can have the device.
	Memory uint64
}

// claim is what a ResourceClaim has.
type claim struct {
	name     string // like "default/claim-1"
	portions []Portion
	since    time.Time
}

// HeldError means that a claim cannot have a device, since a container or other claims have it.
type HeldError struct {
	UUID string
	Why  string // names the holder, which may be another tenant's
}

func (e *HeldError) Error() string { return e.UUID + ": " + e.Why }

// TakeClaim records that a ResourceClaim, given by its UID and "NAMESPACE/NAME", has devices, or parts of their memory.
// It returns a HeldError if a container has one of the devices under any name, or another claim has it, and another
// error if the claims that share it have too much of its memory; then it records nothing. A claim may take the same
// again. Unlike Take it always reads the kubelet first, and gives nothing while it is unknown which containers hold
// devices: the kubelet repeats the call.
func (l *Ledger) TakeClaim(ctx context.Context, uid, name string, portions []Portion) error {
	if _, err := l.Read(ctx); err != nil {
		return fmt.Errorf("it is unknown which containers hold the devices: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, p := range portions {
		holder, missing := l.whyNot(p, uid, portions[:i])
		switch holder = cmp.Or(l.containerOf(p.Device), l.lostClaimOf(p.Device, name), holder); {
		case holder != "":
			return &HeldError{p.Device.UUID, holder}
		case missing != "":
			return fmt.Errorf("%s: %s", p.Device.UUID, missing)
		}
	}
	since := time.Now().UTC().Truncate(time.Second) // as on record
	if c, again := l.claims[uid]; again {
		since = c.since
	}
	l.claims[uid] = claim{name, portions, since}
	delete(l.lost, uid)
	l.opts.Changed.Wake()
	return nil
}

// RestoreClaim records what a claim has since a time in an earlier process, whoever else has it.
func (l *Ledger) RestoreClaim(uid, name string, since time.Time, portions []Portion) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claims[uid] = claim{name, portions, since}
	delete(l.lost, uid)
	l.opts.Changed.Wake()
}

// LoseClaim records that it is unknown which devices a claim has. Until the claim is known again, or dropped, nothing
// gets the devices that the kubelet lists for claims which are not known.
func (l *Ledger) LoseClaim(uid string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.claims, uid)
	l.lost[uid] = true
	l.opts.Changed.Wake()
}

// DropClaim records that a claim has no devices any more.
func (l *Ledger) DropClaim(uid string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.claims, uid)
	delete(l.lost, uid)
	l.opts.Changed.Wake()
}

// Claim says which claim has a device, its GPU or a part of it, or is empty.
func (l *Ledger) Claim(d *resource.Device) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.claimOf(d)
}

func (l *Ledger) claimOf(d *resource.Device) string {
	const none = ""
	holder, _ := l.whyNot(Portion{Device: d}, none, nil)
	return cmp.Or(holder, l.lostClaimOf(d, none))
}

// lostClaimOf says which container has a device or its GPU by a claim that may be one of l.lost, other than one with a
// name. It is empty if none has. The kubelet does not list the UIDs of claims.
func (l *Ledger) lostClaimOf(d *resource.Device, except string) string {
	if len(l.lost) == 0 {
		return ""
	}
	known := map[string]bool{except: true}
	for _, c := range l.claims {
		known[c.name] = true
	}
	names := []string{podresources.DeviceName(d.UUID), podresources.DeviceName(d.Parent)}
	for _, h := range l.holders {
		for _, k := range h.Claims {
			if !known[k.Name] && slices.ContainsFunc(names, func(n string) bool { return slices.Contains(k.Devices, n) }) {
				return h.String() + " holds it by ResourceClaim " + k.Name + ", whose record cannot be read"
			}
		}
	}
	return ""
}

// whyNot says why the claim with a UID cannot have a portion besides `mine`, its other portions: who holds the device,
// or which memory is missing. Both are empty if it can.
func (l *Ledger) whyNot(want Portion, uid string, mine []Portion) (holder, missing string) {
	d, free := want.Device, want.Device.MemoryBytes
	for other, c := range l.claims {
		for _, p := range c.portions {
			switch {
			case other == uid, p.Device.UUID != d.UUID && p.Device.UUID != d.Parent && p.Device.Parent != d.UUID:
			case p.Device.UUID == d.UUID && p.Memory > 0 && want.Memory > 0:
				free -= min(free, p.Memory)
			default:
				return "ResourceClaim " + c.name + " holds it as " + p.Device.UUID, ""
			}
		}
	}
	for _, p := range mine {
		if p.Device.UUID == d.UUID {
			free -= min(free, p.Memory)
		}
	}
	if want.Memory > free {
		const mib = 1 << 20
		return "", fmt.Sprintf("the claim needs %.1f MiB of its memory, and %.1f MiB are left", float64(want.Memory)/mib,
			float64(free)/mib)
	}
	return "", ""
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
