package ledger

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/resource"
)

// books are all that is known of who holds devices, at one time.
type books struct {
	driver string // the name of our DRA driver

	beside bool // whether another instance may still give devices

	// What the node has and offers.
	devices    map[string]string // the UUIDs of the node's GPUs and MIG devices, and of the GPU of each
	parents    map[string]string // the same of MIG devices that the node had earlier
	advertised map[name]bool     // the names under which the device plugin offers devices
	ours       map[string]bool   // the resources of the device plugin, also those without devices

	// What the kubelet says.
	damaged          bool                   // kubelet_internal_checkpoint cannot be read
	runs             bool                   // a kubelet runs, as far as is known
	answered         bool                   // a kubelet has answered once
	away             time.Time              // since when there is none, or zero
	entries          map[key]*entry         // kubelet_internal_checkpoint
	claims           map[string]*claimEntry // dra_manager_state, by the claim's UID
	listed           []podresources.Holder  // PodResources
	names            map[string]podName     // of pods in entries, by UID
	registeredBefore map[name]bool          // the names that the kubelet had when this process began; nil if it had none
	read             int                    // how many versions of the checkpoint were read
	refreshes        int                    // how many refreshed versions were read while no other instance gave devices
	silent           int                    // how many refreshes in a row wrote no version

	// What this plugin knows itself.
	given      map[name]*given  // what Allocate gave, until a book of the kubelet shows it
	records    map[string]claim // the records of prepared claims, by UID
	unprepared map[string]bool  // the claims that were unprepared and may still be in dra_manager_state, by UID
	dropped    map[string]claim // what claims had that were unprepared, until their pods have no processes
	forgotten  map[string]bool  // entries that an administrator has had forgotten, as their paths
	changed    bool             // whether known has another result than when it was written

	processes processes
}

// name is the name under which the kubelet knows a device.
type name struct{ resource, id string }

// key identifies a device of a container in the kubelet's checkpoint. The pod is its UID.
type key struct {
	pod, container string
	name
}

// path is how an administrator names the entry.
func (k key) path() string { return printable(k.pod + "/" + k.container + "/" + k.id) }

// entry is a device of a container in the kubelet's checkpoint. It is kept until the pod has ended.
type entry struct {
	parent  string    // the UUID of the device's GPU, if the answer to Allocate says it
	order   int       // the number of the version in which it was first
	missing int       // how many refreshed versions in a row lack it
	since   time.Time // when it was first missing; zero while the last version has it
}

// claimEntry is a claim with devices of our driver in the kubelet's dra_manager_state. It is kept until its pods have
// ended.
type claimEntry struct {
	kubelet.Claim
	missing bool
	since   time.Time // when it was first missing; zero while the file has it
}

func (c *claimEntry) name() string { return c.Namespace + "/" + c.Name }

// podName is the name of a pod.
type podName struct{ namespace, pod string }

// given is a device that Allocate gave.
type given struct {
	at        time.Time
	refreshes int // how many refreshes that began later did not show it
}

// processes are the pods that have processes.
type processes struct {
	proc.Pods
	visible bool      // whether processes of pods can be seen at all
	blind   time.Time // since when they cannot; zero if they can
	seen    time.Time // when they were looked for
}

const (
	// agreeing is how many refreshed versions in a row must agree: an older version may overwrite a newer one.
	agreeing = 2
	// unreadable is how long a process of an unknown pod counts as one of any pod.
	unreadable = 30 * time.Second
	// gracePeriod is how long a container may still use its device after the kubelet has forgotten it, where processes of
	// pods cannot be seen. It is the default of Kubernetes.
	gracePeriod = 30 * time.Second
	// endingSoon is how long a pod that is ending does not make its devices unhealthy, where the kubelet gives them again.
	// A pod that the kubelet gives one has its start wait; one that came when they are unhealthy would fail for good.
	endingSoon = 10 * time.Second
	// settled is how long after Allocate no book need show the container yet.
	settled = 2 * time.Second
	// restart is how long a kubelet may be away that starts again: it removes its sockets at first.
	restart = 5 * time.Second
	// unlisted is after how long a container that is not listed has not started, where the other side is no kubelet.
	unlisted = 10 * time.Second
)

func newBooks(driver string) *books {
	return &books{
		runs: true, driver: driver, devices: map[string]string{}, parents: map[string]string{}, entries: map[key]*entry{},
		claims: map[string]*claimEntry{}, names: map[string]podName{}, given: map[name]*given{}, records: map[string]claim{},
		dropped: map[string]claim{}, unprepared: map[string]bool{},
		forgotten: map[string]bool{},
	}
}

// isKubelet reports whether the other side writes a kubelet's files. Otherwise it is a program such as device-manager,
// and what it lists is all that is to know; a file that is there was left by a kubelet that does not run any more.
func (b *books) isKubelet() bool {
	if b.read == 0 {
		return b.silent < 2 // a kubelet writes the file at the first message
	}
	return b.silent < 12 // its disk may be slow
}

// alive reports whether a kubelet answers.
func (b *books) alive() bool { return b.runs && b.isKubelet() }

// unwritten reports whether only names can be given that the kubelet had before this process: it has not written its
// checkpoint since. Without a file before, there are no such names, and all can be given. If the file cannot be read,
// none can.
func (b *books) unwritten() bool {
	return b.refreshes == 0 && (b.registeredBefore != nil || b.damaged) && b.alive()
}

// needsProcesses reports whether who holds devices, or whether to refresh, depends on which pods have processes.
func (b *books) needsProcesses() bool {
	listed := b.listedPods()
	for k, e := range b.entries {
		if !e.since.IsZero() || !b.advertised[k.name] && !listed[k.pod] || !b.alive() {
			return true
		}
	}
	for _, c := range b.claims {
		if c.missing || !b.alive() {
			return true
		}
	}
	return len(b.dropped) > 0
}

// any reports whether one of the pods has a process. If that is unknown, certain is false. A process whose pod is
// unknown may be one of these pods for some time since the pods were needed last.
func (p *processes) any(pods []string, since, now time.Time) (running, certain bool) {
	if slices.ContainsFunc(pods, func(uid string) bool { return p.UIDs[uid] }) {
		return true, true
	}
	if !p.visible {
		return false, false
	}
	return p.Partial && now.Sub(since) < unreadable, true
}

// graceEnded reports whether pods that ended at a time cannot have processes any more that cannot be seen.
func (p *processes) graceEnded(since, now time.Time) bool {
	if p.blind.After(since) {
		since = p.blind
	}
	return now.Sub(since) > gracePeriod
}

// setProcesses replaces the processes.
func (b *books) setProcesses(pods proc.Pods, visible bool, now time.Time) {
	blind := b.processes.blind
	switch {
	case visible:
		blind = time.Time{}
	case blind.IsZero():
		blind = now
	}
	b.processes = processes{pods, visible, blind, now}
}

// setCheckpoint takes over a new version of the kubelet's checkpoint. A refreshed version was written after the kubelet
// had dropped the pods that are not active.
//
// The time is that before the kubelet was asked to write it.
func (b *books) setCheckpoint(c *kubelet.Checkpoint, refreshed bool, now time.Time) {
	if b.read == 0 {
		b.registeredBefore = b.registered(c)
	}
	b.silent = 0
	b.read++
	if refreshed && !b.beside {
		b.refreshes++
	}
	present := map[key]bool{}
	for i := range c.PodDeviceEntries {
		one := &c.PodDeviceEntries[i]
		parents := parentsIn(one.AllocResp)
		for _, id := range one.IDs() {
			k := key{one.PodUID, one.ContainerName, name{one.ResourceName, id}}
			if !hasUUID(id) && !b.ours[k.resource] {
				continue // a device of another plugin
			}
			present[k] = true
			e := b.entries[k]
			// An entry that only some versions lack is that of whoever had the device before.
			if e == nil || e.missing >= agreeing {
				delete(b.given, k.name)
			}
			parent := parents[resource.UUIDOf(id)]
			if e == nil {
				e = &entry{order: b.read}
				b.entries[k] = e
				b.changed = true
			}
			b.changed = b.changed || e.parent != parent || !e.since.IsZero()
			e.parent, e.missing, e.since = parent, 0, time.Time{}
		}
	}
	for k, e := range b.entries {
		if present[k] {
			continue
		}
		if e.since.IsZero() {
			e.since, b.changed = now, true
		}
		if refreshed {
			e.missing++
		}
	}
	for n, g := range b.given {
		if refreshed && now.Sub(g.at) >= settled {
			g.refreshes++
		}
		if g.refreshes >= agreeing {
			delete(b.given, n)
		}
	}
}

// registered returns the names of GPUs that the kubelet has had, or nil if there are none: then no plugin has given
// any.
func (b *books) registered(c *kubelet.Checkpoint) map[name]bool {
	var names map[name]bool
	for r, ids := range c.RegisteredDevices {
		for _, id := range ids {
			if !hasUUID(id) && !b.ours[r] {
				continue
			}
			if names == nil {
				names = map[name]bool{}
			}
			names[name{r, id}] = true
		}
	}
	return names
}

// listedPods returns the UIDs of the pods that PodResources lists with a device of an entry: the kubelet has them as
// active.
func (b *books) listedPods() map[string]bool {
	type device struct {
		podName
		container string
		name
	}
	listed := map[device]bool{}
	for i := range b.listed {
		h := &b.listed[i]
		for res, ids := range h.ByResource {
			for _, id := range ids {
				listed[device{podName{h.Namespace, h.Pod}, h.Container, name{res, id}}] = true
			}
		}
	}
	pods := map[string]bool{}
	for k := range b.entries {
		if pod, known := b.names[k.pod]; known && listed[device{pod, k.container, k.name}] {
			pods[k.pod] = true
		}
	}
	return pods
}

// setClaims takes over the kubelet's dra_manager_state.
func (b *books) setClaims(list []kubelet.Claim, now time.Time) {
	present := map[string]bool{}
	defer func() { maps.DeleteFunc(b.unprepared, func(uid string, _ bool) bool { return !present[uid] }) }()
	for _, c := range list {
		if len(c.Devices[b.driver]) > 0 {
			present[c.UID] = true
			old := b.claims[c.UID]
			b.changed = b.changed || old == nil || old.missing || !slices.Equal(old.Pods, c.Pods)
			b.claims[c.UID] = &claimEntry{Claim: c}
		}
	}
	for uid, c := range b.claims {
		if !present[uid] && !c.missing {
			c.missing, c.since, b.changed = true, now, true
		}
	}
}

// setListed takes over the answer of PodResources, and learns the names of pods from it.
func (b *books) setListed(a podresources.Answer, now time.Time) {
	switch {
	case a.Runs:
		b.answered, b.away = true, time.Time{}
	case b.away.IsZero():
		b.away = now
	}
	b.runs = a.Runs || b.answered && now.Sub(b.away) < restart
	b.listed = a.Holders
	if !b.isKubelet() {
		maps.DeleteFunc(b.given, func(_ name, g *given) bool { return now.Sub(g.at) > unlisted })
	}
	b.nameListed()
	used := map[string]bool{}
	for k := range b.entries {
		used[k.pod] = true
	}
	maps.DeleteFunc(b.names, func(uid string, _ podName) bool { return !used[uid] })
}

// nameListed records the names of the pods whose containers PodResources lists. It has no UIDs: a container is that of
// the newest entry with the same container, resource and IDs. A device that is listed needs no record any more that
// Allocate gave it.
func (b *books) nameListed() {
	type request struct{ container, resource, ids string }
	newest := map[request]key{}
	ids := map[key][]string{} // without the ID: what a container has of a resource
	for k := range b.entries {
		of := key{k.pod, k.container, name{resource: k.resource}}
		ids[of] = append(ids[of], k.id)
	}
	for of, list := range ids {
		slices.Sort(list)
		r := request{of.container, of.resource, strings.Join(list, ",")}
		if other, found := newest[r]; !found || b.newer(of, list[0], other, list[0]) {
			newest[r] = of
		}
	}
	for i := range b.listed {
		h := &b.listed[i]
		for res, list := range h.ByResource {
			list = slices.Compact(slices.Sorted(slices.Values(list)))
			if of, found := newest[request{h.Container, res, strings.Join(list, ",")}]; found {
				b.names[of.pod] = podName{h.Namespace, h.Pod}
			}
			for _, id := range list {
				// An entry of the same name may be that of whoever had the device before.
				if n := (name{res, id}); b.given[n] != nil && (!b.isKubelet() || !b.recorded(n)) {
					delete(b.given, n)
				}
			}
		}
	}
}

// recorded reports whether an entry of the checkpoint has a device.
func (b *books) recorded(n name) bool {
	for k := range b.entries {
		if k.name == n {
			return true
		}
	}
	return false
}

// newer reports whether what a container has was recorded after what another one has.
func (b *books) newer(a key, aID string, other key, otherID string) bool {
	a.id, other.id = aID, otherID
	one, two := b.entries[a], b.entries[other]
	if one.since.IsZero() != two.since.IsZero() {
		return one.since.IsZero()
	}
	return one.order > two.order
}

// caller returns the UID of the pod that has exactly these devices of a resource by the last version of the
// checkpoint, or "": the newest of several.
func (b *books) caller(resourceName string, ids []string) string {
	want := slices.Compact(slices.Sorted(slices.Values(ids)))
	has := map[key]int{}
	for k, e := range b.entries {
		if k.resource == resourceName && e.since.IsZero() {
			has[key{k.pod, k.container, name{resource: k.resource}}]++
		}
	}
	var best key
	for of, count := range has {
		exactly := count == len(want) && !slices.ContainsFunc(want, func(id string) bool {
			e := b.entries[key{of.pod, of.container, name{resourceName, id}}]
			return e == nil || !e.since.IsZero()
		})
		if exactly && (best.pod == "" || b.newer(of, want[0], best, want[0])) {
			best = of
		}
	}
	return best.pod
}

// dropEnded removes entries and claims that hold nothing any more, and reports whether forgotten has changed.
func (b *books) dropEnded(now time.Time) (changed bool) {
	present := b.present()
	paths := map[string]bool{}
	for k, e := range b.entries {
		if _, holds := b.entryState(k, e, present, now); !holds && !e.since.IsZero() {
			delete(b.entries, k)
			b.changed = true
			continue
		}
		paths[k.path()] = true
	}
	for uid, c := range b.claims {
		if _, holds := b.claimState(c, now); !holds && c.missing {
			delete(b.claims, uid)
			b.changed = true
			continue
		}
		for _, d := range c.Devices[b.driver] {
			paths[claimPath(uid, d.Name)] = true
		}
	}
	maps.DeleteFunc(b.dropped, func(_ string, c claim) bool { return !b.droppedHolds(&c, now) })
	for _, list := range []map[string]claim{b.records, b.dropped} {
		for uid, c := range list {
			for _, p := range c.portions {
				paths[claimPath(uid, podresources.DeviceName(p.Device.UUID))] = true
			}
		}
	}
	before := len(b.forgotten)
	if b.refreshes >= agreeing { // all books were read
		maps.DeleteFunc(b.forgotten, func(path string, _ bool) bool { return !paths[path] })
	}
	return len(b.forgotten) != before
}

// known returns what the kubelet's files and the records have said of pods that may still run, for the next process.
func (b *books) known() known {
	var list known
	for k, e := range b.entries {
		list.Devices = append(list.Devices, knownDevice{k.pod, k.container, k.resource, k.id, e.parent, e.since})
	}
	for _, c := range b.claims {
		list.Claims = append(list.Claims, knownClaim{c.Claim, c.since})
	}
	for _, claims := range []map[string]claim{b.records, b.dropped} {
		for uid, c := range claims {
			if b.claims[uid] == nil {
				list.Claims = append(list.Claims, knownClaim{b.asRecorded(uid, &c), c.dropped})
			}
		}
	}
	slices.SortFunc(list.Devices, func(a, b knownDevice) int {
		return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container), cmp.Compare(a.Resource, b.Resource),
			cmp.Compare(a.ID, b.ID))
	})
	slices.SortFunc(list.Claims, func(a, b knownClaim) int { return cmp.Compare(a.UID, b.UID) })
	return list
}

// asRecorded returns a claim of this driver as dra_manager_state has it.
func (b *books) asRecorded(uid string, c *claim) kubelet.Claim {
	k := kubelet.Claim{UID: uid, Pods: c.pods}
	k.Namespace, k.Name, _ = strings.Cut(c.name, "/")
	var devices []kubelet.ClaimDevice
	for _, p := range c.portions {
		devices = append(devices, kubelet.ClaimDevice{Name: podresources.DeviceName(p.Device.UUID)})
	}
	k.Devices = map[string][]kubelet.ClaimDevice{b.driver: devices}
	return k
}

// restore adds what an earlier process knew. As long as the kubelet's files do not have it, it counts while its pods
// have processes.
func (b *books) restore(list known, now time.Time) {
	b.changed = true // the times
	for _, d := range list.Devices {
		k := key{d.Pod, d.Container, name{d.Resource, d.ID}}
		if b.entries[k] == nil {
			b.entries[k] = &entry{parent: d.Parent, missing: agreeing, since: sinceOr(d.Missing, now)}
		}
	}
	for _, c := range list.Claims {
		if b.claims[c.UID] == nil {
			b.claims[c.UID] = &claimEntry{Claim: c.Claim, missing: true, since: sinceOr(c.Missing, now)}
		}
	}
}

// sinceOr returns the time, or now if it is zero.
func sinceOr(t, now time.Time) time.Time {
	if t.IsZero() {
		return now
	}
	return t
}

// parentsIn returns the annotations of resource.ParentAnnotation in an answer to Allocate, as the UUIDs of GPUs by
// those of MIG devices.
func parentsIn(answer []byte) map[string]string {
	var resp v1beta1.ContainerAllocateResponse
	if proto.Unmarshal(answer, &resp) != nil {
		return nil
	}
	parents := map[string]string{}
	for k, v := range resp.GetAnnotations() {
		if uuid, found := strings.CutPrefix(k, resource.ParentAnnotation("")); found && hasUUID(uuid) && hasUUID(v) {
			parents[uuid] = v
		}
	}
	return parents
}

// hasUUID reports whether a device plugin ID has the UUID of a GPU or MIG device.
func hasUUID(id string) bool {
	return strings.HasPrefix(id, gpuPrefix) || strings.HasPrefix(id, migPrefix)
}

const (
	gpuPrefix = "GPU-"
	migPrefix = "MIG-"
)
