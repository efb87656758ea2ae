package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"gpu-cdi-plugin/internal/uevent"
)

const (
	// pollInterval is how often the host's files are compared with the last fingerprints. This also notices MIG changes
	// of which the driver sends no event, and everything else where the user's inotify instances are used up.
	pollInterval = time.Second
	// retryAfter is when a failed reconciliation is tried again, at the latest.
	retryAfter = 5 * time.Second
	// stuckAfter is how long a reconciliation may take. The driver's own deadlines are a quarter of it.
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
func (r *Reconciler) Run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, r.release()) }()
	ctx, cancel := context.WithCancel(ctx)
	var beside sync.WaitGroup
	defer beside.Wait()
	defer cancel()
	if r.monitor != nil {
		beside.Go(func() { r.monitor.run(ctx) })
	}
	if r.opts.Uevents != nil {
		beside.Go(func() { r.watchUevents(ctx) })
	}
	// Where the user's inotify instances are used up, polling has to do.
	watcher, watchErr := r.opts.newWatcher()
	if watchErr != nil {
		r.logPolling(watchErr)
		watcher = &fsnotify.Watcher{}
	} else {
		defer watcher.Close()
	}
	watch := func() {
		if watchErr != nil {
			return
		}
		for _, dir := range r.watchedDirs() { // again and again, for directories that are made or replaced later
			_ = watcher.Add(dir) // where that fails, polling notices changes
		}
	}
	due := time.NewTimer(r.wait())
	defer due.Stop()
	poll := time.NewTicker(r.opts.poll)
	defer poll.Stop()
	gpus := time.NewTicker(r.opts.GPUInterval)
	defer gpus.Stop()
	watch()
	if r.changed() { // since Start, before anything was watched
		r.Trigger()
	}
	for {
		r.heartbeat.Store(time.Now().UnixNano())
		watch()
		if !r.awaitReason(ctx, due.C, poll.C, gpus.C, watcher) {
			if ctx.Err() != nil {
				return nil
			}
			continue
		}
		began := time.Now()
		r.heartbeat.Store(began.UnixNano())
		if err := r.reconcile(ctx); err != nil {
			return err
		}
		due.Reset(r.wait() - time.Since(began))
	}
}

// awaitReason waits until something happens, and reports whether it is a reason to reconcile.
func (r *Reconciler) awaitReason(
	ctx context.Context, due, poll, gpus <-chan time.Time, watcher *fsnotify.Watcher,
) bool {
	select {
	case <-ctx.Done():
		return false
	case <-r.wake:
		return true
	case <-due:
		return true
	case <-poll:
		return r.changed()
	case <-gpus:
		return r.gpusChanged(ctx)
	case <-watcher.Events:
		return r.changed()
	case err := <-watcher.Errors:
		r.logPolling(err)
		return false
	}
}

// watchUevents reconciles when the kernel reports that a GPU came or went. Without these messages polling has to do.
func (r *Reconciler) watchUevents(ctx context.Context) {
	source, err := r.opts.Uevents()
	if err == nil {
		closeSource := func() { _ = source.Close() }
		defer closeSource()
		defer context.AfterFunc(ctx, closeSource)()
		err = uevent.Watch(source, r.Trigger)
	}
	if ctx.Err() == nil {
		r.log.Warn("GPUs that are plugged in or out are noticed by polling alone: " + err.Error())
	}
}

// changed reports whether a file is not as it was at the last reconciliation. Before the first plan there are only the
// inputs.
func (r *Reconciler) changed() bool {
	return r.inputFingerprint() != r.inputs || r.plan != nil && (slices.ContainsFunc(r.files, (*specFile).changed) ||
		r.descriptorFingerprint() != r.descriptorsWritten)
}

// gpusChanged reports whether the GPUs are not as at the last reconciliation, or cannot be read. It does not read them
// if a reconciliation is due anyway: the last one failed, or Options.Check returns an error.
func (r *Reconciler) gpusChanged(ctx context.Context) bool {
	if r.plan == nil || r.failures > 0 || r.opts.Check != nil && r.opts.Check() != nil {
		return true
	}
	s, err := r.opts.Source.Snapshot(ctx)
	return err != nil || !reflect.DeepEqual(s, r.plan.snapshot)
}

// wait is the longest time between the starts of this reconciliation and the next.
func (r *Reconciler) wait() time.Duration {
	if r.State().Err != nil {
		return min(r.opts.Interval, retryAfter)
	}
	return r.opts.Interval
}

// watchedDirs are the directories in which a change should be noticed at once.
func (r *Reconciler) watchedDirs() []string {
	dirs := append([]string{}, r.opts.Dirs...)
	if r.library != "" {
		dirs = append(dirs, filepath.Dir(r.library))
	}
	return dirs
}

func (r *Reconciler) logPolling(err error) {
	r.log.Warn("the kernel does not report changes of the host's files, so they are polled: "+err.Error(),
		"every", r.opts.poll)
}
