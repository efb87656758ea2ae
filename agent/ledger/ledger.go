// Package ledger knows who holds which GPU or MIG device: containers that got it from the device plugin, under any
// name, and ResourceClaims. No device has two holders, whatever changes under a pod: the names of devices, the door,
// MIG devices, this process, or the kubelet. Several claims can have parts of the memory of one device, together no
// more than there is.
//
// Who holds a device is a function of what the books say (holders), and of nothing that was once decided. The books are
//
//	kubelet_internal_checkpoint  the devices of all containers of the pods that the kubelet has admitted
//	dra_manager_state            the ResourceClaims of these pods, and their prepared devices
//	PodResources                 the names of pods, and what of the above has not been written yet
//	processes                    the pods that have processes, by the names of their cgroups
//	records                      the claims that this driver has prepared (agent/dra)
//	given                        what Allocate has answered and the kubelet has not written yet
//
// The kubelet can lose its files, and the records can be lost. What they have said of pods that have processes is kept,
// also for the next process (Files.Known).
//
// A pod holds its devices while the kubelet has it as active, with or without processes, and while it has processes.
// The kubelet drops pods that are not active when it is asked for a list, and writes its checkpoint when the plugin
// sends its devices. So a refresh does both: an entry that two refreshed versions in a row lack belongs to no active
// pod.
//
// What is unknown, and what is given meanwhile:
//
//	unknown                      device plugin                  claims         ends
//	the kubelet does not answer  names that it accounts for     nothing        when it answers; never by time
//	a file cannot be read        the same                       nothing        when it can be read; never by time
//	nothing was refreshed yet    names that the kubelet had     nothing        at the first refresh
//	processes cannot be seen     nothing of dropped pods (1)    the same       30 s after the kubelet dropped a pod
//	one process cannot be read   nothing of dropped pods        the same       after 30 s
//	an entry names no device     nothing of this node           the same       with its pod, or by "claims forget"
//
// (1) unless the kubelet has given the device to another pod under the same name: it does so only with a device that no
// active pod has.
//
// Where the program on the other side writes no checkpoint, it is no kubelet: what it lists is all that counts.
package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/resource"
)

// Kubelet is what the kubelet of the node says of its pods.
type Kubelet interface {
	// List returns the containers that hold devices or claims.
	List(ctx context.Context) (podresources.Answer, error)
	// Checkpoint returns the kubelet's record of devices, or nil if it does not exist, and Claims that of claims.
	Checkpoint() (*kubelet.Checkpoint, podresources.Version, error)
	Claims() ([]kubelet.Claim, error)
}

// Options are the parameters of a Ledger. All are required but Beside and Files.
type Options struct {
	Kubelet Kubelet
	// Driver is the name of our DRA driver.
	Driver string
	// Resend sends the devices of the device plugin to the kubelet once more. It returns false if the kubelet does not
	// watch the plugin.
	Resend func() bool
	// Pods returns the pods that have processes. It returns false if processes of pods cannot be seen.
	Pods func() (proc.Pods, bool)
	// Beside says that another instance may still give devices, until Alone is called.
	Beside bool
	// Files are what is kept over a restart.
	Files Files
	// Changed is woken when Reason, Claim, Unscheduled, Unread, Unknown or Unrecognised may have another result.
	Changed wake.Chan
	Log     *slog.Logger
}

// Ledger is the ledger of a host. It is an actor. All methods may be called concurrently.
type Ledger struct {
	opts Options

	reading   sync.Mutex    // held while the books are read, so that an older answer does not replace a newer one
	begun     atomic.Uint64 // how many reads have begun
	completed uint64        // the number of the last read that was not abandoned; guarded by reading
	next      wake.Chan     // Run reads again

	mu        sync.Mutex
	books     *books
	version   podresources.Version // of the checkpoint in books
	refreshed time.Time            // when the last refresh began
	watched   bool                 // whether the kubelet could be asked to write it; Wake is called when it can
	asked     bool                 // whether the kubelet was asked to write the checkpoint, and has not yet
	before    podresources.Version // of the checkpoint when it was asked
	err       error                // why the last read failed
	held      []*holder            // by books
	byGPU     map[string][]*holder // what Allocate looks at: see index
	stale     bool                 // whether Allocate has given something since held was made
	verdicts  map[name]verdict     // of the last update
	unwritten bool                 // what unwritten returned at the last update
	refused   map[string]string    // who was found to have a device that the scheduler took for free, by UUID
	waiting   int                  // the number of calls that wait
	round     chan struct{}        // closed after the next read
	ended     error                // why no call may wait any more, or nil
}

// New returns a Ledger; call Run.
func New(opts Options) *Ledger {
	l := &Ledger{
		opts: opts, books: newBooks(opts.Driver), next: wake.New(), round: make(chan struct{}), refused: map[string]string{},
		byGPU: map[string][]*holder{},
	}
	l.books.beside = opts.Beside
	l.readFiles()
	return l
}

// readFiles adds what the files have.
func (l *Ledger) readFiles() {
	parents, forgotten, before, err := l.opts.Files.read()
	if err != nil {
		l.opts.Log.Warn(err.Error())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.Copy(l.books.parents, parents)
	maps.Copy(l.books.forgotten, forgotten)
	l.books.restore(before, time.Now())
}

// Alone says that no other instance gives devices any more. What it gave last is known after the next refresh.
func (l *Ledger) Alone() {
	l.readFiles()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.books.beside, l.refreshed = false, time.Time{}
	l.next.Wake()
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

// current returns who holds devices. The caller has locked l.mu.
func (l *Ledger) current() []*holder {
	if l.stale {
		l.held, l.stale = holders(l.books, time.Now()), false
	}
	return l.held
}

// Held returns the UUIDs of the devices that containers or claims hold.
func (l *Ledger) Held() (map[string]bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return nil, l.err
	}
	uuids := map[string]bool{}
	for _, h := range l.current() {
		if h.admin || h.state == Forgotten {
			continue
		}
		uuids[h.uuid] = true
		if h.parent != "" && !h.absent {
			continue
		}
		for uuid, parent := range l.books.devices {
			if h.parent == "" || h.parent == parent {
				uuids[uuid] = true
			}
		}
	}
	return uuids, nil
}

// IDs returns the IDs of the devices that containers hold under any name.
func (l *Ledger) IDs() map[string]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	ids := map[string]bool{}
	for _, h := range l.current() {
		if h.id != "" {
			ids[h.id] = true
		}
	}
	return ids
}

// Offer sets the devices that the device plugin advertises from now on, and those that only claims can get. If the
// advertised names differ from those before, it reads the books first: a container may hold a device under one of the
// old names. The snapshot has all devices of the node, or is nil.
func (l *Ledger) Offer(s *gpu.Snapshot, advertised []resource.Resource, claimable ...resource.Resource) {
	names, devices, ours := map[name]bool{}, map[string]string{}, map[string]bool{}
	for i, r := range slices.Concat(advertised, claimable) {
		ours[r.Name] = true
		for _, d := range r.Devices {
			if i < len(advertised) {
				names[name{r.Name, d.ID}] = true
			}
			devices[d.UUID], devices[d.Parent] = d.Parent, d.Parent
		}
	}
	if s != nil {
		for i := range s.Devices {
			d := &s.Devices[i]
			devices[d.UUID] = d.UUID
			for j := range d.MIG {
				devices[d.MIG[j].UUID] = d.UUID
			}
		}
	}
	changed, parents := l.offer(names, devices, ours)
	if parents != nil {
		if err := l.opts.Files.writeParents(parents); err != nil {
			l.opts.Log.Warn(err.Error())
		}
	}
	if changed {
		_, _ = l.Read(context.Background()) // Unknown has the error, and Run reads again
	}
}

// offer sets what the node has and offers. It reports whether the names differ from those before, and returns the
// GPUs of MIG devices if they have changed.
func (l *Ledger) offer(
	names map[name]bool, devices map[string]string, ours map[string]bool,
) (changed bool, parents map[string]string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.books
	changed = !maps.Equal(names, b.advertised)
	if !maps.Equal(ours, b.ours) {
		l.version = podresources.Version{} // the last version has more that concerns this plugin
	}
	b.advertised, b.devices, b.ours = names, devices, ours
	parents = l.keepParents()
	l.update()
	return changed, parents
}

// keepParents records of which GPUs the MIG devices are parts, for a time when the node does not have them any more.
// Those that the node had earlier stay as long as somebody holds them.
func (l *Ledger) keepParents() map[string]string {
	b := l.books
	held := map[string]bool{}
	for _, h := range l.current() {
		held[h.uuid] = true
	}
	next := map[string]string{}
	for uuid, parent := range b.parents {
		if held[uuid] || b.refreshes < agreeing { // it is not yet known who holds what
			next[uuid] = parent
		}
	}
	for uuid, parent := range b.devices {
		if uuid != parent {
			next[uuid] = parent
		}
	}
	if maps.Equal(next, b.parents) {
		return nil
	}
	b.parents = next
	return maps.Clone(next)
}

// update finds out anew who holds devices, and logs what the device plugin cannot give because of that.
func (l *Ledger) update() {
	l.held, l.stale = holders(l.books, time.Now()), false
	l.byGPU = map[string][]*holder{}
	type alike struct{ uuid, parent string }
	accounted := map[alike]bool{}
	for _, h := range l.held {
		if h.accounted {
			a := alike{h.uuid, h.parent}
			if accounted[a] {
				continue // Allocate need not look at each replica
			}
			accounted[a] = true
		}
		l.byGPU[h.parent] = append(l.byGPU[h.parent], h)
	}
	for uuid, who := range l.refused {
		if !slices.ContainsFunc(l.held, func(h *holder) bool { return h.state != Forgotten && h.String() == who }) {
			delete(l.refused, uuid)
		}
	}
	before, after := l.verdicts, l.index()
	wasUnwritten := l.unwritten
	l.verdicts, l.unwritten = after, l.books.unwritten()
	if maps.Equal(before, after) && wasUnwritten == l.unwritten {
		return
	}
	l.opts.Changed.Wake()
	for _, uuid := range slices.Sorted(maps.Keys(l.books.devices)) {
		switch was, is := before[name{id: uuid}].reason, after[name{id: uuid}].reason; {
		case is != "" && is != was:
			l.opts.Log.Warn(uuid + " is given to no other container: " + is)
		case is == "" && was != "":
			l.opts.Log.Info(uuid + " is not held under an older name any more")
		}
	}
}

// verdict is what Reason, Claim and Unscheduled say of a device.
type verdict struct {
	reason             string
	ending             bool
	claim, unscheduled string
}

// index returns what is said of the devices of which anything is said: by the names under which they are advertised,
// and of all devices of the node, by their UUIDs without a resource.
func (l *Ledger) index() map[name]verdict {
	list := map[name]verdict{}
	add := func(n name, d *resource.Device) {
		v := verdict{claim: l.claim(d), unscheduled: l.unscheduled(d)}
		if v.reason, v.ending = l.reason(d); v != (verdict{}) {
			list[n] = v
		}
	}
	b := l.books
	for uuid, parent := range b.devices {
		add(name{id: uuid}, &resource.Device{UUID: uuid, Parent: parent})
	}
	for n := range b.advertised {
		uuid := resource.UUIDOf(n.id)
		add(n, &resource.Device{ID: n.id, UUID: uuid, Parent: b.devices[uuid]})
	}
	return list
}

// Reason says which container holds a device, or its GPU, so that no other may get it although the kubelet does not
// know. It is empty if none does. Ending says that such containers are all ending.
func (l *Ledger) Reason(d *resource.Device) (why string, ending bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reason(d)
}

func (l *Ledger) reason(d *resource.Device) (why string, ending bool) {
	if why := l.blocker(d, func(h *holder) bool { return h.claim == "" && h.state != Ending }); why != "" {
		return why, false
	}
	why = l.blocker(d, func(h *holder) bool { return h.claim == "" && !h.soon })
	return why, why != ""
}

// blocker describes the first holder of a kind that blocks a device, or is empty.
func (l *Ledger) blocker(d *resource.Device, kind func(*holder) bool) string {
	for _, group := range [][]*holder{l.byGPU[cmp.Or(d.Parent, d.UUID)], l.byGPU[""]} {
		for _, h := range group {
			if kind(h) && h.blocks(d) {
				return h.why()
			}
		}
	}
	return ""
}

// Unread says why a device of a resource is not advertised as healthy yet: its name is new to the kubelet, and what the
// kubelet has given under older names was not read since this process began. It is empty if the device can be given.
func (l *Ledger) Unread(resourceName string, d *resource.Device) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.unread(name{resourceName, d.ID})
}

func (l *Ledger) unread(n name) string {
	if l.books.registeredBefore[n] || !l.books.unwritten() {
		return ""
	}
	return "the kubelet has not yet recorded which devices containers have"
}

// Ready returns an error if devices cannot be given yet because of Unread. While another instance gives devices, it
// returns none.
func (l *Ledger) Ready() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for n := range l.books.advertised {
		if why := l.unread(n); why != "" && !l.books.beside {
			return errors.New(why)
		}
	}
	return nil
}

// Unrecognised says which containers and claims have devices that name no GPU, or is empty.
func (l *Ledger) Unrecognised() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var list []string
	for _, h := range l.current() {
		if h.parent == "" && h.state != Forgotten {
			list = append(list, h.why())
		}
	}
	if len(list) == 0 {
		return ""
	}
	return "it is unknown which GPUs these have, so nobody gets a GPU of this node until they have ended: " +
		wording.ShortenList(list, 8, "; ") + "; if one has no GPU of this node: gpu-cdi-plugin claims forget"
}

// HeldAs reports whether a container holds a device of a resource under an ID that is not advertised.
func (l *Ledger) HeldAs(resourceName, id string) bool {
	n := name{resourceName, id}
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.books.advertised[n] && slices.ContainsFunc(l.current(), func(h *holder) bool { return h.name == n })
}

// Take records that a container gets devices of a resource. It returns an error if another container or a claim holds
// one, so that the kubelet does not know. It lets a device through whose holder is only ending: AwaitFree waits for
// that, since the kubelet calls Allocate under a lock. Take reads nothing. As long as the kubelet has never answered,
// it gives the devices that it knows nothing against: not every program that serves as a kubelet says which
// containers hold devices. Unknown says so meanwhile.
func (l *Ledger) Take(_ context.Context, resourceName string, devices []*resource.Device) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	// A claim that is about to be unprepared is not told from one that has just been prepared.
	lives := func(h *holder) bool { return h.claim != "" || h.state != Ending }
	for _, d := range devices {
		n := name{resourceName, d.ID}
		if why := cmp.Or(l.blocker(d, lives), l.unread(n)); why != "" {
			return fmt.Errorf("%s: %s", d.ID, why)
		}
	}
	unknown := false
	for _, d := range devices {
		n := name{resourceName, d.ID}
		l.books.given[n] = &given{at: time.Now()}
		unknown = unknown || !l.books.advertised[n]
	}
	l.stale = true
	if unknown { // the kubelet does not account for the name any more
		l.update()
	}
	return nil
}
