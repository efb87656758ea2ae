package ledger

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/resource"
)

// The kubelet of the model. It behaves as a kubelet 1.37 does: it writes its checkpoint at each message of a device
// plugin and when all resources of a container are allocated; it drops pods that are not active when it is asked for
// a list and when it admits a pod, but only in memory, and not before it knows all pods; a pod that is deleted by
// force is not active at once; without the file, it begins with an empty book; a damaged or removed file stays as it
// is until the first message.

// modelName is the name of a device in the kubelet.
type modelName struct{ resource, id string }

// grant is a device that a container or a claim has been given.
type grant struct {
	uuid, parent string
	name         modelName
	names        map[modelName]bool // what the device plugin advertised then
	at           time.Time
	claim        string // the UID
	memory       uint64
	admin        bool
	mps          bool
	started      bool // a container with it has started
	lost         bool // nothing protects it: no process knows it any more, or its first start was not checked
}

// bookEntry is an entry of the checkpoint. It is not changed.
type bookEntry struct {
	pod, container, resource string
	grants                   []*grant
	answer                   []byte
}

func (e *bookEntry) ids() []string {
	var ids []string
	for _, g := range e.grants {
		ids = append(ids, g.name.id)
	}
	return ids
}

// bookContent is a version of the checkpoint.
type bookContent struct {
	entries    []*bookEntry
	registered map[string][]string
	parsed     *kubelet.Checkpoint
}

// claimInfo is a claim in dra_manager_state.
type claimInfo struct {
	*modelClaim
	pods     map[string]bool
	prepared bool // the devices are known
	run      int  // of the kubelet, which prepares it once in each
}

// modelKubelet is the kubelet. All is guarded by model.mu.
type modelKubelet struct {
	w        *model
	up       bool
	noSocket bool      // while it starts, it has no socket yet
	ready    bool      // it knows all pods
	mute     time.Time // until when it does not answer
	run      int       // how often it has started
	ctx      context.Context
	cancel   context.CancelFunc
	known    map[string]bool // pods
	book     []*bookEntry
	healthy  map[string]map[string]bool
	endpoint *instance // that it watches
	claims   map[string]*claimInfo
	messages int
	without  string    // the UID of a pod: the next version after a message that is sent again lacks it
	stale    time.Time // when it last wrote such a one

	// The files.
	content    *bookContent   // nil: it does not exist
	older      []*bookContent // what should have been in it before
	first      int            // the first of these of this run
	damaged    bool
	version    uint64
	claimsFile []kubelet.Claim
}

// readCheckpoint returns the file.
func (k *modelKubelet) readCheckpoint() (*kubelet.Checkpoint, podresources.Version, error) {
	version := podresources.Version{Inode: k.version}
	switch {
	case k.damaged:
		return nil, version, errors.New("it is damaged")
	case k.content == nil:
		return nil, podresources.Version{}, nil
	}
	if k.content.parsed == nil {
		c := &kubelet.Checkpoint{RegisteredDevices: k.content.registered}
		for _, e := range k.content.entries {
			c.PodDeviceEntries = append(c.PodDeviceEntries, kubelet.Entry{
				PodUID: e.pod, ContainerName: e.container, ResourceName: e.resource,
				DeviceIDs: map[int64][]string{0: e.ids()}, AllocResp: e.answer,
			})
		}
		k.content.parsed = c
	}
	return k.content.parsed, version, nil
}

// answers reports whether PodResources answers.
func (k *modelKubelet) answers() bool { return k.up && !time.Now().Before(k.mute) }

// write writes the checkpoint. If it does so again is true, the plugin has sent its devices once more.
func (k *modelKubelet) write(again bool) {
	c := &bookContent{entries: slices.Clone(k.book), registered: map[string][]string{}}
	for r, ids := range k.healthy {
		c.registered[r] = slices.Sorted(maps.Keys(ids))
	}
	current := c
	// An older state may overwrite a newer one, but hardly twice in a row.
	older := k.older[k.first:]
	switch n := len(older); {
	case time.Since(k.stale) < 12*time.Second || n == 0:
	case again && k.without != "":
		for _, one := range slices.Backward(older) {
			if !slices.ContainsFunc(one.entries, func(e *bookEntry) bool { return e.pod == k.without }) {
				c, k.without = one, ""
				break
			}
		}
	case k.without == "" && k.w.rand2.IntN(8) == 0:
		c = older[n-1-k.w.rand2.IntN(min(n, 6))]
	}
	if c != current {
		k.stale = time.Now()
		k.w.note("the kubelet writes a stale checkpoint")
		k.w.count("checkpoint stale")
	}
	k.content, k.damaged = c, false
	k.older = append(k.older, current)
	k.version++
}

func (k *modelKubelet) writeClaims() {
	k.claimsFile = nil
	for _, uid := range slices.Sorted(maps.Keys(k.claims)) {
		info := k.claims[uid]
		c := kubelet.Claim{
			UID: uid, Namespace: "default", Name: info.bare, Pods: slices.Sorted(maps.Keys(info.pods)),
			Devices: map[string][]kubelet.ClaimDevice{},
		}
		if info.prepared {
			for _, g := range info.grants {
				c.Devices[modelDriver] = append(c.Devices[modelDriver], kubelet.ClaimDevice{
					Pool: "node", Name: podresources.DeviceName(g.uuid),
				})
			}
		}
		k.claimsFile = append(k.claimsFile, c)
	}
}

// active reports whether the kubelet has a pod as active.
func (k *modelKubelet) active(p *pod) bool { return k.known[p.uid] && !p.terminal && !p.ended }

// drop drops pods that are not active.
func (k *modelKubelet) drop() {
	if !k.ready {
		return
	}
	active := map[string]bool{}
	for _, p := range k.w.pods {
		active[p.uid] = active[p.uid] || k.active(p)
	}
	before := len(k.book)
	k.book = slices.DeleteFunc(k.book, func(e *bookEntry) bool { return !active[e.pod] })
	if len(k.book) < before {
		k.w.loseWhatNobodyKnows(k.w.current) // a process that has just begun may not have read it
	}
}

// list is List of PodResources.
func (w *model) list(ctx context.Context) (podresources.Answer, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := &w.kubelet
	switch {
	case ctx.Err() != nil:
		return podresources.Answer{}, ctx.Err()
	case k.noSocket:
		return podresources.Answer{}, nil
	case !k.up:
		return podresources.Answer{}, errors.New("connection refused")
	case time.Now().Before(k.mute):
		return podresources.Answer{}, errors.New("rejected by rate limit")
	}
	k.drop()
	answer := podresources.Answer{Runs: true}
	for _, p := range w.pods {
		if !k.active(p) {
			continue
		}
		for _, c := range p.containers {
			h := podresources.Holder{
				Namespace: "default", Pod: p.name, Container: c.name, ByResource: map[string][]string{},
			}
			if c.kind == initContainer {
				continue
			}
			for _, e := range k.book {
				if e.pod == p.uid && e.container == c.name {
					h.ByResource[e.resource] = append(h.ByResource[e.resource], e.ids()...)
					h.Devices = append(h.Devices, e.ids()...)
				}
			}
			for _, one := range p.claims {
				info := k.claims[one.uid]
				if info == nil || !info.pods[p.uid] || c.kind != mainContainer {
					continue
				}
				listed := podresources.Claim{Name: info.name, Devices: map[string][]string{}}
				for _, g := range info.grants {
					if info.prepared {
						listed.Devices[modelDriver] = append(listed.Devices[modelDriver], podresources.DeviceName(g.uuid))
					}
				}
				h.Claims = append(h.Claims, listed)
			}
			if len(h.Devices)+len(h.Claims) > 0 {
				answer.Holders = append(answer.Holders, h)
			}
		}
	}
	w.rand2.Shuffle(len(answer.Holders), func(i, j int) {
		answer.Holders[i], answer.Holders[j] = answer.Holders[j], answer.Holders[i]
	})
	return answer, nil
}

// watch begins to watch a device plugin, which sends its devices.
func (k *modelKubelet) watch(i *instance) {
	k.endpoint = i
	k.w.note("the kubelet watches instance %d", i.number)
	k.send(i, false)
}

// leave ends the watch of a device plugin, of which no device is healthy then.
func (k *modelKubelet) leave(i *instance) {
	if k.endpoint == i {
		k.endpoint, k.healthy = nil, map[string]map[string]bool{}
	}
}

// send has the kubelet take over the devices of an instance soon, and write its checkpoint.
func (k *modelKubelet) send(i *instance, again bool) {
	w, run := k.w, k.run
	if k.endpoint != i {
		return
	}
	k.messages++
	delay := between(w.randOf(k.messages), time.Millisecond, 30*time.Millisecond)
	if w.rand2.IntN(30) == 0 {
		delay += 800 * time.Millisecond
	}
	w.goes(func() {
		w.sleepFor(delay)
		w.mu.Lock()
		defer w.mu.Unlock()
		if !k.up || k.run != run || k.endpoint != i || i.dead {
			return
		}
		k.healthy = healthyOf(i.plugin)
		k.write(again)
	})
}

// stop ends the kubelet. The caller has locked w.mu.
func (k *modelKubelet) stop() {
	if !k.up {
		return
	}
	k.up = false
	k.run++
	k.cancel()
	k.endpoint = nil
}

// begin starts the kubelet. It knows the pods of the API server only after a time. The caller has locked w.mu.
func (k *modelKubelet) begin(late time.Duration) {
	w := k.w
	k.up, k.ready, k.noSocket, k.without = true, false, false, ""
	k.ctx, k.cancel = context.WithCancel(w.ctx)
	k.book, k.known, k.healthy = nil, map[string]bool{}, map[string]map[string]bool{}
	if k.content != nil && !k.damaged {
		k.book = slices.Clone(k.content.entries)
	}
	k.first = len(k.older)
	k.claims = map[string]*claimInfo{}
	for _, c := range k.claimsFile {
		info := &claimInfo{w.claims[c.UID], map[string]bool{}, len(c.Devices[modelDriver]) > 0, 0}
		for _, uid := range c.Pods {
			info.pods[uid] = true
		}
		k.claims[c.UID] = info
	}
	w.loseWhatNobodyKnows(w.current)
	for _, p := range w.pods {
		if p.static && p.api {
			k.know(p)
		} else {
			p.again = p.again || p.admitted
			p.admitted = p.admitted && len(p.running) > 0
		}
		p.notify()
	}
	if i := w.current; i != nil && !i.dead {
		w.goes(i.register)
	}
	run := k.run
	w.goes(func() {
		w.sleepFor(late / 2)
		w.mu.Lock()
		if k.up && k.run == run && w.rand2.IntN(2) == 0 {
			for _, p := range w.pods {
				if p.api && w.rand2.IntN(2) == 0 {
					k.know(p)
				}
			}
		}
		w.mu.Unlock()
		w.sleepFor(late / 2)
		w.mu.Lock()
		defer w.mu.Unlock()
		if !k.up || k.run != run {
			return
		}
		for _, p := range w.pods {
			if p.api {
				k.know(p)
			}
		}
		k.ready = true
		w.note("the kubelet knows all pods")
	})
}

// know has the kubelet know a pod, which it admits (again), unless its containers run.
func (k *modelKubelet) know(p *pod) {
	if k.known[p.uid] || p.terminal || p.ended {
		return
	}
	k.known[p.uid] = true
	p.again = p.again || p.admitted
	p.admitted = p.admitted && len(p.running) > 0
	if !p.admitted {
		k.w.admissions <- p
	}
	p.notify()
}

// admit admits pods, one after the other, until the model ends.
func (w *model) admit() {
	r := w.randOf(1 << 20)
	for {
		select {
		case <-w.ctx.Done():
			return
		case p := <-w.admissions:
			w.admitOne(p, r)
		}
	}
}

var errRestarted = errors.New("the kubelet has restarted")

func (w *model) admitOne(p *pod, r *rand.Rand) {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := &w.kubelet
	run := k.run
	if !k.up || !k.known[p.uid] || p.terminal || p.admitted || p.ended {
		return
	}
	var err error
	for _, c := range p.containers {
		if p.running[c.name] == nil && err == nil {
			err = k.allocateContainer(p, c, r)
		}
	}
	switch {
	case k.run != run:
		return
	case err != nil:
		w.note("%s is not admitted: %v", p.uid, err)
		p.terminal = true
		if w.calm && !p.deleting && !p.forced {
			w.fail("%s fails for good: %v", p.uid, err)
			w.noteLedger()
		}
	default:
		p.admitted = true
	}
	p.notify()
}

// unlocked calls f without w.mu.
func (w *model) unlocked(f func()) {
	w.mu.Unlock()
	defer w.mu.Lock()
	f()
}

// allocateContainer allocates all resources of a container. The caller has locked w.mu.
func (k *modelKubelet) allocateContainer(p *pod, c *container, r *rand.Rand) error {
	w, run := k.w, k.run
	other := func() {
		if hang := w.hang; c.second {
			if hang > time.Second {
				w.count("second resource whose plugin hangs")
			}
			w.unlocked(func() { w.sleepFor(hang) })
		}
	}
	otherFirst := r.IntN(2) == 0
	if otherFirst {
		other()
	}
	if k.run != run {
		return errRestarted
	}
	changed := false
	if c.count > 0 {
		var err error
		if changed, err = k.allocate(p, c, r); err != nil {
			return err
		}
	}
	if !otherFirst {
		other()
	}
	if k.run != run {
		return errRestarted
	}
	if changed {
		k.write(false)
	}
	return nil
}

func (k *modelKubelet) entry(p *pod, c *container) *bookEntry {
	for _, e := range k.book {
		if e.pod == p.uid && e.container == c.name {
			return e
		}
	}
	return nil
}

// allocate gives a container its devices, unless it has them already.
func (k *modelKubelet) allocate(p *pod, c *container, r *rand.Rand) (changed bool, err error) {
	w, run := k.w, k.run
	for wait := 0; k.endpoint == nil && wait < 20 && p.again; wait++ {
		w.unlocked(func() { w.sleepFor(200 * time.Millisecond) })
		if k.run != run {
			return false, errRestarted
		}
	}
	i, healthy := k.endpoint, k.healthy[c.resource]
	if i == nil || len(healthy) == 0 {
		return false, errors.New("no healthy devices are present")
	}
	if e := k.entry(p, c); e != nil {
		for _, id := range e.ids() {
			if !healthy[id] {
				return false, errors.New("previously allocated devices are no longer healthy")
			}
		}
		return false, nil
	}
	k.drop()
	ids := k.choose(p, c, r)
	if len(ids) < c.count {
		return false, errors.New("too few devices are free")
	}
	names := map[modelName]bool{}
	for _, res := range i.plugin {
		for _, d := range res.Devices {
			names[modelName{res.Name, d.ID}] = true
		}
	}
	w.unlocked(func() {
		w.sleepFor(between(r, 0, 10*time.Millisecond))
		err = i.allocate(c.resource, ids)
		if err == nil && !w.isOver() {
			w.sleepFor(between(r, 0, 3*time.Millisecond))
		}
	})
	if k.run != run {
		return false, errRestarted
	}
	if err != nil {
		w.note("instance %d does not allocate %v to %s: %v", i.number, ids, p.uid, err)
		return false, err
	}
	e := &bookEntry{pod: p.uid, container: c.name, resource: c.resource}
	resp := &v1beta1.ContainerAllocateResponse{Annotations: map[string]string{}}
	annotated := r.IntN(4) > 0 // an earlier release of the plugin does not say of which GPU a MIG device is a part
	for _, id := range ids {
		g := &grant{uuid: resource.UUIDOf(id), name: modelName{c.resource, id}, names: names, at: time.Now()}
		g.parent = g.uuid
		if d := findDevice(i.all, c.resource, id); d != nil {
			g.parent, g.mps = d.Parent, d.MPS != nil
		} else {
			g.parent = parentOf(g.uuid)
		}
		if g.uuid != g.parent && annotated {
			resp.Annotations[resource.ParentAnnotation(g.uuid)] = g.parent
		}
		e.grants = append(e.grants, g)
	}
	e.answer, _ = proto.Marshal(resp)
	if slices.ContainsFunc(w.pods, func(q *pod) bool { return q.forced && q.has(e.grants) }) {
		w.counts["device of a pod that still has processes"]++
	}
	k.book = append(k.book, e)
	w.note("%s/%s gets %v of %s", p.uid, c.name, ids, c.resource)
	return true, nil
}

// parentOf returns the GPU of a MIG device.
func parentOf(uuid string) string {
	for g := range modelGPUs {
		for layout := range modelLayouts {
			one := modelGPU{mig: true, layout: layout}
			for _, u := range one.units(g) {
				if u.uuid == uuid {
					return u.parent
				}
			}
		}
	}
	return uuid
}

// choose chooses devices: first those of ordinary init containers of the pod, which have ended then.
func (k *modelKubelet) choose(p *pod, c *container, r *rand.Rand) []string {
	taken, own, kept := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, e := range k.book {
		if e.resource != c.resource {
			continue
		}
		for _, id := range e.ids() {
			taken[id] = true
			if e.pod != p.uid {
				continue
			}
			if p.container(e.container).kind == initContainer {
				own[id] = true
			} else {
				kept[id] = true
			}
		}
	}
	var ids []string
	for _, id := range slices.Sorted(maps.Keys(own)) {
		if len(ids) < c.count && !kept[id] {
			ids = append(ids, id)
		}
	}
	var free []string
	for _, id := range slices.Sorted(maps.Keys(k.healthy[c.resource])) {
		if !taken[id] {
			free = append(free, id)
		}
	}
	r.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
	return append(ids, free[:min(len(free), c.count-len(ids))]...)
}

// prepareClaim has a claim prepared for a pod.
func (k *modelKubelet) prepareClaim(p *pod, c *modelClaim) error {
	w := k.w
	defer c.lock(nil)()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !k.up {
		return errRestarted
	}
	run, i := k.run, k.endpoint
	info := k.claims[c.uid]
	if info == nil {
		info = &claimInfo{modelClaim: c, pods: map[string]bool{}}
		k.claims[c.uid] = info
	}
	info.pods[p.uid] = true
	k.writeClaims()
	if info.prepared && info.run == k.run {
		return nil
	}
	if i == nil {
		return errors.New("the driver is not registered")
	}
	var err error
	w.unlocked(func() {
		ctx, cancel := context.WithTimeout(k.ctx, 45*time.Second)
		defer cancel()
		stop := context.AfterFunc(i.life, cancel)
		defer stop()
		err = i.prepare(ctx, c)
		if c.second && err == nil {
			w.sleepFor(w.hangTime())
		}
	})
	if k.run != run {
		return errRestarted
	}
	if err != nil {
		w.note("instance %d does not prepare %s for %s: %v", i.number, c.uid, p.uid, err)
		return err
	}
	if _, recorded := w.records[c.uid]; !recorded && (i.dead || i.retired) { // the state directory was lost meanwhile
		w.note("nothing says that %s has %s", c.uid, describe(c.grants))
		for _, g := range c.grants {
			g.lost = true
		}
	}
	w.note("%s is prepared for %s", c.uid, p.uid)
	info.prepared, info.run = true, k.run
	k.writeClaims()
	if k.active(p) {
		w.check(p, "is prepared", c.grants)
	}
	return nil
}

// unprepareClaim takes a pod off a claim, and has the claim unprepared if that was its last pod.
func (k *modelKubelet) unprepareClaim(p *pod, c *modelClaim) error {
	w := k.w
	defer c.lock(nil)()
	w.mu.Lock()
	defer w.mu.Unlock()
	info, run, i := k.claims[c.uid], k.run, k.endpoint
	switch {
	case !k.up:
		return errRestarted
	case info == nil:
		return nil
	case len(info.pods) == 1 && info.pods[p.uid] || len(info.pods) == 0:
	default:
		delete(info.pods, p.uid)
		k.writeClaims()
		return nil
	}
	if i == nil {
		return errors.New("the driver is not registered")
	}
	var err error
	w.unlocked(func() { err = i.unprepare(c) })
	if k.run != run {
		return errRestarted
	}
	if err == nil {
		delete(k.claims, c.uid)
		k.writeClaims()
		w.note("%s is unprepared", c.uid)
	}
	return err
}
