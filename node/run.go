package node

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wake"
)

const (
	// PollInterval is the default of Options.Interval. suspectInterval is the longest time between two polls while
	// probes may soon make a device healthy.
	PollInterval    = 2 * wake.Tick
	suspectInterval = time.Second
	// minPollPause is the shortest time between a poll and the next one: after an event of the driver, and while a GPU
	// has not answered.
	minPollPause = 200 * time.Millisecond
	// maxReconcilePause is the longest time between two reconciliations. Some changes are shown neither by the driver
	// nor by a poll, for example if one of the driver's files is overwritten in place. They can go unnoticed for this
	// time.
	maxReconcilePause = time.Minute
	// stuckAfter is how long a reconciliation may take. The driver's own deadlines are a quarter of that.
	stuckAfter = 2 * time.Minute
)

// Alive returns an error if Run has been stuck for two minutes.
func (r *Reconciler) Alive() error {
	still := time.Since(time.Unix(0, r.heartbeat.Load()))
	if still < stuckAfter {
		return nil
	}
	return fmt.Errorf("the reconciler has been stuck for %s", still.Round(time.Second))
}

// Run reconciles until ctx ends. It returns nil or ErrDriverChanged.
func (r *Reconciler) Run(ctx context.Context) error {
	defer r.monitor.saveOrRemark()
	watcher, watchErr := wake.NewDirWatcher()
	if watchErr != nil {
		r.logUnwatched(watchErr)
		watcher = &fsnotify.Watcher{}
	} else {
		defer watcher.Close()
	}
	watch := func() {
		if watchErr == nil {
			for _, dir := range r.opts.Dirs { // again and again, since directories may be created or replaced later
				_ = watcher.Add(dir) // if this fails, polls notice changes
			}
		}
	}
	watch()
	if r.changed() { // between Start and the watch
		r.Trigger()
	}
	timer := time.NewTimer(0) // at once: later probes are compared with the first ones
	defer timer.Stop()
	for {
		r.heartbeat.Store(time.Now().UnixNano())
		watch()
		differs := false
		select {
		case <-ctx.Done():
			return nil
		case <-r.wake:
			differs = true
		case <-watcher.Events:
			differs = r.changed()
		case err := <-watcher.Errors:
			r.logUnwatched(err)
		case <-r.monitor.probeNow: // a container can cause events in a loop
			timer.Reset(minPollPause - time.Since(r.polled))
		case <-timer.C:
			differs = r.poll(ctx)
			timer.Reset(max(minPollPause, r.untilPoll()))
		}
		if differs {
			if err := r.reconcile(ctx); err != nil {
				return err
			}
		}
	}
}

func (r *Reconciler) logUnwatched(err error) {
	r.log.Warn("the kernel does not report changes of the CDI directories, so they are polled: "+err.Error(),
		"every", r.opts.Interval)
}

// untilPoll returns the time until the next poll.
func (r *Reconciler) untilPoll() time.Duration {
	switch {
	case r.late:
		return 0
	case r.monitor.needsFrequentProbes():
		return wake.Next(min(r.opts.Interval, suspectInterval))
	}
	return wake.Next(r.opts.Interval)
}

// poll probes the GPUs, and reports whether to reconcile: because the node has changed since the last reconciliation,
// or because that failed.
func (r *Reconciler) poll(ctx context.Context) bool {
	r.polled = time.Now()
	if r.resting {
		return r.fails() || r.changed()
	}
	probes := r.monitor.poll(ctx)
	r.late = slices.ContainsFunc(probes, func(p gpu.Probe) bool { return p.Late })
	switch {
	case r.plan == nil, r.failures > 0, r.State().Err != nil, time.Since(r.reconciled) >= maxReconcilePause:
		return true
	case r.fails(), r.changed():
		return true
	case r.asInSnapshot(probes):
		r.rest(ctx)
		return false
	}
	s, err := r.opts.Source.Snapshot(ctx)
	return err != nil || !reflect.DeepEqual(s, r.plan.snapshot)
}

// fails reports whether containers must not get devices.
func (r *Reconciler) fails() bool { return r.opts.Check != nil && r.opts.Check() != nil }

// rest closes the driver until something changes, if the options say so.
func (r *Reconciler) rest(ctx context.Context) {
	if r.opts.Rest == nil || r.late || r.monitor.needsFrequentProbes() || !r.opts.Rest(ctx) {
		return
	}
	r.resting = true
	r.monitor.expectGap()
	r.log.Debug("nothing uses a GPU, and GPUs may suspend: the driver is closed until something changes")
}

// asInSnapshot reports whether all GPUs of the last snapshot could be read, and probes agree with that snapshot.
func (r *Reconciler) asInSnapshot(probes []gpu.Probe) bool {
	devices := map[string]*gpu.Device{}
	for i := range r.plan.snapshot.Devices {
		d := &r.plan.snapshot.Devices[i]
		if !d.Usable() {
			return false
		}
		devices[d.UUID] = d
	}
	if len(devices) == 0 { // only a snapshot shows that the driver has found a GPU
		return false
	}
	return !slices.ContainsFunc(probes, func(p gpu.Probe) bool {
		d := devices[p.UUID]
		return d == nil || p.Error != "" || p.MIGEnabled != d.MIGEnabled
	})
}

// changed reports whether a file or directory has changed since the last reconciliation.
func (r *Reconciler) changed() bool { return !maps.Equal(r.identify(), r.seen) }

// seeDriver records which directories have files of the driver, and their identities.
func (r *Reconciler) seeDriver(dirs []string) {
	if slices.Equal(dirs, r.driverDirs) {
		return
	}
	for _, dir := range r.driverDirs {
		delete(r.seen, dir)
	}
	r.driverDirs = dirs
	for _, dir := range dirs {
		r.see(dir)
	}
}

// identify returns the identities of the files on which a reconciliation depends: the spec files and descriptors, the
// directories of the driver's files and of device nodes, and the GPUs that are bound to the driver. It opens no file of
// the driver, since reading such a file can hang.
func (r *Reconciler) identify() map[string]fileio.ID {
	h := r.opts.Host
	ids := map[string]fileio.ID{}
	add := func(path string) { ids[path] = fileio.IDOf(path) }
	for _, dir := range append([]string{r.descriptors.dir}, r.opts.Dirs...) {
		for _, name := range list(dir) {
			if ext := filepath.Ext(name); ext == ".json" || ext == ".yaml" {
				add(filepath.Join(dir, name))
			}
		}
	}
	for _, f := range r.files {
		add(f.path)
	}
	for _, dir := range r.driverDirs {
		add(dir)
	}
	for _, dir := range []string{
		r.library, h.Dev(), h.Dev("nvidia-caps"), h.Dev("nvidia-caps-imex-channels"),
		h.Dev("dri"), h.Dev("infiniband"),
	} {
		add(dir)
	}
	for _, address := range host.BoundGPUs(h) {
		ids[address] = fileio.ID{} // the kernel changes the times of these directories at any time
	}
	return ids
}

// list returns the names in a directory. If the directory cannot be read, there are none.
func list(dir string) []string {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	return names
}
