package agent

import (
	"context"
	"errors"
	"runtime/debug"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/internal/sdnotify"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/node"
)

// daemon does what Serve and Watch have in common: it runs the node and a role, reports their state to systemd and
// over HTTP, and reloads the configuration.
type daemon struct {
	opts    *Options
	role    role
	node    *node.Reconciler
	metrics *metrics.Metrics
	systemd *sdnotify.Notifier
	changed wake.Chan // the state that is reported in one line may have changed

	takesOver bool                        // whether another instance hands over
	watched   wake.Chan                   // woken when the kubelet begins or ends to watch a resource
	locked    func(context.Context) error // called when the node's files are locked; may be nil
	alone     func(context.Context) error // called when no other instance serves any more; may be nil
	release   func()                      // lets that instance end its plugin; nil without one
	idle      atomic.Pointer[idle]        // nil while the node is served
	unserved  atomic.Pointer[node.Remark] // why metrics are not served; nil while they are
	logged    time.Time                   // when awaitTakeOver last logged why it waits
}

// How much the heap may grow before a garbage collection, in percent of the memory in use: at the start, and later. A
// collection before the registration would delay that by 4 ms of 16. Later only 2 MB are in use, so frequent
// collections take no noticeable time.
const (
	startGCPercent = 200
	gcPercent      = 25
)

// run reconciles the node and runs the role's actors until ctx ends.
func (d *daemon) run(ctx context.Context) error {
	debug.SetGCPercent(startGCPercent)
	opening, endOpening := context.WithCancel(ctx)
	var opened errgroup.Group
	if !d.takesOver { // another instance may be resetting a GPU
		opened.Go(func() error { return d.opts.Driver.Open(opening) })
	}
	err := d.checkAndRun(ctx)
	endOpening()
	_ = opened.Wait() // the first snapshot returns the same error
	d.closeDriver()
	return err
}

func (d *daemon) closeDriver() {
	if err := d.opts.Driver.Close(); err != nil {
		d.opts.Log.Debug("the driver's library could not be closed: " + err.Error())
	}
}

// checkAndRun runs the actors if the configuration can be used.
func (d *daemon) checkAndRun(ctx context.Context) error {
	if err := checkNode(d.opts); err != nil { // before any file is written
		return err
	}
	if err := d.role.check(d.opts); err != nil {
		return err
	}
	return runAll(ctx, d.serveMetrics, d.watchdog, func(ctx context.Context) error {
		err := d.serve(ctx)
		if errors.Is(err, errHandedOver) {
			return d.standBy(ctx)
		}
		return err
	})
}

// serve serves the node until ctx ends or another instance takes over.
func (d *daemon) serve(ctx context.Context) error {
	if err := d.takeOver(ctx); err != nil || ctx.Err() != nil {
		return errors.Join(err, d.node.Unlock())
	}
	if d.release != nil {
		defer d.release()
	}
	if d.locked != nil {
		if err := d.locked(ctx); err != nil {
			return errors.Join(err, d.node.Unlock())
		}
	}
	waiting := d.opts.LogSlowCalls()
	err := d.node.Start(ctx, d.role.publish)
	waiting.Stop()
	if err != nil {
		return err
	}
	time.AfterFunc(time.Second, func() { debug.SetGCPercent(gcPercent) })
	return d.role.run(ctx, func(ctx context.Context) error {
		return runAll(ctx, d.node.Run, d.reportStatus, d.reload, d.endOverlap)
	})
}

// runAll runs actors until ctx ends or one of them returns an error. It returns that error after all of them have
// ended.
func runAll(ctx context.Context, actors ...actor) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, run := range actors {
		g.Go(func() error { return run(ctx) })
	}
	return g.Wait()
}
