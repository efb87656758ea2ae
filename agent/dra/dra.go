package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/agent/apiserver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// Options are the parameters of a Driver. All are required but API.
type Options struct {
	// Name is the name of the driver, such as DefaultDriver.
	Name string
	// API is nil if the program was started without credentials. Then no slices are published or deleted, and no claim is
	// prepared. Those that are prepared can be unprepared.
	API  *apiserver.Client
	Host host.Host
	// Records is the directory of the records of prepared claims. It must survive a reboot.
	Records string
	// RegistryDir is the kubelet's directory of plugin sockets, plugins_registry.
	RegistryDir string
	// Leaving says that nothing is offered any more. The driver then ends when no claim has a device.
	Leaving bool
	// Beside says that another instance may still serve claims and is about to end. The socket then has another name than
	// its socket, and calls wait for RestoreAfter.
	Beside bool
	Ledger Ledger
	// PreStart prepares devices of a resource for containers, before their claim has them.
	PreStart func(ctx context.Context, resourceName string, devices []*resource.Device, wish PreStart) error
	// Resets reports whether PreStart may reset a device.
	Resets func(resourceName string, wish PreStart) bool
	// Changed is called when Remarks or Ready may have another result. It must return at once.
	Changed func()
	// Observer is notified of events; optional.
	Observer Observer
	Log      *slog.Logger
}

// Observer is notified of events, for metrics. Its methods must return at once and may be called concurrently.
type Observer interface {
	// ClaimHandled is called when the kubelet gets the result of an operation on a claim. The duration is that of the
	// operation.
	ClaimHandled(op Operation, err error, took time.Duration)
	// SliceWritten is called after a request that creates, changes or deletes a ResourceSlice. If the API server did it,
	// err is nil.
	SliceWritten(err error)
}

// Operation is what the kubelet wants of a claim.
type Operation string

// The operations.
const (
	Prepare   Operation = "prepare"
	Unprepare Operation = "unprepare"
)

// noObserver ignores all notifications.
type noObserver struct{}

// ClaimHandled implements Observer.
func (noObserver) ClaimHandled(Operation, error, time.Duration) {}

// SliceWritten implements Observer.
func (noObserver) SliceWritten(error) {}

// Driver is the DRA driver of a node. Before its actors run, call Restore. The other methods may be called
// concurrently.
type Driver struct {
	leaving   bool
	least     time.Duration // how long it serves at least if it is leaving
	left      atomic.Bool   // it was leaving, and does not serve any more
	id        Identity
	host      host.Host
	publisher *Publisher // nil without an API server
	claims    *claims
	socket    *socket
	retire    func() // makes calls wait no more
	observer  Observer

	mu       sync.Mutex
	snapshot *gpu.Snapshot
	roots    map[string]string // see PCIeRoots, of the snapshot
	omitted  []string          // see Slices
	offered  int               // the number of devices in slices
}

// New returns a Driver.
func New(o Options) *Driver {
	if o.Observer == nil {
		o.Observer = noObserver{}
	}
	d := &Driver{
		leaving: o.Leaving, least: servedLeaving, id: Identity{Driver: o.Name}, host: o.Host, observer: o.Observer,
		socket: newSocket(o.RegistryDir, o.Name, o.Beside, o.Log),
	}
	d.socket.changed = o.Changed
	retired, retire := context.WithCancel(context.Background())
	d.retire = retire
	d.claims = &claims{
		driver: o.Name, dir: o.Records, ledger: o.Ledger, preStart: o.PreStart, resets: o.Resets, patience: waitLimit,
		retired: retired, log: o.Log,
		boot:  host.ReadLine(o.Host.Proc("sys", "kernel", "random", "boot_id")),
		state: newPublished(), records: map[string]*record{}, bad: map[string]error{}, busy: map[string]chan struct{}{},
		alone: make(chan struct{}),
	}
	d.claims.serveAlone = sync.OnceFunc(func() { close(d.claims.alone) })
	if !o.Beside {
		d.claims.serveAlone()
	}
	d.socket.busy = d.claims.working
	if o.API != nil {
		d.id.Node = o.API.Node
		d.claims.api, d.claims.node = o.API, o.API.Node
		d.publisher = NewPublisher(o.API, d.id, o.Log)
		d.publisher.changed, d.publisher.written = o.Changed, o.Observer.SliceWritten
	}
	return d
}

// Restore reads the records of prepared claims, and tells the ledger who holds which devices.
func (d *Driver) Restore(ctx context.Context) error {
	err := d.claims.restore(ctx)
	if err == nil && !d.leaving {
		err = fileio.WriteDurably(d.offeredFile(), nil, 0o600)
	}
	return err
}

// offeredFile is there while the API server may have slices of the node.
func (d *Driver) offeredFile() string { return filepath.Join(d.claims.dir, "offered") }

// endLimit is how long another instance may take to end, and withdrawLimit how long the API server may take to delete
// the slices.
const (
	endLimit      = retireLimit + 2*time.Second
	withdrawLimit = 10 * time.Second
)

// RestoreAfter waits until another instance that serves claims has ended, if there is one. Then it reads the records
// again, and has calls answered. Calls wait for that: two instances that answer at the same time could give a device
// twice, since each has its own ledger. What the other one has prepared and unprepared is on record when it has ended.
func (d *Driver) RestoreAfter(ctx context.Context) error {
	poll(ctx, endLimit, func() bool { return !d.socket.OtherServes() })
	if err := d.claims.restore(ctx); err != nil {
		return err
	}
	if ctx.Err() == nil { // otherwise the other one may still serve
		d.claims.serveAlone()
	}
	return nil
}

// Retire says that another instance takes over. When the context of Serve ends, it then answers until the kubelet has
// closed its connections, at most for retireLimit.
func (d *Driver) Retire() {
	d.socket.retired.Store(true)
	d.retire()
}

// Offered reports whether the API server may still have slices that Leave deletes.
func (d *Driver) Offered() bool {
	_, err := os.Lstat(d.offeredFile())
	return d.leaving && err == nil
}

// Leave waits until the API server has deleted the slices, at most for withdrawLimit: it may be away.
func (d *Driver) Leave(ctx context.Context) {
	poll(ctx, withdrawLimit, func() bool { return d.publisher != nil && d.publisher.withdrawn() })
	if ctx.Err() == nil {
		_ = os.Remove(d.offeredFile()) // otherwise the next process waits too
	}
}

// poll calls a function until it returns true, the limit is over or ctx ends.
func poll(ctx context.Context, limit time.Duration, done func() bool) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for !done() {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// Offer is what a Driver offers of a node.
type Offer struct {
	// Resources have the devices that are in slices.
	Resources []resource.Resource
	// Displaced are extended resources of which the Node must have no allocatable devices before there are slices. The
	// scheduler takes it for a node with a device plugin otherwise, and the kubelet then starts pods without any device.
	Displaced []string
}

// Publish offers devices of a state, and returns at once. When it returns, devices that have left the state can no
// longer be prepared. Claims can have devices that are not offered any more.
func (d *Driver) Publish(s node.State, offer Offer) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.claims.state.set(&s)
	if s.Snapshot == nil || d.publisher == nil {
		return // the slices of an earlier process stay
	}
	if s.Snapshot != d.snapshot {
		d.snapshot, d.roots = s.Snapshot, PCIeRoots(d.host, s.Snapshot)
	}
	offered := s
	offered.Resources = offer.Resources
	var list []Slice
	list, d.omitted = Slices(d.id, &offered, d.roots)
	d.offered = 0
	for i := range list {
		d.offered += len(list[i].Spec.Devices)
	}
	d.publisher.Publish(list, offer.Displaced)
}

// Run publishes until ctx ends. At first it drops claims that are gone.
func (d *Driver) Run(ctx context.Context) error {
	if d.publisher == nil {
		return nil
	}
	var dropping sync.WaitGroup
	defer dropping.Wait()
	dropping.Go(func() { d.claims.dropGone(ctx) })
	return d.publisher.Run(ctx)
}

// servedLeaving is how long a driver that offers nothing any more serves at least: the scheduler may have allocated
// devices just before.
const servedLeaving = time.Minute

// Serve serves the kubelet until ctx ends, or a driver that offers nothing has no claims any more. It returns earlier
// with fileio.ErrHeld if another instance serves the kubelet.
func (d *Driver) Serve(ctx context.Context) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	if d.leaving {
		go func() {
			defer end()
			begun := time.Now()
			poll(ctx, math.MaxInt64, func() bool { return time.Since(begun) > d.least && d.claims.count() == 0 })
			if ctx.Err() == nil {
				_ = os.Remove(d.claims.dir) // fails if it is not empty
				d.left.Store(true)
			}
		}()
	}
	service := &server{claims: d.claims, socket: d.socket, observer: d.observer, stopping: ctx.Done()}
	drav1.RegisterDRAPluginServer(d.socket.server, service)
	drahealthv1.RegisterDRAResourceHealthServer(d.socket.server, service)
	pluginregistration.RegisterRegistrationServer(d.socket.server, service)
	return d.socket.run(ctx)
}

// Prepared returns the number of claims that hold devices, also those that are prepared again after a reboot.
func (d *Driver) Prepared() int { return d.claims.count() }

// Claims names these claims, like "ResourceClaim default/claim-1", or by their UIDs if their records cannot be read. It
// sorts them.
func (d *Driver) Claims() []string { return d.claims.names() }

// Left reports whether a driver that offers nothing any more has stopped to serve, since no claim had a device.
func (d *Driver) Left() bool { return d.left.Load() }

// Summary describes the state in a few words.
func (d *Driver) Summary() string {
	d.mu.Lock()
	offered := d.offered
	d.mu.Unlock()
	text := fmt.Sprintf("%s: %s offered, %s prepared", d.id.Driver, wording.Count(offered, "device"),
		wording.Count(d.claims.count(), "claim"))
	if err := d.Ready(); err != nil {
		text += ", " + wording.OneLine(err)
	}
	return text
}

// Ready returns an error if the kubelet has not registered the driver, or if the API server does not have the slices.
func (d *Driver) Ready() error {
	var errs []error
	if d.publisher != nil {
		if why := d.publisher.Reason(); why != "" {
			errs = append(errs, errors.New("the ResourceSlices of the node are not published: "+why))
		}
	}
	if why := d.socket.currentReason(); why != "" {
		errs = append(errs, errors.New("the DRA driver is not registered with the kubelet: "+why))
	}
	return errors.Join(errs...)
}

// Remarks is about devices that are not in slices, and claims whose devices are gone or unknown.
func (d *Driver) Remarks() []node.Remark {
	var list []node.Remark
	d.mu.Lock()
	for _, text := range d.omitted {
		list = append(list, node.Remark{Key: "DRA " + text, Level: slog.LevelWarn, Text: text})
	}
	d.mu.Unlock()
	return append(list, d.claims.remarks()...)
}
