package dra

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"gpu-cdi-plugin/agent/apiserver"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// Ledger knows who holds which devices, by both doors.
type Ledger interface {
	// TakeClaim records that a claim has devices, or parts of their memory. It waits until ctx ends for what passes by
	// itself. If the claim cannot have them, it returns an error that says why, and records nothing. A claim may take the
	// same again.
	TakeClaim(ctx context.Context, c ledger.Claim) error
	// RestoreClaim records what a claim has since a time in an earlier process, whoever else has it.
	RestoreClaim(c ledger.Claim, since time.Time)
	// DropClaim says that a claim is unprepared, and LoseRecord that it only has no record any more.
	DropClaim(uid string)
	LoseRecord(uid string)
	// IsAbandoned reports whether nothing on the node has a claim with a record any more, although it was not unprepared.
	// An error means that this is unknown.
	IsAbandoned(uid string) (bool, error)
}

// claims prepares claims for the kubelet. Its methods may be called concurrently.
type claims struct {
	driver   string // its name
	api      api    // nil without credentials
	node     string // the name of the Node, or empty without credentials
	dir      string // of the records
	boot     string // the kernel's boot ID
	ledger   Ledger
	preStart preStart
	resets   func(resourceName string, wish PreStart) bool
	patience time.Duration   // waitLimit; only tests change it
	retired  context.Context // ends when another instance takes over, so that no call waits any more
	log      *slog.Logger
	state    *published

	alone      chan struct{} // closed when no other instance serves claims; calls wait for it
	serveAlone func()        // closes it

	mu      sync.Mutex
	records map[string]*record       // of prepared claims, by UID
	bad     map[string]error         // why records cannot be read, by the claim's UID
	busy    map[string]chan struct{} // the claims that calls work on, by UID; closed at the end of a call
}

// restore reads the records. Claims of an earlier boot hold their devices too, and are prepared again when the kubelet
// starts their pods.
func (c *claims) restore(ctx context.Context) error {
	if err := fileio.MakeDirs(c.dir); err != nil {
		return fmt.Errorf("make the directory of the records of prepared claims: %w", err)
	}
	uids, err := recorded(c.dir)
	if err != nil {
		return err
	}
	c.mu.Lock()
	uids = append(uids, slices.Collect(maps.Keys(c.records))...)
	c.mu.Unlock()
	for _, uid := range uids {
		if err := c.restoreOne(ctx, uid); err != nil {
			return err
		}
	}
	return nil
}

// restoreOne makes a claim what its record says.
func (c *claims) restoreOne(ctx context.Context, uid string) error {
	unlock, err := c.lock(ctx, uid)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := readRecord(c.dir, uid)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.bad, uid)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		delete(c.records, uid)
		c.ledger.LoseRecord(uid)
	case err != nil:
		delete(c.records, uid)
		c.bad[uid] = err
		c.ledger.LoseRecord(uid)
	default:
		c.records[uid] = r
		c.ledger.RestoreClaim(r.held(), r.Since)
	}
	return nil
}

// count returns the number of claims that have a record.
func (c *claims) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.records) + len(c.bad)
}

// names names these claims.
func (c *claims) names() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []string
	for _, r := range c.records {
		list = append(list, r.label())
	}
	for uid := range c.bad {
		list = append(list, "the ResourceClaim with the UID "+uid)
	}
	slices.Sort(list)
	return list
}

// held returns what the claim has.
func (r *record) held() ledger.Claim {
	held := ledger.Claim{UID: r.UID, Name: r.claim(), Pods: r.Pods}
	for _, d := range r.Devices {
		device := &resource.Device{ID: d.UUID, UUID: d.UUID, Parent: d.Parent}
		held.Portions = append(held.Portions, ledger.Portion{Device: device, Memory: d.Memory, Admin: d.Admin})
	}
	return held
}

// lock waits until no other call works on a claim.
func (c *claims) lock(ctx context.Context, uid string) (unlock func(), err error) {
	for {
		c.mu.Lock()
		other := c.busy[uid]
		if other == nil {
			mine := make(chan struct{})
			c.busy[uid] = mine
			c.mu.Unlock()
			return func() {
				c.mu.Lock()
				delete(c.busy, uid)
				c.mu.Unlock()
				close(mine)
			}, nil
		}
		c.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// begin waits until no other instance serves claims, and no other call works on this one.
func (c *claims) begin(ctx context.Context, uid string) (end func(), err error) {
	if !isUID(uid) {
		return nil, fmt.Errorf("its UID %q is no UID", uid)
	}
	select {
	case <-c.alone:
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the end of the instance before this one: %w", context.Cause(ctx))
	}
	return c.lock(ctx, uid)
}

// working reports whether a call works on a claim.
func (c *claims) working() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.busy) > 0
}

// prepare gives a claim its devices, and returns what the kubelet passes to the containers. A claim that is prepared
// already gets the same answer.
func (c *claims) prepare(ctx context.Context, k *drav1.Claim) ([]*drav1.Device, error) {
	ctx, cancel := context.WithTimeout(ctx, prepareLimit)
	defer cancel()
	waiting, endWaiting := context.WithTimeout(ctx, c.patience)
	defer endWaiting()
	defer context.AfterFunc(c.retired, endWaiting)() //nolint:contextcheck // two contexts end the wait
	unlock, err := c.begin(ctx, k.GetUid())
	if err != nil {
		return nil, err
	}
	defer unlock()
	state, err := c.awaitState(waiting)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	r := c.records[k.GetUid()]
	c.mu.Unlock()
	if r != nil && r.Boot == c.boot {
		return c.answer(r, state)
	}
	if c.api == nil {
		return nil, errors.New("the driver was started without the credentials of a service account")
	}
	read, err := c.readAgain(ctx, waiting, k.GetNamespace(), k.GetName())
	if err != nil {
		return nil, fmt.Errorf("read it: %w", err)
	}
	list, err := read.devices(k.GetUid(), Identity{c.driver, c.node}, state)
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(list, func(a allotted) bool { return c.resets(a.resource, a.preStart) }) {
		deadline, _ := waiting.Deadline()
		waiting, endWaiting = context.WithDeadline(waiting, deadline.Add(waitBeforeReset-waitLimit))
		defer endWaiting()
	}
	return c.give(ctx, waiting, c.newRecord(k, read.pods()), list, state)
}

func (c *claims) newRecord(k *drav1.Claim, pods []string) *record {
	return &record{
		Version: recordVersion, Namespace: k.GetNamespace(), Name: k.GetName(), UID: k.GetUid(), Boot: c.boot, Pool: c.node,
		Pods: pods, Since: time.Now().UTC().Truncate(time.Second),
	}
}

const (
	// prepareLimit is how long the preparation of a claim may take. The kubelet ends the call after 45 s. Of that it
	// may wait for waitLimit for what passes by itself, such as the end of the last holder, or for waitBeforeReset
	// before a reset: if the call fails, the kubelet repeats it only after its sync period, which is a minute by
	// default.
	prepareLimit    = 40 * time.Second
	waitLimit       = 25 * time.Second
	waitBeforeReset = 10 * time.Second
	// readPause is the time between two attempts to read a claim from the API server.
	readPause = time.Second
)

// awaitState waits until the GPUs have been read.
func (c *claims) awaitState(ctx context.Context) (*node.State, error) {
	for {
		state, changed := c.state.get()
		if state != nil && state.Snapshot != nil {
			return state, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, errors.New("the GPUs have not been read yet")
		}
	}
}

// readAgain is read, but repeats a request that fails until the context `waiting` ends, unless the API server says that
// there is no such claim.
func (c *claims) readAgain(ctx, waiting context.Context, namespace, name string) (*claim, error) {
	for {
		one, err := c.read(ctx, namespace, name)
		if err == nil || apiserver.Answered(err, http.StatusNotFound) {
			return one, err
		}
		select {
		case <-waiting.Done():
			return nil, err
		case <-time.After(readPause):
		}
	}
}

// read reads a claim from the API server.
func (c *claims) read(ctx context.Context, namespace, name string) (*claim, error) {
	var one claim
	path := apiPath + "/namespaces/" + url.PathEscape(namespace) + "/resourceclaims/" + url.PathEscape(name)
	return &one, c.api.Get(ctx, path, &one)
}

// dropInterval is the time between two searches for claims that are gone.
const dropInterval = 30 * time.Second

// dropGone drops claims, until ctx ends, that do not have their devices any more by the API server, and that nothing
// on the node has. The kubelet unprepares a claim only if it knows of it, which it does not after the node was made
// new, or if its record of claims was removed.
func (c *claims) dropGone(ctx context.Context) {
	for pause := firstPause; ; pause = min(2*pause, dropInterval) {
		c.mu.Lock()
		list := slices.Collect(maps.Values(c.records))
		c.mu.Unlock()
		for _, r := range list {
			c.dropIfGone(ctx, r)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// dropIfGone drops a claim if it is gone.
func (c *claims) dropIfGone(ctx context.Context, r *record) {
	abandoned, err := c.ledger.IsAbandoned(r.UID)
	c.mu.Lock()
	again := r.unsure
	r.unsure = err != nil
	c.mu.Unlock()
	if err != nil && !again {
		c.log.Warn(r.label() + " keeps its devices if it is gone, since it is unknown whether a pod still has them: " +
			wording.OneLine(err))
	}
	if !abandoned || !c.isGone(ctx, r) {
		return
	}
	unlock, err := c.lock(ctx, r.UID)
	if err != nil {
		return
	}
	defer unlock()
	c.mu.Lock()
	same := c.records[r.UID] == r
	c.mu.Unlock()
	if !same { // it was prepared again meanwhile
		return
	}
	c.log.Info(r.label() + " is gone: its devices are taken back")
	if err := c.drop(r.UID); err != nil {
		c.log.Warn(r.label() + " is gone: " + wording.OneLine(err))
	}
}

// isGone reports whether the API server says that a claim does not have its devices any more.
func (c *claims) isGone(ctx context.Context, r *record) bool {
	one, err := c.read(ctx, r.Namespace, r.Name)
	if err == nil {
		return !one.has(r)
	}
	// Without the API group all claims seem to be gone.
	return apiserver.Answered(err, http.StatusNotFound) && c.api.Get(ctx, apiPath, &struct{}{}) == nil
}

// give records that a claim has devices: in the ledger, which decides, and then on disk.
//
// It waits for what passes by itself until the context `waiting` ends.
func (c *claims) give(
	ctx, waiting context.Context, r *record, list []allotted, state *node.State,
) ([]*drav1.Device, error) {
	held := r.held()
	for _, a := range list {
		r.Devices = append(r.Devices, recordDevice{
			Request: a.Request, Device: a.Device, UUID: a.device.UUID, Parent: a.device.Parent,
			ShareID: a.ShareID, Memory: a.memory, Admin: a.AdminAccess,
		})
		device := *a.device // the ledger need not keep the whole state
		held.Portions = append(held.Portions, ledger.Portion{Device: &device, Memory: a.memory, Admin: a.AdminAccess})
	}
	answer, err := c.answer(r, state)
	if err != nil {
		return nil, err
	}
	if err := c.ledger.TakeClaim(waiting, held); err != nil {
		return nil, err
	}
	if err := c.prepareDevices(ctx, list); err != nil {
		return nil, errors.Join(err, c.undo(r.UID))
	}
	if err := r.write(c.dir); err != nil {
		return nil, fmt.Errorf("record it: %w", errors.Join(err, c.undo(r.UID)))
	}
	c.mu.Lock()
	c.records[r.UID] = r
	delete(c.bad, r.UID)
	c.mu.Unlock()
	c.log.Info(r.label()+" is prepared", "devices", r.uuids())
	return answer, nil
}

// undo takes the devices of a claim back that could not be prepared. If it has a record of an earlier boot, or one that
// cannot be read, it keeps what it had. The caller has locked the claim.
func (c *claims) undo(uid string) error {
	c.mu.Lock()
	old, bad := c.records[uid], c.bad[uid]
	c.mu.Unlock()
	switch {
	case old != nil:
		c.ledger.RestoreClaim(old.held(), old.Since)
	default:
		c.ledger.LoseRecord(uid)
		if bad == nil {
			return c.removeRecord(uid)
		}
	}
	return nil
}

// drop takes the devices of a claim back, and removes its record. The caller has locked the claim.
func (c *claims) drop(uid string) error {
	c.ledger.DropClaim(uid)
	return c.removeRecord(uid)
}

func (c *claims) removeRecord(uid string) error {
	c.mu.Lock()
	delete(c.records, uid)
	delete(c.bad, uid)
	c.mu.Unlock()
	if err := removeRecord(c.dir, uid); err != nil {
		return fmt.Errorf("remove its record: %w", err)
	}
	return nil
}

// preStart prepares devices of a resource for containers, before their claim has them.
type preStart func(ctx context.Context, resourceName string, devices []*resource.Device, wish PreStart) error

// prepareDevices prepares the devices of a claim by the policies of their resources, as for a container of the device
// plugin, and by its configuration. Devices with admin access are left alone, since other claims have them. A share is
// prepared like a replica, also if the device is not shared any more: other claims that have shares of it may use it.
func (c *claims) prepareDevices(ctx context.Context, list []allotted) error {
	type alike struct {
		resource string
		wish     PreStart
	}
	var order []alike
	groups := map[alike][]*resource.Device{}
	for _, a := range list {
		if a.AdminAccess {
			continue
		}
		d := *a.device
		if a.memory > 0 && !d.Shared() {
			d.Replica = 0
		}
		key := alike{a.resource, a.preStart}
		if groups[key] == nil {
			order = append(order, key)
		}
		groups[key] = append(groups[key], &d)
	}
	for _, key := range order {
		if err := c.preStart(ctx, key.resource, groups[key], key.wish); err != nil {
			return err
		}
	}
	return nil
}

// answer returns the devices of a claim with their CDI names of the present spec.
func (c *claims) answer(r *record, state *node.State) ([]*drav1.Device, error) {
	byName := offersByName(state)
	var list []*drav1.Device
	for _, d := range r.Devices {
		o, offered := byName[d.Device]
		if !offered {
			return nil, fmt.Errorf("the node has no device %s any more", d.Device)
		}
		request, _, _ := strings.Cut(d.Request, "/") // the kubelet compares without the subrequest of firstAvailable
		one := &drav1.Device{
			RequestNames: []string{request}, PoolName: r.Pool, DeviceName: d.Device, CdiDeviceIds: o.cdiNames(),
		}
		if d.ShareID != "" {
			one.ShareId = &d.ShareID
		}
		list = append(list, one)
	}
	return list, nil
}

func (r *record) uuids() []string {
	var list []string
	for _, d := range r.Devices {
		list = append(list, d.UUID)
	}
	return list
}

// unprepare takes the devices of a claim back. A claim that is not prepared is no error.
func (c *claims) unprepare(ctx context.Context, k *drav1.Claim) error {
	uid := k.GetUid()
	unlock, err := c.begin(ctx, uid)
	if err != nil {
		return err
	}
	defer unlock()
	c.mu.Lock()
	r := c.records[uid]
	c.mu.Unlock()
	if err := c.drop(uid); err != nil {
		return err
	}
	if r != nil {
		c.log.Info(r.label()+" is unprepared", "devices", r.uuids())
	}
	return nil
}

// remarks says which claims have devices that the node does not offer any more, and which records cannot be read.
func (c *claims) remarks() []node.Remark {
	var list []node.Remark
	add := func(key, text string) {
		list = append(list, node.Remark{Key: key, Level: slog.LevelWarn, Text: text})
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for uid, err := range c.bad {
		add("claim "+uid, "it is unknown which devices the claim with the UID "+uid+" has, since its record cannot be read: "+
			wording.Shorten(wording.OneLine(err), maxMessage))
	}
	if state, _ := c.state.get(); state != nil && state.Snapshot != nil {
		byName := offersByName(state)
		for _, r := range c.records {
			for _, d := range r.Devices {
				if _, offered := byName[d.Device]; !offered {
					add("claim "+r.UID+" "+d.Device, r.label()+" has "+d.UUID+", which the node does not offer any more")
				}
			}
		}
	}
	slices.SortFunc(list, func(a, b node.Remark) int { return strings.Compare(a.Key, b.Key) })
	return list
}
