package ledger

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/resource"
)

var seeds = flag.Int("ledger.seeds", 200, "number of random histories")

// world is a kubelet and the plugins that run one after the other. Ours may also prepare claims, whose records survive
// a restart.
type world struct {
	t       *testing.T
	rand    *rand.Rand
	pods    []podresources.Holder // in the order of admission
	started int                   // the pods that the kubelet lists
	ending  []podresources.Holder // the pods that the kubelet has forgotten, and whose containers still run
	claims  map[string]Portion    // the prepared claims, by UID
	shared  int                   // how often a claim got a part of a GPU beside others
	next    int
	ledger  *Ledger // nil while another plugin runs
	offered []resource.Resource
	history []string
}

// forms are the ways in which a GPU is advertised.
var forms = []func(gpu string) (resourceName string, ids []string){
	func(gpu string) (string, []string) { return whole, []string{gpu} },
	func(gpu string) (string, []string) { return shared, []string{gpu + "::0", gpu + "::1"} },
	func(gpu string) (string, []string) { return whole, []string{gpu + "::0", gpu + "::1", gpu + "::2"} },
	func(gpu string) (string, []string) { return "example.com/gpu", []string{gpu} },
}

func (w *world) log(format string, args ...any) {
	w.history = append(w.history, fmt.Sprintf(format, args...))
}

// restart ends the plugin. The next plugin is ours or another one, whose allocations only the kubelet knows.
func (w *world) restart() {
	w.started = len(w.pods)
	w.ledger, w.ending = nil, nil // the ledger of a new process does not know what the kubelet has forgotten
	if w.rand.IntN(3) > 0 {
		w.ledger = newLedger(func() ([]podresources.Holder, error) { return w.listed(), nil })
		w.ledger.opts.InUse = func(_ context.Context, uuid string) (bool, error) { return w.uses(uuid), nil }
	}
	w.log("restart, ours: %t", w.ledger != nil)
	if w.ledger != nil {
		for uid, p := range w.claims {
			if w.rand.IntN(3) == 0 { // its record cannot be read
				w.ledger.LoseClaim(uid)
			} else {
				w.ledger.RestoreClaim(uid, uid, time.Now(), []Portion{p})
			}
		}
	}
	w.reload()
	if w.ledger != nil {
		read(w.t, w.ledger) // as Run begins
	}
}

// listed returns the pods that the kubelet lists.
func (w *world) listed() []podresources.Holder {
	list := slices.Clone(w.pods[:w.started])
	for uid, p := range w.claims {
		list = append(list, claimer(uid, p.Device.UUID))
	}
	return list
}

// reboot ends all containers.
func (w *world) reboot() {
	w.pods, w.claims = nil, map[string]Portion{}
	w.log("reboot")
	w.restart()
}

// uses reports whether a container runs with a device.
func (w *world) uses(uuid string) bool {
	return w.claimOf(uuid) != "" || w.podUses(uuid)
}

func (w *world) podUses(uuid string) bool {
	return slices.ContainsFunc(slices.Concat(w.pods, w.ending),
		func(h podresources.Holder) bool { return slices.Contains(h.UUIDs(), uuid) })
}

// claimOf returns the claim that has a GPU, or nothing.
func (w *world) claimOf(uuid string) string {
	for uid, p := range w.claims {
		if p.Device.UUID == uuid {
			return uid
		}
	}
	return ""
}

// reload advertises each GPU in a random form, or leaves it to claims.
func (w *world) reload() {
	byName, claimable := map[string][]string{}, offer(whole)
	for g := range 3 {
		if w.rand.IntN(3) == 0 {
			claimable.Devices = append(claimable.Devices, offer(whole, fmt.Sprint("GPU-", g)).Devices...)
			continue
		}
		if r, ids := forms[w.rand.IntN(len(forms))](fmt.Sprint("GPU-", g)); w.rand.IntN(5) > 0 {
			byName[r] = append(byName[r], ids...)
		}
	}
	w.offered = nil
	for _, r := range []string{whole, shared, "example.com/gpu"} {
		w.offered = append(w.offered, offer(r, byName[r]...))
	}
	w.log("advertise %v", byName)
	if w.ledger != nil {
		w.ledger.Offer(w.offered, claimable)
	}
}

// gpuMemory is the memory of each GPU.
const gpuMemory = 10

// claim has a claim prepared, for a GPU or a part of its memory. The scheduler knows nothing of the device plugin, so
// the claim may be refused.
func (w *world) claim() {
	if w.ledger == nil {
		return
	}
	w.next++
	uid, d := fmt.Sprint("claim", w.next), &offer(whole, fmt.Sprint("GPU-", w.rand.IntN(3))).Devices[0]
	d.MemoryBytes = gpuMemory
	p := Portion{Device: d}
	if w.rand.IntN(3) > 0 {
		p.Memory = w.rand.Uint64N(gpuMemory/2) + 1
	}
	err := w.ledger.TakeClaim(w.t.Context(), uid, uid, []Portion{p})
	w.log("%s wants %d bytes of %s: %v", uid, p.Memory, d.UUID, err)
	if err != nil {
		return
	}
	w.expectRoom(p)
	w.claims[uid] = p
}

// expectRoom checks that nothing uses a GPU of which a claim gets a portion, besides claims with other parts of its
// memory.
func (w *world) expectRoom(p Portion) {
	memory := p.Memory
	for uid, other := range w.claims {
		if other.Device.UUID != p.Device.UUID {
			continue
		}
		if p.Memory == 0 || other.Memory == 0 {
			w.t.Fatalf("a claim gets %s beside %s; the history is\n%q", p.Device.UUID, uid, w.history)
		}
		memory += other.Memory
	}
	if memory > gpuMemory {
		w.t.Fatalf("claims have %d bytes of %s; the history is\n%q", memory, p.Device.UUID, w.history)
	}
	if w.podUses(p.Device.UUID) {
		w.t.Fatalf("a claim gets %s, which a pod uses; the history is\n%q", p.Device.UUID, w.history)
	}
	if memory > p.Memory {
		w.shared++
	}
}

// unprepare ends a random claim.
func (w *world) unprepare() {
	for uid := range w.claims {
		delete(w.claims, uid)
		w.log("%s ends", uid)
		if w.ledger != nil {
			w.ledger.DropClaim(uid)
		}
		return
	}
}

// admit has the kubelet admit a pod. The kubelet admits one at a time, chooses among the healthy devices whose name no
// pod holds, and lists the pod some time later.
func (w *world) admit() {
	w.started = len(w.pods)
	r := &w.offered[w.rand.IntN(len(w.offered))]
	var free []*resource.Device
	for i := range r.Devices {
		d, n := &r.Devices[i], name{r.Name, r.Devices[i].ID}
		if !slices.ContainsFunc(w.pods, n.isOf) && (w.ledger == nil || w.ledger.Reason(d) == "" && w.ledger.Claim(d) == "") {
			free = append(free, d)
		}
	}
	if len(free) == 0 {
		return
	}
	d := free[w.rand.IntN(len(free))]
	if w.ledger != nil {
		if err := w.ledger.Take(w.t.Context(), r.Name, []*resource.Device{d}); err != nil {
			w.t.Fatalf("a device without a reason is refused: %v", err)
		}
		w.expectOneHolder(d)
	}
	w.next++
	w.pods = append(w.pods, holder(fmt.Sprint("p", w.next), r.Name, d.ID))
	w.log("pod p%d gets %s of %s", w.next, d.ID, r.Name)
}

// expectOneHolder checks that whoever holds a device holds it under a name that is advertised.
func (w *world) expectOneHolder(d *resource.Device) {
	if uid := w.claimOf(d.UUID); uid != "" {
		w.t.Fatalf("%s is given although %s has it; the history is\n%q", d.ID, uid, w.history)
	}
	for _, p := range slices.Concat(w.pods, w.ending) {
		for r, ids := range p.ByResource {
			for _, id := range ids {
				if resource.UUIDOf(id) == d.UUID && !w.advertised(name{r, id}) {
					w.t.Fatalf("%s is given although %s holds it as %s of %s; the history is\n%q",
						d.ID, p.String(), id, r, w.history)
				}
			}
		}
	}
}

func (w *world) advertised(n name) bool {
	return slices.ContainsFunc(w.offered, func(r resource.Resource) bool {
		return r.Name == n.resource &&
			slices.ContainsFunc(r.Devices, func(d resource.Device) bool { return d.ID == n.id })
	})
}

// end ends a random pod. The kubelet forgets it, and its containers may run for a while.
func (w *world) end() {
	if len(w.pods) == 0 {
		return
	}
	i := w.rand.IntN(len(w.pods))
	stays := w.rand.IntN(2) == 0
	if stays {
		w.ending = append(w.ending, w.pods[i])
	}
	w.log("%s ends, its containers still run: %t", w.pods[i].Pod, stays)
	w.pods = slices.Delete(w.pods, i, i+1)
	if i < w.started {
		w.started--
	}
}

// expectIdleGPUsAreFree checks that no device is withheld that no pod holds.
func (w *world) expectIdleGPUsAreFree() {
	for len(w.claims) > 0 {
		w.unprepare()
	}
	w.ending = nil
	time.Sleep(2 * gracePeriod)
	w.started = len(w.pods)
	if w.ledger == nil {
		return
	}
	read(w.t, w.ledger)
	for i := range w.offered {
		for j := range w.offered[i].Devices {
			d := &w.offered[i].Devices[j]
			held := slices.ContainsFunc(w.pods, func(h podresources.Holder) bool { return slices.Contains(h.UUIDs(), d.UUID) })
			if why := w.ledger.Reason(d) + w.ledger.Claim(d); why != "" && !held {
				w.t.Errorf("%s is idle, and withheld since %s; the history is\n%q", d.ID, why, w.history)
			}
		}
	}
}

// Whatever reloads, restarts, reboots and other plugins do, no device is given while a pod holds it under another name
// or a claim has it, and no claim gets a device that anything uses. Claims that share a device never have more than its
// memory.
func TestADeviceHasOneHolderInRandomHistories(t *testing.T) {
	shared := 0
	for seed := range *seeds {
		synctest.Test(t, func(t *testing.T) {
			w := &world{t: t, rand: rand.New(rand.NewPCG(uint64(seed), 0)), claims: map[string]Portion{}}
			w.restart()
			for range 40 {
				switch w.rand.IntN(17) {
				case 0:
					w.restart()
				case 10, 11, 14, 15, 16:
					w.claim()
				case 12:
					w.unprepare()
				case 13:
					if w.rand.IntN(4) == 0 {
						w.reboot()
					}
				case 1, 2:
					w.reload()
				case 3, 4:
					w.end()
				case 5:
					w.ending = nil
				case 6:
					if w.ledger != nil {
						read(t, w.ledger)
					}
				default:
					w.admit()
				}
			}
			shared += w.shared
			w.expectIdleGPUsAreFree()
		})
	}
	if shared < *seeds/2 {
		t.Errorf("%d histories have only %d claims that share a GPU", *seeds, shared)
	}
}
