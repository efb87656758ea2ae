package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// Ledger knows who holds which devices, by both doors.
type Ledger interface {
	// TakeClaim records that a claim has devices. If a container of the device plugin or another claim has one of them,
	// it returns an error that names the holder, and records nothing. A claim may take its devices again.
	TakeClaim(ctx context.Context, uid, label string, devices []*resource.Device) error
	// RestoreClaim records what a claim has since an earlier process, whoever else has it.
	RestoreClaim(uid, label string, devices []*resource.Device)
	// DropClaim records that a claim has no devices any more.
	DropClaim(uid string)
}

// claims prepares claims for the kubelet. Its methods may be called concurrently.
type claims struct {
	id     Identity
	api    api
	dir    string // of the records
	boot   string // the kernel's boot ID
	ledger Ledger
	log    *slog.Logger
	state  atomic.Pointer[node.State] // nil before the first one

	mu      sync.Mutex
	records map[string]*record       // of prepared claims, by UID
	bad     map[string]error         // why records cannot be read, by the claim's UID
	busy    map[string]chan struct{} // the claims that calls work on, by UID; closed at the end of a call
}

// newClaims returns claims with the records of an earlier process. Claims of an earlier boot hold no device, since no
// container runs with them. They are prepared again when the kubelet starts their pods.
func newClaims(c *claims) (*claims, error) {
	if err := fileio.MakeDirs(c.dir); err != nil {
		return nil, fmt.Errorf("make the directory of the records of prepared claims: %w", err)
	}
	c.records, c.busy = map[string]*record{}, map[string]chan struct{}{}
	list, bad, err := readRecords(c.dir)
	if err != nil {
		return nil, err
	}
	c.bad = bad
	for i := range list {
		r := &list[i]
		if r.Boot != c.boot {
			continue
		}
		c.ledger.RestoreClaim(r.UID, r.label(), r.held())
		c.records[r.UID] = r
	}
	return c, nil
}

// held returns the devices that no other claim may have.
func (r *record) held() []*resource.Device {
	var list []*resource.Device
	for _, d := range r.Devices {
		if !d.Admin {
			list = append(list, &resource.Device{ID: d.UUID, UUID: d.UUID, Parent: d.Parent})
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
	state := c.state.Load()
	if state == nil || state.Snapshot == nil {
		return nil, errors.New("the GPUs have not been read yet")
	}
	c.mu.Lock()
	r := c.records[k.GetUid()]
	c.mu.Unlock()
	if r != nil {
		return c.answer(r, state)
	}
	var read claim
	path := apiPath + "/namespaces/" + url.PathEscape(k.GetNamespace()) + "/resourceclaims/" + url.PathEscape(k.GetName())
	if err := c.api.Get(ctx, path, &read); err != nil {
		return nil, fmt.Errorf("read it: %w", err)
	}
	list, err := read.devices(k.GetUid(), c.id, state)
	if err != nil {
		return nil, err
	}
	return c.give(ctx, k, list, state)
}

// give records that a claim has devices: in the ledger, which decides, and then on disk.
func (c *claims) give(
	ctx context.Context, k *drav1.Claim, list []allotted, state *node.State,
) ([]*drav1.Device, error) {
	r := &record{
		Version: recordVersion, Namespace: k.GetNamespace(), Name: k.GetName(), UID: k.GetUid(), Boot: c.boot,
	}
	for _, a := range list {
		r.Devices = append(r.Devices, recordDevice{
			Request: a.Request, Device: a.Device, UUID: a.device.UUID, Parent: a.device.Parent,
			ShareID: a.ShareID, Admin: a.AdminAccess,
		})
	}
	answer, err := c.answer(r, state)
	if err != nil {
		return nil, err
	}
	if err := c.ledger.TakeClaim(ctx, r.UID, r.label(), r.held()); err != nil {
		return nil, err
	}
	if err := r.write(c.dir); err != nil {
		c.ledger.DropClaim(r.UID)
		return nil, fmt.Errorf("record it: %w", errors.Join(err, removeRecord(c.dir, r.UID)))
	}
	c.mu.Lock()
	c.records[r.UID] = r
	delete(c.bad, r.UID)
	c.mu.Unlock()
	c.log.Info(r.label()+" is prepared", "devices", r.uuids())
	return answer, nil
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
		one := &drav1.Device{
			RequestNames: []string{d.Request}, PoolName: c.id.Node, DeviceName: d.Device, CdiDeviceIds: o.cdiNames(),
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
	if err := removeRecord(c.dir, uid); err != nil {
		return fmt.Errorf("remove its record: %w", err)
	}
	c.ledger.DropClaim(uid)
	c.mu.Lock()
	r := c.records[uid]
	delete(c.records, uid)
	delete(c.bad, uid)
	c.mu.Unlock()
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
	if state := c.state.Load(); state != nil && state.Snapshot != nil {
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
