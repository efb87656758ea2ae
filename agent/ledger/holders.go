package ledger

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/resource"
)

// holder is a device that a container or a claim has.
type holder struct {
	name                      // of the device plugin; empty for a claim
	podUID, container string  // of the device plugin; podUID is empty if it is unknown
	pod               podName // empty if it is unknown
	claim, claimUID   string  // "NAMESPACE/NAME" and the UID, which is empty if it is unknown
	pods              []string
	since             time.Time // when the claim was prepared, or zero
	memory            uint64    // the claim's part of the device's memory, in bytes, or 0 if it is not shared
	admin             bool      // the claim only observes the device

	uuid   string // of the device, or what is known of it
	parent string // the UUID of its GPU; empty if the device may be any of the node
	absent bool   // the node has the GPU, but not the device

	// offered says that the device is still advertised under its name, and accounted that the kubelet therefore gives
	// it to no other container under that name.
	offered, accounted bool
	// soon says that the holder has been ending for a short time only, under a name that is advertised.
	soon  bool
	state State
	book  Book
}

// holders returns who holds devices, by all books. It is sorted.
func holders(b *books, now time.Time) []*holder {
	var list []*holder
	present, claims := b.present(), b.claimNames()
	for k, e := range b.entries {
		if state, holds := b.entryState(k, e, present, now); holds {
			h := &holder{
				name: k.name, podUID: k.pod, container: k.container, pod: b.names[k.pod], book: Checkpoint,
				state:   b.orForgotten(state, k.path()),
				offered: b.advertised[k.name],
			}
			h.accounted = h.offered && b.alive() && (state == "" || !b.podRuns(k, e, now))
			h.soon = state == Ending && h.offered && now.Sub(e.since) < endingSoon
			list = append(list, b.locate(h, resource.UUIDOf(k.id), e.parent))
		}
	}
	for i := range b.listed {
		list = append(list, b.onlyListed(&b.listed[i], present, claims)...)
	}
	for n := range b.given {
		h := &holder{name: n, state: Starting, book: Allocated, offered: b.advertised[n], accounted: b.advertised[n]}
		list = append(list, b.locate(h, resource.UUIDOf(n.id), ""))
	}
	listed := b.listedClaims()
	for uid, c := range b.records {
		list = append(list, b.ofRecord(uid, &c, listed)...)
	}
	for uid, c := range b.dropped {
		if b.droppedHolds(&c, now) {
			list = append(list, b.ofRecord(uid, &c, nil)...)
		}
	}
	for uid, c := range b.claims {
		state, holds := b.claimState(c, now)
		if _, recorded := b.records[uid]; recorded || !holds || b.unprepared[uid] {
			continue
		}
		for _, d := range c.Devices[b.driver] {
			h := &holder{
				claim: c.name(), claimUID: uid, pods: c.Pods, book: ClaimsState,
				state: b.orForgotten(state, claimPath(uid, d.Name)),
			}
			list = append(list, b.locateClaimed(h, d.Name))
		}
	}
	slices.SortFunc(list, (*holder).compare)
	return list
}

// entryState returns whether the pod of an entry of the checkpoint still holds its device, and how. As long as the
// kubelet has the entry it does; for some refreshes after that too, since a version may be an older one; and then as
// long as it has processes: a pod that is deleted by force is dropped at once, and so is any pod if the kubelet has
// lost its file.
func (b *books) entryState(k key, e *entry, present map[name][]key, now time.Time) (state State, holds bool) {
	if e.since.IsZero() && b.alive() {
		return "", true
	}
	running, certain := b.processes.any([]string{k.pod}, e.since, now)
	// If the kubelet has given the device to another pod under the same name, it knows that this pod is not active.
	replaced := slices.ContainsFunc(present[k.name], func(other key) bool { return other.pod != k.pod })
	switch {
	case e.since.IsZero(): // the file of a kubelet that does not run
		return "", running || !certain
	case e.missing < agreeing && !replaced:
		return Ending, true
	case certain, b.advertised[k.name]: // the kubelet accounts for the name, by what it knows and not by its file
		return Ending, running
	}
	return Ending, !replaced && !b.processes.graceEnded(e.since, now)
}

// podRuns reports whether the pod of an entry has processes, as far as is known.
func (b *books) podRuns(k key, e *entry, now time.Time) bool {
	running, _ := b.processes.any([]string{k.pod}, e.since, now)
	return running
}

// compare orders holders by their devices, and then by their names.
func (h *holder) compare(other *holder) int {
	if c := cmp.Compare(h.uuid, other.uuid); c != 0 { // most differ in this
		return c
	}
	return cmp.Or(
		cmp.Compare(h.resource, other.resource), cmp.Compare(h.id, other.id),
		cmp.Compare(h.pod.namespace, other.pod.namespace), cmp.Compare(h.pod.pod, other.pod.pod),
		cmp.Compare(h.podUID, other.podUID), cmp.Compare(h.container, other.container),
		cmp.Compare(h.claim, other.claim), cmp.Compare(h.claimUID, other.claimUID),
	)
}

// orForgotten returns a state, or Forgotten if an administrator has had the entry forgotten.
func (b *books) orForgotten(state State, path string) State {
	if b.forgotten[path] {
		return Forgotten
	}
	return state
}

// claimPath is how an administrator names a device of a claim.
func claimPath(uid, deviceName string) string { return printable(uid + "/" + deviceName) }

// printable returns a path as it is printed, which is how it can be given back.
func printable(path string) string { return wording.Visible(strings.ReplaceAll(path, "\n", `\n`)) }

// present returns the entries that are in the last version of the checkpoint, by the names of their devices.
func (b *books) present() map[name][]key {
	list := map[name][]key{}
	for k, e := range b.entries {
		if e.since.IsZero() {
			list[k.name] = append(list[k.name], k)
		}
	}
	return list
}

// claimNames returns the claims that have a record or are in dra_manager_state, like "default/claim-1".
func (b *books) claimNames() map[string]bool {
	names := map[string]bool{}
	for _, c := range b.records {
		names[c.name] = true
	}
	for _, c := range b.claims {
		names[c.name()] = true
	}
	return names
}

// claimState is entryState for a claim in dra_manager_state.
func (b *books) claimState(c *claimEntry, now time.Time) (state State, holds bool) {
	running, certain := b.processes.any(c.Pods, c.since, now)
	switch {
	case !c.missing && b.alive():
		return "", true
	case !c.missing:
		return "", running || !certain
	case certain:
		return Ending, running
	}
	return Ending, !b.processes.graceEnded(c.since, now)
}

// droppedHolds reports whether a pod of a claim without a record still holds its devices. The kubelet has a claim
// unprepared when all its pods have ended; but if it has lost dra_manager_state, some that it does not know to have the
// claim may run.
func (b *books) droppedHolds(c *claim, now time.Time) bool {
	running, _ := b.processes.any(c.pods, c.dropped, now)
	return running || b.processes.seen.Before(c.dropped)
}

// onlyListed returns the devices and claims of a container that PodResources lists and no other book has.
func (b *books) onlyListed(c *podresources.Holder, present map[name][]key, claims map[string]bool) []*holder {
	var list []*holder
	for res, ids := range c.ByResource {
		for _, id := range slices.Compact(slices.Sorted(slices.Values(ids))) {
			n := name{res, id}
			recorded := slices.ContainsFunc(present[n], func(k key) bool { return k.container == c.Container })
			if recorded || !hasUUID(id) && !b.ours[res] {
				continue
			}
			h := &holder{
				name: n, container: c.Container, pod: podName{c.Namespace, c.Pod}, book: PodResources,
				offered: b.advertised[n], accounted: b.advertised[n],
			}
			list = append(list, b.locate(h, resource.UUIDOf(id), ""))
		}
	}
	for _, k := range c.Claims {
		if claims[k.Name] {
			continue
		}
		for _, d := range k.Devices[b.driver] {
			h := &holder{container: c.Container, pod: podName{c.Namespace, c.Pod}, claim: k.Name, book: PodResources}
			list = append(list, b.locateClaimed(h, d))
		}
	}
	return list
}

// ofRecord returns the devices of a claim that has a record. If no pod that the kubelet has as active uses the claim,
// Unprepare is about to come.
func (b *books) ofRecord(uid string, c *claim, listed map[string]bool) []*holder {
	state := State("")
	if !c.dropped.IsZero() || b.alive() && !listed[c.name] {
		state = Ending
	}
	var list []*holder
	for _, p := range c.portions {
		h := &holder{
			claim: c.name, claimUID: uid, since: c.since, memory: p.Memory, admin: p.Admin, pods: c.pods, book: Record,
			state: b.orForgotten(state, claimPath(uid, podresources.DeviceName(p.Device.UUID))),
		}
		list = append(list, b.locate(h, p.Device.UUID, p.Device.Parent))
	}
	return list
}

// listedClaims returns the claims of the containers that PodResources lists.
func (b *books) listedClaims() map[string]bool {
	names := map[string]bool{}
	for i := range b.listed {
		for _, k := range b.listed[i].Claims {
			names[k.Name] = true
		}
	}
	return names
}

// locate sets which device the holder has. If it is a MIG device that the node does not have any more, all of its GPU
// is held; without knowing that, all devices of the node are.
func (b *books) locate(h *holder, uuid, parent string) *holder {
	h.uuid = uuid
	switch now, here := b.devices[uuid]; {
	case here:
		h.parent = now
	case strings.HasPrefix(uuid, gpuPrefix):
		h.parent = uuid
	case strings.HasPrefix(uuid, migPrefix):
		h.parent, h.absent = cmp.Or(parent, b.parents[uuid]), true
	}
	return h
}

// locateClaimed is locate for a device that a claim has by its name in the API. A name that is not ours is that of
// another driver with our name.
func (b *books) locateClaimed(h *holder, deviceName string) *holder {
	for _, prefix := range []string{gpuPrefix, migPrefix} {
		if bare, found := strings.CutPrefix(deviceName, strings.ToLower(prefix)); found && gpu.IsUUID(bare) {
			return b.locate(h, prefix+bare, "")
		}
	}
	h.uuid = deviceName
	return h
}

// conflicts reports whether a container or claim cannot have a device beside the holder.
func (h *holder) conflicts(d *resource.Device) bool {
	parent := cmp.Or(d.Parent, d.UUID)
	switch {
	case h.admin, h.state == Forgotten:
		return false
	case h.parent == "":
		return true
	case h.parent != parent:
		return false
	}
	return h.absent || h.uuid == d.UUID || h.uuid == parent || d.UUID == parent
}

// blocks reports whether no container may get a device from the device plugin because of the holder. The kubelet itself
// sees to it that two containers do not have the same device under the same name. Replicas share their device.
func (h *holder) blocks(d *resource.Device) bool {
	switch {
	case !h.conflicts(d):
		return false
	case h.uuid != d.UUID: // a part of the device, or the whole of it
		return true
	case h.accounted: // the kubelet gives this name to no other container
		return false
	}
	return !h.offered || h.id == d.ID // another replica of a device that is shared is free
}
