package ledger

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/resource"
)

var (
	seeds     = flag.Int("ledger.seeds", 150, "number of random histories")
	firstSeed = flag.Int("ledger.first", 0, "seed of the first random history")
	verbose   = flag.Bool("ledger.history", false, "print the histories")
)

// model is a node with its kubelet and its pods, and what the API server and the scheduler know of them.
type model struct {
	t       *testing.T
	seed    int
	dir     string // of the files that a ledger keeps
	ctx     context.Context
	begun   time.Time
	rand    *rand.Rand // of the steps
	counts  map[string]int
	kubelet modelKubelet // guarded by mu
	group   sync.WaitGroup

	mu          sync.Mutex
	rand2       *rand.Rand
	gpus        [modelGPUs]modelGPU
	boot        int
	records     map[string]modelRecord // the claims' records on disk
	kept        map[string]bool        // what processes have written into the runtime directory, as in instance.seen
	claims      map[string]*modelClaim // all that ever were, by UID
	pods        []*pod
	instances   int
	current     *instance
	slices      []resource.Resource // what the scheduler knows
	admissions  chan *pod
	killAtTake  bool
	killed      chan struct{}
	hang        time.Duration // of the second resource's plugin
	hidden      *pod          // whose processes cannot be found out
	hiddenUntil time.Time
	calm        bool                    // only pods come and go, and processes hand over
	names       map[string]bool         // of pods, that were used
	manifests   map[string][]*container // of static pods, by UID
	next        int
	over        bool
	failure     string
	history     []string
}

func between(r *rand.Rand, a, b time.Duration) time.Duration {
	return a + time.Duration(r.Int64N(int64(b-a)+1))
}

func (w *model) sleepFor(d time.Duration) { time.Sleep(d) }

// goes runs f beside the others.
func (w *model) goes(f func()) { w.group.Go(f) }

func (w *model) randOf(n int) *rand.Rand {
	return rand.New(rand.NewPCG(uint64(w.seed), uint64(n)+uint64(time.Since(w.begun))<<20))
}

// note adds to the history. The caller has locked w.mu.
func (w *model) note(format string, args ...any) {
	w.history = append(w.history, fmt.Sprintf("%8.3f ", time.Since(w.begun).Seconds())+fmt.Sprintf(format, args...))
}

// fail records what is wrong. The caller has locked w.mu.
func (w *model) fail(format string, args ...any) {
	if w.failure == "" {
		w.failure = fmt.Sprintf(format, args...)
		w.note("FAILURE: %s", w.failure)
	}
}

func (w *model) isOver() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.over
}

func (w *model) failed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failure != ""
}

func (w *model) hangTime() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.hang
}

// count counts a step, if a device is held. The caller has locked w.mu.
func (w *model) count(kind string) {
	if slices.ContainsFunc(w.pods, func(p *pod) bool { return len(w.holds(p)) > 0 }) {
		w.counts[kind]++
	}
}

// countHeld counts a step that concerns a pod, if it holds a device.
func (w *model) countHeld(kind string, p *pod) {
	if len(w.holds(p)) > 0 {
		w.counts[kind]++
	}
}

// countStart counts what is special about a container that starts.
func (w *model) countStart(p *pod, c *container, devices []*grant, again bool) {
	w.note("%s/%s starts with %s", p.uid, c.name, describe(devices))
	if len(devices) == 0 {
		return
	}
	kinds := map[string]bool{
		"ordinary init container": c.kind == initContainer, "restartable init container": c.kind == restartableInit,
		"crash loop": again, "slow image pull": p.pull > 3*time.Second, "static pod": p.static,
	}
	for _, g := range devices {
		kinds["replica"] = kinds["replica"] || g.name.id != "" && g.name.id != g.uuid && !g.mps
		kinds["MPS"] = kinds["MPS"] || g.mps
		kinds["claim"] = kinds["claim"] || g.claim != ""
		kinds["share of a claim"] = kinds["share of a claim"] || g.memory > 0
		for _, q := range w.pods {
			for _, h := range w.holds(q) {
				if h.uuid == g.uuid && q != p {
					kinds["replicas of one device in two pods"] = kinds["replicas of one device in two pods"] || h.claim == ""
					kinds["shares of one device in two pods"] = kinds["shares of one device in two pods"] ||
						h.claim != "" && h.claim != g.claim && h.memory > 0
				}
			}
		}
	}
	for kind, is := range kinds {
		if is {
			w.counts[kind]++
		}
	}
}

func describe(list []*grant) string {
	var texts []string
	for _, g := range list {
		text := g.name.id
		if g.claim != "" {
			text = fmt.Sprintf("%s by %s (memory %d, admin %t)", g.uuid, g.claim, g.memory, g.admin)
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

// holds returns what a pod holds: the devices of its running containers, and those of containers that the kubelet
// starts without another choice.
func (w *model) holds(p *pod) []*grant {
	var list []*grant
	for _, devices := range p.running {
		list = append(list, devices...)
	}
	k := &w.kubelet
	if k.active(p) {
		for _, e := range k.book {
			if e.pod == p.uid {
				list = append(list, e.grants...)
			}
		}
		for _, c := range p.claims {
			if info := k.claims[c.uid]; info != nil && info.prepared && info.pods[p.uid] {
				list = append(list, c.grants...)
			}
		}
	}
	return slices.DeleteFunc(list, func(g *grant) bool { return g.lost })
}

// together reports whether two pods may have two devices at once: they are different, or the configuration shares them.
func together(one, two *grant) bool {
	switch {
	case one.parent != two.parent, one.admin, two.admin, one.claim != "" && one.claim == two.claim:
		return true
	case one.uuid != two.uuid:
		return one.uuid != one.parent && two.uuid != two.parent && apart(one.uuid, two.uuid)
	case one.claim != "" && two.claim != "":
		return one.memory > 0 && two.memory > 0
	case one.claim != "" || two.claim != "":
		return false
	}
	if one.at.After(two.at) {
		one, two = two, one
	}
	return one.name.resource == two.name.resource && one.name.id != two.name.id && two.names[one.name]
}

// check checks that no other pod has a device that a pod gets. The caller has locked w.mu.
func (w *model) check(p *pod, what string, devices []*grant) {
	memory := map[string]map[string]uint64{}
	for _, q := range w.pods {
		for _, h := range w.holds(q) {
			if memory[h.uuid] == nil {
				memory[h.uuid] = map[string]uint64{}
			}
			memory[h.uuid][h.claim] = h.memory
			for _, g := range devices {
				if q != p && !g.lost && !together(g, h) {
					w.fail("%s %s with %s, and %s (runs: %t, sandbox: %t) has %s", p.uid, what, describe([]*grant{g}), q.uid,
						len(q.running) > 0, q.sandbox, describe([]*grant{h}))
					w.noteLedger()
				}
			}
		}
	}
	for _, g := range devices {
		sum := uint64(0)
		for _, m := range memory[g.uuid] {
			sum += m
		}
		if sum > w.memoryOf(g.uuid) {
			w.fail("claims have %d of the memory of %s", sum, g.uuid)
		}
	}
}

func (w *model) memoryOf(uuid string) uint64 {
	if strings.HasPrefix(uuid, migPrefix) {
		return 10 * uint64(uuid[len("MIG-0000000")]-'0')
	}
	return 80
}

// loseWhatNobodyKnows marks devices as lost that running containers have and that nothing on the node says: the kubelet
// has lost its files, and the process, which may be nil, has not read them before.
func (w *model) loseWhatNobodyKnows(i *instance) {
	k := &w.kubelet
	known := map[*grant]bool{}
	book := k.book
	if !k.up {
		book = nil
		if k.content != nil && !k.damaged {
			book = k.content.entries
		}
	}
	for _, e := range book {
		for _, g := range e.grants {
			known[g] = true
		}
	}
	for _, c := range k.claimsFile {
		if len(c.Devices[modelDriver]) > 0 {
			for _, g := range w.claims[c.UID].grants {
				known[g] = true
			}
		}
	}
	for _, p := range w.pods {
		for name, devices := range p.running {
			for _, g := range devices {
				_, onDisk := w.records[g.claim]
				seen := func(by map[string]bool) bool {
					return g.claim != "" && by[g.claim] || g.claim == "" && by[p.uid+"/"+name]
				}
				inProcess := false
				if i != nil && !i.dead {
					_, recorded := i.records[g.claim]
					inProcess = recorded || seen(i.seen)
				}
				inProcess = inProcess || seen(w.kept)
				if !known[g] && !onDisk && !inProcess && !g.lost {
					g.lost = true
					w.note("nothing says any more that %s has %s", p.uid, describe([]*grant{g}))
				}
			}
		}
	}
}

// remove removes a pod from the API. The caller has locked w.mu.
func (w *model) remove(p *pod) {
	p.api = false
	w.release(p)
}

// release has the API server and the scheduler take the claims of a pod for free, unless another one has them.
func (w *model) release(p *pod) {
	for _, c := range p.claims {
		delete(c.reserved, p.uid)
		if len(c.reserved) == 0 {
			c.allocated = false
		}
	}
}

// schedule chooses devices for a claim that the API server has as free and untainted, or returns nil.
func (w *model) schedule(uid string) []*grant {
	used, parts := map[string]bool{}, map[string]uint64{}
	for _, c := range w.claims {
		for _, g := range c.grants {
			if c.allocated && !g.admin {
				used[g.uuid] = used[g.uuid] || g.memory == 0
				parts[g.uuid] += g.memory
			}
		}
	}
	var free []*grant
	seen := map[string]bool{}
	for _, r := range w.slices {
		for _, d := range r.Devices {
			if seen[d.UUID] || !d.Healthy {
				continue
			}
			seen[d.UUID] = true
			g := &grant{uuid: d.UUID, parent: d.Parent, claim: uid, at: time.Now()}
			switch {
			case w.rand.IntN(15) == 0:
				g.admin = true
			case used[d.UUID]:
				continue
			case d.Shared():
				g.memory = 1 + w.rand.Uint64N(d.MemoryBytes/2)
				if parts[d.UUID]+g.memory > d.MemoryBytes {
					continue
				}
			}
			free = append(free, g)
		}
	}
	if len(free) == 0 {
		return nil
	}
	w.rand.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
	return free[:min(len(free), 1+w.rand.IntN(5)/4)]
}

// submit makes a pod.
func (w *model) submit() { w.make(0) }

// make makes a pod, or nil if there are no devices that it could ask for. If the time that its sandbox takes is not
// zero, only an init container of the pod has devices.
func (w *model) make(network time.Duration) *pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.rand
	w.next++
	p := &pod{
		w: w, uid: fmt.Sprintf("pod-%d", w.next), running: map[string][]*grant{}, signal: make(chan struct{}), api: true,
		pull: between(r, 0, 500*time.Millisecond), network: between(r, 50*time.Millisecond, 500*time.Millisecond),
		runs: between(r, time.Second, 90*time.Second), crashes: r.IntN(3) > 0, grace: between(r, 0, 4*time.Second),
		rand: rand.New(rand.NewPCG(uint64(w.seed), uint64(w.next))),
	}
	p.name = p.uid
	if r.IntN(4) == 0 {
		p.pull = between(r, 4*time.Second, 40*time.Second)
	}
	if r.IntN(3) == 0 {
		p.network = between(r, 2*time.Second, 30*time.Second)
	}
	p.network = max(p.network, network)
	if p.crashes && r.IntN(2) == 0 {
		p.runs = between(r, 200*time.Millisecond, 5*time.Second)
	}
	if r.IntN(4) == 0 {
		p.grace = between(r, time.Minute, 3*time.Minute)
	}
	byClaim := len(w.slices) > 0 && r.IntN(2) == 0 && network == 0
	if name := fmt.Sprintf("set-%d", r.IntN(3)); r.IntN(3) == 0 &&
		!slices.ContainsFunc(w.pods, func(q *pod) bool { return q.api && q.name == name }) {
		if w.names[name] {
			w.count("name of a StatefulSet's pod again")
		}
		p.name, w.names[name] = name, true
	} else if uid := fmt.Sprintf("static-%d", r.IntN(3)); !byClaim && !w.calm && r.IntN(4) == 0 {
		if network > 0 || slices.ContainsFunc(w.pods, func(q *pod) bool { return q.uid == uid }) {
			return nil
		}
		p.static, p.uid, p.name = true, uid, uid
	}
	if byClaim {
		w.addClaims(p)
		if len(p.claims) == 0 {
			return nil
		}
		p.containers = append(p.containers, &container{name: "main"})
	} else if manifest := w.manifests[p.uid]; manifest != nil {
		p.containers = manifest // the UID of a static pod is a hash of it
	} else {
		w.addContainers(p, network > 0)
		if p.static {
			w.manifests[p.uid] = p.containers
		}
	}
	if w.calm {
		if !w.fits(p) {
			return nil
		}
		// A start that waits for an earlier pod delays the end of its own, also if that is deleted by force.
		p.grace, p.crashes, p.initFails = min(p.grace, endingSoon/2), false, 0
	}
	w.pods = append(w.pods, p)
	w.note("%s (%s) is made: %s", p.uid, p.name, p.describe())
	if w.kubelet.up && (w.kubelet.ready || p.static) {
		w.kubelet.know(p)
	}
	w.goes(p.live)
	return p
}

func (p *pod) describe() string {
	var texts []string
	for _, c := range p.containers {
		texts = append(texts, fmt.Sprintf("%s %d of %s", c.name, c.count, c.resource))
	}
	for _, c := range p.claims {
		texts = append(texts, describe(c.grants))
	}
	return strings.Join(texts, ", ")
}

// addClaims gives a pod a new claim, or one that another pod has.
func (w *model) addClaims(p *pod) {
	r := w.rand
	if r.IntN(6) == 0 {
		for _, q := range w.pods {
			if q.api && !q.deleting && !q.terminal && len(q.claims) > 0 && q.claims[0].allocated {
				p.claims = q.claims
				q.claims[0].reserved[p.uid] = true
				return
			}
		}
	}
	uid := fmt.Sprintf("claim-%d", w.next)
	grants := w.schedule(uid)
	if grants == nil {
		return
	}
	c := &modelClaim{
		uid: uid, bare: uid, name: "default/" + uid, grants: grants, allocated: true, reserved: map[string]bool{p.uid: true},
		second: r.IntN(4) == 0, locks: map[*instance]chan struct{}{},
	}
	w.claims[uid] = c
	p.claims = []*modelClaim{c}
}

// addContainers gives a pod containers with devices of the device plugin, or only an ordinary init container, which
// PodResources does not list.
func (w *model) addContainers(p *pod, onlyInit bool) {
	r := w.rand
	names := slices.Sorted(maps.Keys(w.kubelet.healthy))
	names = slices.DeleteFunc(names, func(n string) bool { return len(w.kubelet.healthy[n]) == 0 })
	res := modelWhole
	if len(names) > 0 {
		res = names[r.IntN(len(names))]
	}
	add := func(name string, kind containerKind, most int) {
		p.containers = append(p.containers, &container{name, kind, res, 1 + r.IntN(most), r.IntN(4) == 0})
	}
	if r.IntN(4) == 0 && !onlyInit {
		add("side", restartableInit, 1)
	}
	if r.IntN(3) == 0 || onlyInit {
		add("init", initContainer, 2)
		p.initFails = max(0, r.IntN(5)-2)
		if r.IntN(4) == 0 {
			p.initFails = 20
		}
	}
	if r.IntN(6) == 0 && !onlyInit {
		add("beside", mainContainer, 1)
	}
	most := 2
	if len(p.containers) > 0 {
		most = 1
	}
	add("main", mainContainer, most)
	if len(p.containers) > 1 && r.IntN(4) == 0 || onlyInit {
		p.containers[len(p.containers)-1].count = 0 // only an init container has devices
	}
}

// delete deletes a pod.
func (w *model) delete(p *pod, force bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !p.api || p.forced || p.deleting && !force {
		return
	}
	w.note("%s is deleted, by force: %t", p.uid, force)
	p.deleting = true
	if force {
		if len(p.running) > 0 {
			w.countHeld("deletion by force", p)
			if p.grace > 10*time.Second {
				w.countHeld("processes for minutes after a deletion by force", p)
			}
		}
		p.forced = true
		w.remove(p)
		delay := between(w.rand2, 0, 100*time.Millisecond)
		if w.calm { // the scheduler would not have had the devices before the kubelet
			delete(w.kubelet.known, p.uid)
		}
		w.goes(func() {
			w.sleepFor(delay)
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.kubelet.up {
				delete(w.kubelet.known, p.uid)
			}
		})
	} else {
		w.countHeld("deletion", p)
		p.grace = min(p.grace, 30*time.Second)
	}
	p.notify()
}

// pick returns a pod of the API, or nil.
func (w *model) pick() *pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	var list []*pod
	for _, p := range w.pods {
		if p.api && !p.deleting {
			list = append(list, p)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return list[w.rand.IntN(len(list))]
}

// replaceKilled starts a process if the last one was killed.
func (w *model) replaceKilled() {
	select {
	case <-w.killed:
		w.replace("", nil)
	default:
	}
}

// step does something at random.
func (w *model) step() {
	w.replaceKilled()
	weights := 0
	for _, s := range modelSteps {
		weights += s.weight
	}
	n := w.rand.IntN(weights)
	for _, s := range modelSteps {
		if n -= s.weight; n < 0 {
			s.do(w)
			return
		}
	}
}

func (w *model) pause(a, b time.Duration) { w.sleepFor(between(w.rand, a, b)) }

// replace ends the process, and starts another one after a time, with a configuration.
func (w *model) replace(kind string, change func(*modelConfig)) {
	w.mu.Lock()
	if kind != "" {
		w.count(kind)
	}
	w.note("instance %d ends: %s", w.current.number, kind)
	w.current.kill()
	c := w.current.config
	w.mu.Unlock()
	if change != nil {
		change(&c)
	}
	w.pause(100*time.Millisecond, 3*time.Second)
	w.start(c)
}

// reload changes the configuration of the process.
func (w *model) reload(kind string, change func(*modelConfig)) {
	w.mu.Lock()
	w.count(kind)
	i := w.current
	change(&i.config)
	w.note("%s:%s", kind, i.config.String())
	w.mu.Unlock()
	i.publish()
}

// loseOnce gives the devices of a pod that has no process yet to the other door, and has the kubelet write a state
// without that pod once. Claims are then made for its devices.
func (w *model) loseOnce() {
	p := w.make(30 * time.Second)
	w.pause(100*time.Millisecond, 6*time.Second)
	w.mu.Lock()
	starting := p != nil && p.admitted && !p.sandbox && w.kubelet.up
	if starting {
		w.kubelet.without = p.uid
		w.count("stale checkpoint under a pod that is starting")
		w.note("the kubelet is about to lose %s once: %s", p.uid, p.describe())
	}
	w.mu.Unlock()
	if !starting {
		return
	}
	w.replace("label changes the doors", func(c *modelConfig) { c.byDRA = [modelGPUs]bool{true, true, true} })
	for range 12 {
		w.pause(100*time.Millisecond, 600*time.Millisecond)
		w.submit()
	}
	w.replace("label changes the doors", func(c *modelConfig) { c.chooseDoors(w.rand) })
}

// repartition changes the MIG devices of a GPU.
func (w *model) repartition(kind string, change func(*modelGPU) bool) {
	w.mu.Lock()
	n := w.rand.IntN(modelGPUs)
	if change(&w.gpus[n]) {
		for _, p := range w.pods {
			if slices.ContainsFunc(w.holds(p), func(g *grant) bool { return g.parent == modelGPUUUID(n) }) {
				w.counts[kind]++
				break
			}
		}
	}
	w.note("%s: GPU %d is %v", kind, n, w.gpus[n])
	w.mu.Unlock()
	w.pause(0, 2*time.Second)
	w.current.publish()
}

// handOver starts a process beside the other one.
func (w *model) handOver() {
	w.mu.Lock()
	w.count("hand-over")
	old := w.current
	c := old.config
	w.note("instance %d hands over", old.number)
	old.retired = true
	w.mu.Unlock()
	switch n := w.rand.IntN(3); {
	case w.calm:
	case n == 0:
		c.chooseDoors(w.rand)
	case n == 1:
		c.chooseForms(w.rand)
	}
	old.endRun()
	i := w.startBeside(c, true)
	for range w.rand.IntN(4) {
		w.submit()
		w.pause(50*time.Millisecond, 500*time.Millisecond)
	}
	w.pause(500*time.Millisecond, 3*time.Second)
	w.mu.Lock()
	old.kill()
	w.note("instance %d has ended", old.number)
	w.mu.Unlock()
	i.restoreAgain()
}

// restartKubelet restarts the kubelet after a change of its files.
func (w *model) restartKubelet(kind string, change func(k *modelKubelet)) {
	k := &w.kubelet
	w.mu.Lock()
	w.count(kind)
	w.note("the kubelet ends: %s", kind)
	k.stop()
	change(k)
	w.mu.Unlock()
	w.pause(100*time.Millisecond, 3*time.Second)
	if w.rand.IntN(4) == 0 {
		w.mu.Lock()
		k.noSocket = true
		w.mu.Unlock()
		w.pause(time.Millisecond, 300*time.Millisecond)
	}
	late := between(w.rand, 100*time.Millisecond, 2*time.Second)
	if w.rand.IntN(2) == 0 {
		late = between(w.rand, 2*time.Second, 30*time.Second)
	}
	w.mu.Lock()
	w.note("the kubelet starts, and knows all pods after %s", late)
	k.begin(late)
	w.mu.Unlock()
}

// emptyRun removes what processes keep in the runtime directory.
func (w *model) emptyRun() {
	w.mu.Lock()
	clear(w.kept)
	w.mu.Unlock()
	for _, file := range []string{"parents.json", "holders.json"} {
		_ = os.Remove(filepath.Join(w.dir, file))
	}
}

// reboot boots the node.
func (w *model) reboot() {
	w.mu.Lock()
	w.count("reboot")
	w.note("the node boots")
	w.kubelet.stop()
	w.current.kill()
	c := w.current.config
	w.boot++
	for _, p := range w.pods {
		clear(p.running)
		p.sandbox = false
		p.notify()
	}
	for g := range w.gpus {
		if w.rand.IntN(2) == 0 {
			w.gpus[g].layout = w.rand.IntN(len(modelLayouts))
		}
	}
	w.mu.Unlock()
	w.emptyRun()
	w.pause(time.Second, 5*time.Second)
	begin := func() {
		w.mu.Lock()
		w.kubelet.begin(between(w.rand, 100*time.Millisecond, 10*time.Second))
		w.mu.Unlock()
	}
	if w.rand.IntN(2) == 0 {
		w.start(c)
		w.pause(0, 3*time.Second)
		begin()
	} else {
		begin()
		w.pause(0, 3*time.Second)
		w.start(c)
	}
}

// modelSteps are the steps, by how often they happen.
var modelSteps = []struct {
	weight int
	do     func(w *model)
}{
	{60, (*model).submit},
	{14, func(w *model) {
		if p := w.pick(); p != nil {
			w.delete(p, false)
		}
	}},
	{12, func(w *model) {
		if p := w.pick(); p != nil && !p.static {
			w.delete(p, true)
		}
	}},
	{4, func(w *model) {
		w.replace("label changes the doors", func(c *modelConfig) { c.chooseDoors(w.rand) })
	}},
	{4, func(w *model) {
		w.reload("label changes the sharing", func(c *modelConfig) { c.chooseForms(w.rand) })
	}},
	{2, func(w *model) { w.reload("reload", func(*modelConfig) {}) }},
	{4, func(w *model) {
		w.repartition("MIG off", func(g *modelGPU) bool { was := g.mig; g.mig = false; return was })
	}},
	{3, func(w *model) {
		layout := w.rand.IntN(len(modelLayouts) - 1)
		w.repartition("MIG on", func(g *modelGPU) bool { was := g.mig; g.mig, g.layout = true, layout; return !was })
	}},
	{4, func(w *model) {
		layout := w.rand.IntN(len(modelLayouts) - 1)
		w.repartition("MIG repartitioned", func(g *modelGPU) bool {
			changed := g.mig && g.layout != layout
			g.layout = layout
			return changed
		})
	}},
	{3, (*model).handOver},
	{5, (*model).loseOnce},
	{2, func(w *model) { w.replace("SIGKILL", nil) }},
	{3, func(w *model) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.killAtTake = true
	}},
	{2, func(w *model) {
		w.mu.Lock()
		w.note("the state directory is lost")
		clear(w.records)
		w.mu.Unlock()
		_ = os.Remove(filepath.Join(w.dir, "forgotten.json"))
		if w.rand.IntN(3) > 0 {
			w.replace("state directory lost", nil)
		}
	}},
	{2, func(w *model) {
		w.emptyRun()
		w.replace("/run emptied", nil)
	}},
	{2, (*model).reboot},
	{2, func(w *model) { w.restartKubelet("kubelet restarted with late sources", func(*modelKubelet) {}) }},
	{2, func(w *model) {
		w.restartKubelet("checkpoint absent", func(k *modelKubelet) { k.content, k.damaged = nil, false })
	}},
	{1, func(w *model) { // until the kubelet writes it again
		w.mu.Lock()
		defer w.mu.Unlock()
		w.count("checkpoint absent")
		w.kubelet.content, w.kubelet.damaged = nil, false
	}},
	{2, func(w *model) {
		w.restartKubelet("checkpoint damaged", func(k *modelKubelet) { k.damaged = k.content != nil; k.version++ })
	}},
	{1, func(w *model) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.count("checkpoint damaged")
		w.kubelet.damaged = w.kubelet.content != nil
		w.kubelet.version++
	}},
	{1, func(w *model) {
		w.restartKubelet("checkpoint stale", func(k *modelKubelet) {
			if n := len(k.older); n > 2 {
				k.content, k.damaged = k.older[n-2-w.rand.IntN(min(n-2, 8))], false
				k.version++
			}
		})
	}},
	{2, func(w *model) {
		w.restartKubelet("dra_manager_state removed", func(k *modelKubelet) { k.claimsFile = nil })
	}},
	{3, func(w *model) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.hang = 0
		if w.rand.IntN(2) == 0 {
			w.hang = between(w.rand, 2*time.Second, 20*time.Second)
		}
	}},
	{4, func(w *model) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.count("kubelet that does not answer")
		w.kubelet.mute = time.Now().Add(between(w.rand, time.Second, 15*time.Second))
		w.note("the kubelet does not answer for %s", time.Until(w.kubelet.mute))
	}},
	{2, func(w *model) {
		p := w.pick()
		w.mu.Lock()
		defer w.mu.Unlock()
		if p != nil && time.Now().After(w.hiddenUntil.Add(time.Minute)) {
			w.hidden, w.hiddenUntil = p, time.Now().Add(between(w.rand, time.Second, 20*time.Second))
			w.note("it is unknown whether %s has processes", p.uid)
		}
	}},
}

// modelKinds are what must have happened often enough.
var modelKinds = []string{
	"label changes the doors", "label changes the sharing", "reload", "MIG off", "MIG on", "MIG repartitioned",
	"hand-over",
	"SIGKILL", "SIGKILL between Take and the kubelet's write", "state directory lost", "/run emptied", "reboot",
	"kubelet restarted with late sources", "checkpoint absent", "checkpoint damaged", "checkpoint stale",
	"stale checkpoint under a pod that is starting",
	"kubelet that does not answer", "dra_manager_state removed", "second resource whose plugin hangs", "deletion",
	"deletion by force",
	"processes for minutes after a deletion by force", "finished and not deleted", "name of a StatefulSet's pod again",
	"ordinary init container", "restartable init container", "crash loop", "slow image pull", "static pod", "replica",
	"MPS",
	"claim", "share of a claim", "replicas of one device in two pods", "shares of one device in two pods",
}

// begin starts the kubelet and a process on a node with GPUs of any kind, which are shared in any way.
func (w *model) begin(c modelConfig) {
	w.mu.Lock()
	c.chooseForms(w.rand)
	for g := range w.gpus {
		w.gpus[g] = modelGPU{w.rand.IntN(3) == 0, w.rand.IntN(len(modelLayouts))}
	}
	w.kubelet.begin(time.Second)
	w.mu.Unlock()
	w.goes(w.admit)
	w.start(c)
}

// live is a random history.
func (w *model) live() {
	var c modelConfig
	c.chooseDoors(w.rand)
	w.begin(c)
	w.pause(0, 5*time.Second)
	for range 120 {
		w.step()
		w.sweep()
		if w.failed() {
			return
		}
		w.pause(50*time.Millisecond, 3*time.Second)
	}
	w.end()
}

// liveCalmly is a history in which only pods come and go, and processes hand over. It has no static pods: one that is
// made again at once has the UID of before, so its processes keep what it had before.
func (w *model) liveCalmly() {
	w.calm = true
	w.begin(modelConfig{})
	w.sleepFor(20 * time.Second)
	for range 150 {
		p, n := w.pick(), w.rand.IntN(20)
		switch {
		case n < 12:
			w.submit()
		case n == 19:
			w.handOver()
		case p != nil:
			w.mu.Lock()
			runs := p.running["main"] != nil
			w.mu.Unlock()
			w.delete(p, runs && w.rand.IntN(2) == 0)
		}
		w.sweep()
		if w.failed() {
			return
		}
		w.pause(0, 3*time.Second)
	}
	w.end()
}

// fits reports whether the scheduler finds devices for a pod, beside those of the pods that are not over for it. The
// caller has locked w.mu.
func (w *model) fits(p *pod) bool {
	has, wants := map[string]int{}, p.request()
	for _, r := range w.current.plugin {
		has[r.Name] = len(r.Devices)
	}
	for _, q := range w.pods {
		if q.api && !q.terminal {
			for r, n := range q.request() {
				has[r] -= n
			}
		}
	}
	for r, n := range wants {
		if has[r] < n {
			return false
		}
	}
	return true
}

// request returns how many devices of each resource a pod needs at most at a time, as the scheduler counts them.
func (p *pod) request() map[string]int {
	most, kept := map[string]int{}, map[string]int{}
	for _, c := range p.containers {
		if c.kind == initContainer {
			most[c.resource] = max(most[c.resource], kept[c.resource]+c.count)
		} else {
			kept[c.resource] += c.count
		}
	}
	for r, n := range kept {
		most[r] = max(most[r], n)
	}
	return most
}

// sweep removes pods that are gone.
func (w *model) sweep() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pods = slices.DeleteFunc(w.pods, func(p *pod) bool { return p.done })
	for _, p := range w.pods {
		if p.terminal {
			w.release(p) // as the controller of claims does
		}
	}
}

// end deletes all pods. When they have ended, all devices are free after a minute.
func (w *model) end() {
	w.mu.Lock()
	w.note("all pods are deleted")
	w.hang, w.killAtTake = 0, false
	list := slices.Clone(w.pods)
	w.mu.Unlock()
	w.replaceKilled()
	for _, p := range list {
		w.delete(p, !p.static && w.rand.IntN(2) == 0)
	}
	for deadline := time.Now().Add(15 * time.Minute); ; w.sleepFor(time.Second) {
		w.sweep()
		w.mu.Lock()
		left := len(w.pods)
		if left > 0 && time.Now().After(deadline) {
			w.fail("%s does not end", w.pods[0].uid)
		}
		w.mu.Unlock()
		if left == 0 || w.failed() {
			break
		}
	}
	w.sleepFor(time.Minute)
	w.expectAllFree()
}

// expectAllFree expects that each device can be given.
func (w *model) expectAllFree() {
	i := w.current
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, list := range [][]resource.Resource{i.plugin, i.claimable} {
		for _, r := range list {
			for _, d := range r.Devices {
				if !d.Healthy {
					why, ending := i.ledger.Reason(&d)
					w.fail("%s of %s is unhealthy: %s (now: %q, ending: %t, claim %q, unread %q)", d.ID, r.Name, d.Reason, why,
						ending, i.ledger.Claim(&d), i.ledger.Unread(r.Name, &d))
					for uid := range i.records {
						abandoned, err := i.ledger.IsAbandoned(uid)
						w.note("record %s: abandoned: %t (%v), allocated: %t", uid, abandoned, err, w.claims[uid].allocated)
					}
					w.noteLedger()
				}
			}
		}
	}
	for _, r := range i.plugin {
		for _, d := range r.Devices {
			if !w.kubelet.healthy[r.Name][d.ID] {
				w.fail("the kubelet does not know that %s of %s is healthy", d.ID, r.Name)
			}
		}
	}
	all, config := i.all, i.config
	w.unlocked(func() {
		if text := i.ledger.Unknown() + i.ledger.Unrecognised(); text != "" {
			w.mu.Lock()
			w.fail("still unknown: %s", text)
			w.mu.Unlock()
		}
		_, claimable := config.split(all)
		for _, r := range claimable {
			for _, d := range r.Devices {
				ctx, cancel := context.WithTimeout(w.ctx, time.Second)
				err := i.ledger.TakeClaim(ctx, Claim{UID: "probe", Name: "default/probe", Portions: []Portion{{Device: &d}}})
				cancel()
				i.ledger.DropClaim("probe")
				if err != nil {
					w.mu.Lock()
					w.fail("a claim cannot have %s: %v", d.UUID, err)
					w.mu.Unlock()
				}
			}
		}
	})
}

// Whatever happens to pods, to the kubelet and to this program, a device has two holders only if the configuration
// shares it, and when all pods have ended all devices are free.
func TestNoDeviceIsGivenTwice(t *testing.T) {
	counts := map[string]int{}
	for seed := *firstSeed; seed < *firstSeed+*seeds; seed++ {
		if runModel(t, seed, counts, (*model).live); t.Failed() {
			return
		}
	}
	for _, kind := range modelKinds {
		t.Logf("%5d %s", counts[kind], kind)
		if counts[kind] < 50 && *seeds >= 150 {
			t.Errorf("%s: only %d times in %d histories", kind, counts[kind], *seeds)
		}
	}
}

// Where only pods come and go and processes hand over, the kubelet admits each pod for which the scheduler finds
// devices: a pod that is not admitted fails for good.
func TestNoPodFailsAtItsAdmission(t *testing.T) {
	counts := map[string]int{}
	for seed := *firstSeed; seed < *firstSeed+*seeds/3; seed++ {
		if runModel(t, seed, counts, (*model).liveCalmly); t.Failed() {
			return
		}
	}
	for _, kind := range []string{"device of a pod that still has processes", "hand-over"} {
		t.Logf("%5d %s", counts[kind], kind)
		if counts[kind] < 50 && *seeds >= 150 {
			t.Errorf("%s: only %d times in %d histories", kind, counts[kind], *seeds/3)
		}
	}
}

// runModel runs the history of a seed.
func runModel(t *testing.T, seed int, counts map[string]int, live func(*model)) {
	t.Helper()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		w := &model{
			t: t, seed: seed, dir: dir, ctx: ctx, begun: time.Now(), counts: counts,
			rand: rand.New(rand.NewPCG(uint64(seed), 0)), rand2: rand.New(rand.NewPCG(uint64(seed), 1)),
			kept: map[string]bool{}, records: map[string]modelRecord{}, claims: map[string]*modelClaim{},
			killed:     make(chan struct{}, 100),
			admissions: make(chan *pod, 10_000),
			names:      map[string]bool{}, manifests: map[string][]*container{},
		}
		w.kubelet = modelKubelet{w: w, cancel: func() {}, claims: map[string]*claimInfo{}}
		live(w)
		w.mu.Lock()
		w.over = true
		history, failure := w.history, w.failure
		for _, p := range w.pods {
			p.notify()
		}
		w.mu.Unlock()
		cancel()
		w.group.Wait()
		if failure != "" {
			t.Errorf("seed %d: %s\n%s", seed, failure, strings.Join(history[max(0, len(history)-250):], "\n"))
		} else if *verbose {
			t.Log(strings.Join(history, "\n"))
		}
	})
}

// noteLedger adds what the current process knows to the history. The caller has locked w.mu.
func (w *model) noteLedger() {
	l := w.current.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	for uid, c := range l.books.claims {
		w.note("claim %s %+v", uid, *c)
	}
	for uid, c := range l.books.dropped {
		w.note("dropped %s %+v", uid, c)
	}
	for k, e := range l.books.entries {
		w.note("entry %v %+v", k, *e)
	}
	for _, h := range l.held {
		w.note("held %+v", h)
	}
	b := l.books
	w.note("read %d fresh %d silent %d err %v waiting %d version %v", b.read, b.refreshes, b.silent, l.err, l.waiting,
		l.version)
	w.note("processes %+v", b.processes)
}
