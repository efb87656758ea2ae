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
	// TakeClaim records that a claim, given by its UID and "NAMESPACE/NAME", has devices, or parts of their memory. If it
	// cannot have them, it returns an error that says why, and records nothing. A claim may take the same again.
	TakeClaim(ctx context.Context, uid, name string, portions []ledger.Portion) error
	// RestoreClaim records what a claim has since a time in an earlier process, whoever else has it.
	RestoreClaim(uid, name string, since time.Time, portions []ledger.Portion)
	// LoseClaim records that it is unknown which devices a claim has.
	LoseClaim(uid string)
	// DropClaim records that a claim has no devices any more.
	DropClaim(uid string)
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
	inUse    func(ctx context.Context, uuid string) (bool, error)
	log      *slog.Logger
	state    *published

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
		c.ledger.DropClaim(uid)
	case err != nil:
		delete(c.records, uid)
		c.bad[uid] = err
		c.ledger.LoseClaim(uid)
	default:
		c.records[uid] = r
		c.ledger.RestoreClaim(uid, r.claim(), r.Since, r.portions())
	}
	return nil
}

// count returns the number of claims that have a record.
func (c *claims) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.records) + len(c.bad)
}

// portions returns what the claim has of devices.
func (r *record) portions() []ledger.Portion {
	var list []ledger.Portion
	for _, d := range r.Devices {
		if !d.Admin {
			device := &resource.Device{ID: d.UUID, UUID: d.UUID, Parent: d.Parent}
			list = append(list, ledger.Portion{Device: device, Memory: d.Memory})
		}
	}
	return list
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

// prepare gives a claim its devices, and returns what the kubelet passes to the containers. A claim that is prepared
// already gets the same answer.
func (c *claims) prepare(ctx context.Context, k *drav1.Claim) ([]*drav1.Device, error) {
	if !isUID(k.GetUid()) {
		return nil, fmt.Errorf("its UID %q is no UID", k.GetUid())
	}
	unlock, err := c.lock(ctx, k.GetUid())
	if err != nil {
		return nil, err
	}
	defer unlock()
	state, _ := c.state.get()
	if state == nil || state.Snapshot == nil {
		return nil, errors.New("the GPUs have not been read yet")
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
	read, err := c.read(ctx, k.GetNamespace(), k.GetName())
	if err != nil {
		return nil, fmt.Errorf("read it: %w", err)
	}
	list, err := read.devices(k.GetUid(), Identity{c.driver, c.node}, state)
	if err != nil {
		return nil, err
	}
	return c.give(ctx, k, list, state)
}

// read reads a claim from the API server.
func (c *claims) read(ctx context.Context, namespace, name string) (*claim, error) {
	var one claim
	path := apiPath + "/namespaces/" + url.PathEscape(namespace) + "/resourceclaims/" + url.PathEscape(name)
	return &one, c.api.Get(ctx, path, &one)
}

// dropGone drops the claims that do not have their devices any more by the API server, and whose devices nothing uses.
// The kubelet unprepares a claim only if it knows of it, which it does not after the node was made new. Without an
// answer of the API server it asks again later.
func (c *claims) dropGone(ctx context.Context) {
	c.mu.Lock()
	list := slices.Collect(maps.Values(c.records))
	c.mu.Unlock()
	for pause := firstPause; len(list) > 0; pause = min(2*pause, longestPause) {
		// Without the API group all claims seem to be gone.
		if err := c.api.Get(ctx, apiPath, &struct{}{}); err == nil {
			list = slices.DeleteFunc(list, func(r *record) bool { return c.checkGone(ctx, r) })
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// checkGone drops a claim if it is gone. It returns false if that is unknown.
func (c *claims) checkGone(ctx context.Context, r *record) (known bool) {
	one, err := c.read(ctx, r.Namespace, r.Name)
	switch {
	case err != nil && !apiserver.Answered(err, http.StatusNotFound):
		return false
	case err == nil && one.has(r):
		return true
	}
	for _, p := range r.portions() {
		if used, err := c.inUse(ctx, p.Device.UUID); used || err != nil {
			c.log.Warn(r.label() + " is gone, and its devices may still be in use: they are kept for it")
			return true
		}
	}
	unlock, err := c.lock(ctx, r.UID)
	if err != nil {
		return false
	}
	defer unlock()
	c.mu.Lock()
	same := c.records[r.UID] == r
	c.mu.Unlock()
	if !same { // it was prepared again meanwhile
		return true
	}
	c.log.Info(r.label() + " is gone: its devices are taken back")
	if err := c.drop(r.UID); err != nil {
		c.log.Warn(r.label() + " is gone: " + wording.OneLine(err))
	}
	return true
}

// give records that a claim has devices: in the ledger, which decides, and then on disk.
func (c *claims) give(
	ctx context.Context, k *drav1.Claim, list []allotted, state *node.State,
) ([]*drav1.Device, error) {
	r := &record{
		Version: recordVersion, Namespace: k.GetNamespace(), Name: k.GetName(), UID: k.GetUid(), Boot: c.boot, Pool: c.node,
		Since: time.Now().UTC().Truncate(time.Second),
	}
	var portions []ledger.Portion
	for _, a := range list {
		r.Devices = append(r.Devices, recordDevice{
			Request: a.Request, Device: a.Device, UUID: a.device.UUID, Parent: a.device.Parent,
			ShareID: a.ShareID, Memory: a.memory, Admin: a.AdminAccess,
		})
		if !a.AdminAccess { // others may have the device too
			device := *a.device // the ledger need not keep the whole state
			portions = append(portions, ledger.Portion{Device: &device, Memory: a.memory})
		}
	}
	answer, err := c.answer(r, state)
	if err != nil {
		return nil, err
	}
	if err := c.ledger.TakeClaim(ctx, r.UID, r.claim(), portions); err != nil {
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

// prepareLimit is how long the preparation of a claim's devices may take. The kubelet ends the call after 45 s.
const prepareLimit = 40 * time.Second

// undo takes the devices of a claim back that could not be prepared. If it has a record of an earlier boot, or one that
// cannot be read, it keeps what it had. The caller has locked the claim.
func (c *claims) undo(uid string) error {
	c.mu.Lock()
	old, bad := c.records[uid], c.bad[uid]
	c.mu.Unlock()
	switch {
	case old != nil:
		c.ledger.RestoreClaim(uid, old.claim(), old.Since, old.portions())
	case bad != nil:
		c.ledger.LoseClaim(uid)
	default:
		return c.drop(uid)
	}
	return nil
}

// drop takes the devices of a claim back, and removes its record. The caller has locked the claim.
func (c *claims) drop(uid string) error {
	c.ledger.DropClaim(uid)
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
	ctx, cancel := context.WithTimeout(ctx, prepareLimit)
	defer cancel()
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
	if !isUID(uid) {
		return fmt.Errorf("its UID %q is no UID", uid)
	}
	unlock, err := c.lock(ctx, uid)
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
