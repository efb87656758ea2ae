package ledger

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// The pods of the model, and what the kubelet does for each: it has the claims prepared, makes a sandbox, starts the
// containers, and ends them.

type containerKind int

const (
	mainContainer containerKind = iota
	initContainer
	restartableInit
)

// container is a container of a pod.
type container struct {
	name     string
	kind     containerKind
	resource string // of the device plugin
	count    int    // how many devices it gets
	second   bool   // whether it also has a resource of another plugin
}

// modelClaim is a ResourceClaim of the API.
type modelClaim struct {
	uid, bare, name string // name is "default/BARE"
	grants          []*grant
	second          bool // whether it also has a device of another driver
	reserved        map[string]bool
	allocated       bool

	mu    sync.Mutex
	locks map[*instance]chan struct{}
}

// lock waits until nobody else works on the claim: the kubelet (nil), or a process.
func (c *modelClaim) lock(i *instance) (unlock func()) {
	c.mu.Lock()
	lock := c.locks[i]
	if lock == nil {
		lock = make(chan struct{}, 1)
		c.locks[i] = lock
	}
	c.mu.Unlock()
	lock <- struct{}{}
	return func() { <-lock }
}

// pod is a pod. What follows w is guarded by w.mu.
type pod struct {
	uid, name  string
	static     bool
	containers []*container
	claims     []*modelClaim
	pull       time.Duration // of the images
	network    time.Duration // the time to make the sandbox
	runs       time.Duration // how long the main containers run
	crashes    bool          // whether they crash then, or complete
	initFails  int           // how often an init container crashes before it completes
	grace      time.Duration // how long the processes run on after the deletion
	rand       *rand.Rand    // of its goroutine

	w        *model
	api      bool // it is in the API, or its manifest in the kubelet's directory
	deleting bool
	forced   bool
	terminal bool // completed, failed, or not admitted
	admitted bool
	again    bool                // it was admitted before
	sandbox  bool                // has a process
	running  map[string][]*grant // the containers that run, with their devices
	boot     int
	ended    bool // no process is left
	done     bool // the kubelet does nothing for it any more
	signal   chan struct{}
}

func (p *pod) container(name string) *container {
	for _, c := range p.containers {
		if c.name == name {
			return c
		}
	}
	return nil
}

// has reports whether a process of the pod has one of these devices. The caller has locked w.mu.
func (p *pod) has(devices []*grant) bool {
	for _, own := range p.running {
		for _, g := range own {
			if slices.ContainsFunc(devices, func(d *grant) bool { return d.uuid == g.uuid }) {
				return true
			}
		}
	}
	return false
}

// notify wakes the goroutine of the pod. The caller has locked w.mu.
func (p *pod) notify() {
	close(p.signal)
	p.signal = make(chan struct{})
}

// stopped reports whether the kubelet starts nothing for the pod any more. The caller has locked w.mu.
func (p *pod) stopped() bool {
	return p.deleting || p.forced || p.terminal || p.boot != p.w.boot || p.w.over
}

// sleep waits, and returns false if the pod is to end, or the node has booted anew.
func (p *pod) sleep(d time.Duration) bool {
	return p.await(d, func() bool { return false })
}

// await waits until a condition holds, but not longer than d. It returns false if the pod is to end.
func (p *pod) await(d time.Duration, condition func() bool) bool {
	end := time.Now().Add(d)
	for {
		p.w.mu.Lock()
		stopped, holds, signal := p.stopped(), condition(), p.signal
		p.w.mu.Unlock()
		switch rest := time.Until(end); {
		case stopped:
			return false
		case holds, rest <= 0:
			return true
		default:
			select {
			case <-signal:
			case <-time.After(rest):
			}
		}
	}
}

// live is the life of the pod.
func (p *pod) live() {
	for {
		p.w.mu.Lock()
		p.boot = p.w.boot
		p.w.mu.Unlock()
		p.run()
		p.w.mu.Lock()
		rebooted := p.boot != p.w.boot && !p.deleting && !p.forced && !p.terminal && !p.w.over
		p.w.mu.Unlock()
		if !rebooted {
			break
		}
	}
	p.terminate()
}

// ready reports whether the kubelet works on the pod. The caller has locked w.mu.
func (p *pod) ready() bool { return p.w.kubelet.up && p.w.kubelet.known[p.uid] && p.admitted }

// run starts the containers, and returns when the pod is to end or the node has booted anew.
func (p *pod) run() {
	if !p.awaitKubelet() || !p.prepare() {
		return
	}
	if !p.sleep(p.network) || !p.awaitKubelet() {
		return
	}
	p.w.mu.Lock()
	p.sandbox = !p.stopped()
	p.w.mu.Unlock()
	if !p.sleep(p.pull) {
		return
	}
	for _, c := range p.containers {
		if c.kind != mainContainer && !p.init(c) {
			return
		}
	}
	for first := true; ; first = false {
		for n, c := range p.containers {
			if c.kind == mainContainer && (first || n == len(p.containers)-1) && !p.start(c, !first) {
				return
			}
		}
		if !p.sleep(p.runs) {
			return
		}
		if !p.crashes {
			p.finish()
			return
		}
		p.stopContainer(p.containers[len(p.containers)-1])
		if !p.sleep(between(p.rand, time.Second, 15*time.Second)) {
			return
		}
	}
}

// awaitKubelet waits until the kubelet works on the pod.
func (p *pod) awaitKubelet() bool {
	for {
		ready := false
		if !p.await(time.Second, func() bool { ready = p.ready(); return ready }) {
			return false
		}
		if ready {
			return true
		}
	}
}

// prepare has the claims prepared.
func (p *pod) prepare() bool {
	for _, c := range p.claims {
		for p.w.kubelet.prepareClaim(p, c) != nil {
			if !p.sleep(between(p.rand, time.Second, 30*time.Second)) || !p.awaitKubelet() {
				return false
			}
		}
	}
	return true
}

// init runs an init container.
func (p *pod) init(c *container) bool {
	for fails := p.initFails; ; fails-- {
		if !p.start(c, fails < p.initFails) {
			return false
		}
		if c.kind == restartableInit {
			return true
		}
		if !p.sleep(between(p.rand, 200*time.Millisecond, 12*time.Second)) {
			return false
		}
		p.stopContainer(c)
		if fails <= 0 {
			return true
		}
		if !p.sleep(between(p.rand, 500*time.Millisecond, 8*time.Second)) {
			return false
		}
	}
}

// start starts a container: its devices are those of the kubelet's book now.
func (p *pod) start(c *container, again bool) bool {
	for {
		if !p.awaitKubelet() {
			return false
		}
		if p.tryStart(c, again) {
			return true
		}
		if !p.sleep(between(p.rand, time.Second, 15*time.Second)) {
			return false
		}
	}
}

func (p *pod) tryStart(c *container, again bool) bool {
	w := p.w
	w.mu.Lock()
	defer w.mu.Unlock()
	k := &w.kubelet
	run := k.run
	var devices []*grant
	if c.count > 0 {
		e := k.entry(p, c)
		if e == nil {
			return false // "no devices found allocated"
		}
		i := k.endpoint
		if i == nil {
			return false
		}
		if !i.config.onlyDRA() {
			var err error
			w.unlocked(func() {
				ctx, cancel := context.WithTimeout(k.ctx, 25*time.Second)
				defer cancel()
				stop := context.AfterFunc(i.life, cancel)
				defer stop()
				err = i.preStart(ctx, c.resource, e.ids())
			})
			if err != nil {
				w.note("%s/%s is not started: %v", p.uid, c.name, err)
				return false
			}
		} else {
			w.startUnchecked(p, e.grants)
		}
		devices = append(devices, e.grants...)
	}
	if len(p.claims) > 0 && c.kind == mainContainer {
		for _, one := range p.claims {
			info := k.claims[one.uid]
			if info == nil || !info.prepared || !info.pods[p.uid] {
				return false // "unable to get claim info"
			}
			devices = append(devices, one.grants...)
		}
	}
	if k.run != run || p.stopped() {
		return false
	}
	boot := w.boot
	w.unlocked(func() { w.sleepFor(between(p.rand, 10*time.Millisecond, 200*time.Millisecond)) })
	for _, g := range devices {
		if !w.exists(g.uuid) {
			return false
		}
	}
	if w.boot != boot || p.stopped() && p.rand.IntN(2) == 0 {
		return false
	}
	p.running[c.name] = devices
	if p.running[c.name] == nil {
		p.running[c.name] = []*grant{}
	}
	for _, g := range devices {
		g.started = true
	}
	w.countStart(p, c, devices, again)
	w.check(p, "starts "+c.name, devices)
	return true
}

// startUnchecked excuses a container that the device plugin has given devices and that first starts when claims have
// the whole node: no plugin can check them then. The caller has locked w.mu.
func (w *model) startUnchecked(p *pod, devices []*grant) {
	for _, q := range w.pods {
		for _, h := range w.holds(q) {
			for _, g := range devices {
				if q != p && !g.started && !g.lost && !together(g, h) {
					g.lost = true
					w.note("nothing checks the first start of %s", p.uid)
				}
			}
		}
	}
}

func (p *pod) stopContainer(c *container) {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	delete(p.running, c.name)
}

// finish completes the pod.
func (p *pod) finish() {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	if p.stopped() {
		return
	}
	p.w.countHeld("finished and not deleted", p)
	clear(p.running)
	p.terminal = true
	p.w.note("%s completes", p.uid)
}

// terminate ends the processes of the pod, and has its claims unprepared.
func (p *pod) terminate() {
	w := p.w
	w.mu.Lock()
	boot, grace := w.boot, p.grace
	if p.terminal && len(p.running) == 0 {
		grace = 100 * time.Millisecond
	}
	for (!w.kubelet.up || !w.kubelet.ready && !w.kubelet.known[p.uid]) && w.boot == boot && !w.over {
		w.unlocked(func() { w.sleepFor(200 * time.Millisecond) })
	}
	for end := time.Now().Add(grace); time.Now().Before(end) && w.boot == boot && p.boot == boot && !w.over; {
		w.unlocked(func() { w.sleepFor(min(time.Second, time.Until(end))) })
	}
	clear(p.running)
	w.unlocked(func() { w.sleepFor(between(p.rand, 10*time.Millisecond, 300*time.Millisecond)) })
	p.sandbox, p.ended = false, true
	w.note("%s has no processes any more", p.uid)
	w.mu.Unlock()
	for _, c := range p.claims {
		for w.kubelet.unprepareClaim(p, c) != nil && !w.isOver() {
			w.sleepFor(between(p.rand, 500*time.Millisecond, 3*time.Second))
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for p.api && p.terminal && !p.deleting && !p.forced && !w.over {
		w.unlocked(func() { w.sleepFor(500 * time.Millisecond) })
	}
	delete(w.kubelet.known, p.uid)
	w.remove(p)
	p.done = true
}
