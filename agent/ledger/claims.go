package ledger

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/resource"
)

// Portion is what a ResourceClaim has of a device.
type Portion struct {
	Device *resource.Device
	// Memory is the claim's part of the device's memory, in bytes. Other claims can have other parts. It is 0 if no other
	// claim can have the device.
	Memory uint64
	// Admin says that the claim only observes the device: others can have it too.
	Admin bool
}

// Claim is a ResourceClaim that is prepared.
type Claim struct {
	UID  string
	Name string // like "default/claim-1"
	// Pods are the UIDs of the pods that have the claim, as far as they are known.
	Pods     []string
	Portions []Portion
}

// claim is what a ResourceClaim has.
type claim struct {
	name     string
	pods     []string
	portions []Portion
	since    time.Time
	dropped  time.Time // when it was unprepared, or zero
	partial  time.Time // since when the pod of some process has been unknown, or zero
}

// HeldError means that a claim or a container cannot have a device, since another one has it.
type HeldError struct {
	UUID string // or the ID, if a container cannot have it
	Why  string // names the holder, which may be another tenant's

	claim string // that is the holder, or empty
}

func (e *HeldError) Error() string { return e.UUID + ": " + e.Why }

// TakeClaim records that a claim has devices, or parts of their memory. It returns a HeldError if a container has one
// of the devices under any name, or another claim has it, and another error if the claims that share it have too much
// of its memory; then it records nothing. A claim may take the same again.
//
// TakeClaim gives nothing while it is unknown who holds devices. It waits for that, and for holders that are ending,
// until ctx ends: the kubelet repeats a call that failed only after its sync period, which is a minute by default.
func (l *Ledger) TakeClaim(ctx context.Context, c Claim) error {
	err := l.wait(ctx, func() (passes bool, err error) {
		b := l.books
		switch {
		case l.err != nil:
			return true, fmt.Errorf("it is unknown which containers hold the devices: %w", l.err)
		case b.alive() && b.refreshes == 0:
			return true, errors.New("it is unknown which containers hold the devices: the kubelet has not recorded them " +
				"since this program began")
		}
		for i, p := range c.Portions {
			if passes, err := l.checkPortion(&c, p, c.Portions[:i]); err != nil {
				return passes, err
			}
		}
		since := time.Now().UTC().Truncate(time.Second) // as on record
		if before, again := b.records[c.UID]; again {
			since = before.since
		}
		l.setClaim(c, since)
		return false, nil
	})
	if held, ok := errors.AsType[*HeldError](err); ok && held.claim != "" {
		l.refuse(held)
	}
	return err
}

// checkPortion returns why a claim cannot have a portion besides the portions before it, and whether that passes by
// itself.
func (l *Ledger) checkPortion(c *Claim, want Portion, before []Portion) (passes bool, err error) {
	if want.Admin {
		return false, nil
	}
	d := want.Device
	if _, here := l.books.devices[d.UUID]; !here && d.UUID != d.Parent { // MIG devices changed while the call waited
		return false, fmt.Errorf("the node has no device %s any more", d.UUID)
	}
	free := d.MemoryBytes
	var held *HeldError
	for _, h := range l.current() {
		switch {
		case !h.conflicts(d), h.claim != "" && h.claimUID == c.UID:
		case h.claim == c.Name && h.claimUID == "": // PodResources lists it without its UID
		case h.claim != "" && h.uuid == d.UUID && h.memory > 0 && want.Memory > 0:
			free -= min(free, h.memory)
		default:
			who := ""
			if h.claim != "" {
				who = h.String()
			}
			held = &HeldError{d.UUID, h.why(), who}
			if h.state != Ending {
				return false, held
			}
		}
	}
	if held != nil {
		return true, held
	}
	for _, p := range before {
		if p.Device.UUID == d.UUID {
			free -= min(free, p.Memory)
		}
	}
	if want.Memory > free {
		const mib = 1 << 20
		return false, fmt.Errorf("%s: the claim needs %.1f MiB of its memory, and %.1f MiB are left", d.UUID,
			float64(want.Memory)/mib, float64(free)/mib)
	}
	return false, nil
}

// refuse records that the scheduler has given the device of a claim to another one, so that it does not know the claim.
func (l *Ledger) refuse(e *HeldError) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.refused[e.UUID] == "" {
		l.refused[e.UUID] = e.claim
		l.opts.Changed.Wake()
	}
}

// Unscheduled says who holds a device so that the scheduler does not know, or is empty: a claim that has another device
// of the same GPU, or one because of which another claim was refused.
func (l *Ledger) Unscheduled(d *resource.Device) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.unscheduled(d)
}

func (l *Ledger) unscheduled(d *resource.Device) string {
	if who := l.refused[d.UUID]; who != "" {
		return who + " holds it"
	}
	return l.blocker(d, func(h *holder) bool { return h.claim != "" && h.uuid != d.UUID })
}

// RestoreClaim records what a claim has since a time in an earlier process, whoever else has it.
func (l *Ledger) RestoreClaim(c Claim, since time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.setClaim(c, since)
}

func (l *Ledger) setClaim(c Claim, since time.Time) {
	l.books.records[c.UID] = claim{name: c.Name, pods: c.Pods, portions: c.Portions, since: since}
	delete(l.books.dropped, c.UID)
	delete(l.books.unprepared, c.UID)
	l.changeClaims()
}

// LoseRecord says that a claim has no record any more, and was not unprepared: the kubelet says what it has.
func (l *Ledger) LoseRecord(uid string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.books.records, uid)
	l.changeClaims()
}

// DropClaim says that a claim is unprepared. It still has its devices as long as one of its pods has processes. The
// kubelet has it in its file for some moments more, which counts for nothing.
func (l *Ledger) DropClaim(uid string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.books.claims[uid] != nil {
		l.books.unprepared[uid] = true
	}
	if c, found := l.books.records[uid]; found && len(l.podsOf(uid, &c)) > 0 {
		c.pods = l.podsOf(uid, &c)
		c.dropped = time.Now()
		l.books.dropped[uid] = c
		l.next.Wake() // to see whether the pods have ended
	}
	delete(l.books.records, uid)
	l.changeClaims()
}

func (l *Ledger) changeClaims() {
	l.books.changed = true
	l.update()
	l.opts.Changed.Wake()
	if l.waiting > 0 {
		l.next.Wake()
	}
}

// Claim says which claim has a device, its GPU or a part of it, or is empty.
func (l *Ledger) Claim(d *resource.Device) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.claim(d)
}

func (l *Ledger) claim(d *resource.Device) string {
	return l.blocker(d, func(h *holder) bool { return h.claim != "" })
}

// IsAbandoned reports whether nothing on the node has a claim any more, although it was not unprepared: the kubelet
// has no record of it, and no pod of it has a process. An error means that this is unknown.
func (l *Ledger) IsAbandoned(uid string) (bool, error) {
	pods, visible := l.opts.Pods()
	l.mu.Lock()
	defer l.mu.Unlock()
	c, recorded := l.books.records[uid]
	_, known := l.books.claims[uid]
	switch certain := l.err == nil && l.books.alive() && l.books.refreshes > 0; {
	case !recorded || known || !certain:
		return false, nil
	case len(c.pods) == 0:
		return true, nil
	case !visible:
		return false, errors.New("the processes of pods cannot be seen")
	case !pods.Partial:
		c.partial = time.Time{}
	case c.partial.IsZero():
		c.partial = time.Now()
	}
	l.books.records[uid] = c
	unsure := pods.Partial && time.Since(c.partial) < unreadable
	return !unsure && !slices.ContainsFunc(c.pods, func(pod string) bool { return pods.UIDs[pod] }), nil
}

// podsOf returns the pods that a claim has had.
func (l *Ledger) podsOf(uid string, c *claim) []string {
	pods := slices.Clone(c.pods)
	if k := l.books.claims[uid]; k != nil {
		pods = append(pods, k.Pods...)
	}
	slices.Sort(pods)
	return slices.Compact(pods)
}

// AwaitFree waits until no other container and no claim holds the devices that the kubelet has given to a container
// under IDs of a resource: a pod that was deleted by force may still run. The caller is about to start the container.
// The error is a HeldError if a holder has not ended when ctx ends.
func (l *Ledger) AwaitFree(ctx context.Context, resourceName string, ids []string, devices []*resource.Device) error {
	return l.wait(ctx, func() (passes bool, err error) {
		if l.books.damaged && l.books.read > 0 {
			return true, fmt.Errorf("it is unknown which containers hold the devices: %w", l.err)
		}
		pod := l.books.caller(resourceName, ids)
		for _, d := range devices {
			n := name{resourceName, d.ID}
			for _, h := range l.current() {
				own := pod != "" && h.podUID == pod || h.state != Ending && h.name == n
				// Allocate gave the device, and no book that was read since shows to whom: the entry is that of whoever had
				// it before.
				earlier := h.book == Checkpoint && h.name == n && l.books.given[n] != nil
				if !earlier && (own || !h.blocks(d)) {
					continue
				}
				err = &HeldError{UUID: d.ID, Why: h.why()}
				if !earlier && h.state != Ending {
					return false, err
				}
			}
		}
		return true, err
	})
}

// Forget has an entry of the kubelet's books, or a device of a claim, hold nothing until the book drops it. The path is
// POD-UID/CONTAINER/DEVICE or CLAIM-UID/DEVICE, as in Holding.Forget. If a pod that has the device has a process, or if
// that is unknown, it is an error without force.
func (l *Ledger) Forget(ctx context.Context, path string, force bool) error {
	if _, err := l.Read(ctx); err != nil && !force {
		return err
	}
	pods, visible := l.opts.Pods()
	forgotten, err := l.forget(path, force, pods, visible)
	if err != nil {
		return err
	}
	return l.opts.Files.writeForgotten(forgotten)
}

// forget is Forget without the file. It returns all that is forgotten.
func (l *Ledger) forget(path string, force bool, pods proc.Pods, visible bool) (map[string]bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var of []string
	switch found, isClaim := l.find(path); {
	case found == nil:
		return nil, fmt.Errorf("%w: %q", ErrNoHolder, path)
	case isClaim:
		of = found.pods
		if k := l.books.claims[found.claimUID]; k != nil {
			of = append(slices.Clone(of), k.Pods...)
		}
	default:
		of = []string{found.podUID}
	}
	running := slices.ContainsFunc(of, func(pod string) bool { return pods.UIDs[pod] })
	switch {
	case force:
	case running:
		return nil, fmt.Errorf("%s: a pod that has the device has processes: end the pod, or use --force", path)
	case !visible || pods.Partial || len(of) == 0:
		return nil, fmt.Errorf("%s: it is unknown whether a pod that has the device has processes: use --force if none has",
			path)
	}
	l.books.forgotten[path] = true
	l.update()
	l.opts.Changed.Wake()
	return maps.Clone(l.books.forgotten), nil
}

// ErrNoHolder means that no holder has this path.
var ErrNoHolder = errors.New("no such holder; see gpu-cdi-plugin claims -o wide")

// find returns the holder with a path, or nil.
func (l *Ledger) find(path string) (h *holder, isClaim bool) {
	for _, h := range l.current() {
		switch {
		case h.claimUID != "" && claimPath(h.claimUID, podresources.DeviceName(h.uuid)) == path:
			return h, true
		case h.book == Checkpoint && (key{h.podUID, h.container, h.name}).path() == path:
			return h, false
		}
	}
	return nil, false
}

// endWaits makes calls that wait return a cause, and later ones not wait.
func (l *Ledger) endWaits(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = cause
	close(l.round)
	l.round = make(chan struct{})
}

// wait reads the books and calls try, which runs with l.mu locked, until try returns no error, an error that does not
// pass by itself, or ctx ends. Run reads for all that wait.
func (l *Ledger) wait(ctx context.Context, try func() (passes bool, err error)) error {
	_, _ = l.Read(ctx) // l.err has the error
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting++
	defer func() { l.waiting-- }()
	for first := true; ; first = false {
		passes, err := try()
		switch {
		case err == nil || !passes:
			return err
		case l.ended != nil:
			return fmt.Errorf("%w: %w", l.ended, err)
		case ctx.Err() != nil:
			return err
		}
		if first && l.waiting == 1 {
			l.next.Wake()
		}
		round := l.round
		l.mu.Unlock()
		select {
		case <-round:
		case <-ctx.Done():
		}
		l.mu.Lock()
	}
}
