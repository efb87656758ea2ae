package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
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
	return fmt.Errorf("no reconciliation has ended for %s", still.Round(time.Second))
}

// Run reconciles until ctx ends. It returns nil or ErrDriverChanged.
func (r *Reconciler) Run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, r.release()) }()
	watcher := r.newWatcher()
	defer watcher.close()
	due := time.NewTimer(r.wait())
	defer due.Stop()
	poll := time.NewTicker(r.opts.Poll)
	defer poll.Stop()
	watcher.follow(r.watchedDirs())
	if r.changed() { // since Start, before anything was watched
		r.Trigger()
	}
	for {
		r.heartbeat.Store(time.Now().UnixNano())
		watcher.follow(r.watchedDirs())
		select {
		case <-ctx.Done():
			return nil
		case <-r.trigger:
		case <-due.C:
		case <-poll.C:
			if !r.changed() {
				continue
			}
		case <-watcher.events:
			if !r.changed() {
				continue
			}
		case err := <-watcher.errors:
			r.logPolling(err)
			continue
		}
		began := time.Now()
		if err := r.reconcile(ctx); err != nil {
			return err
		}
		due.Reset(r.wait() - time.Since(began))
	}
}

// changed reports whether something is not as it was at the last reconciliation.
func (r *Reconciler) changed() bool {
	return slices.ContainsFunc(r.specFiles(), (*specFile).changed) || r.descriptors.changed() ||
		r.hostFingerprint() != r.fingerprint
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

// watcher is an inotify watcher, or nothing where the user's inotify instances are used up: then polling has to do.
type watcher struct {
	inotify *fsnotify.Watcher
	events  chan fsnotify.Event
	errors  chan error
}

func (r *Reconciler) newWatcher() *watcher {
	w, err := r.opts.newWatcher()
	if err != nil {
		r.logPolling(err)
		return &watcher{}
	}
	return &watcher{w, w.Events, w.Errors}
}

func (r *Reconciler) logPolling(err error) {
	r.log.Warn("the kernel does not report changes of the host's files, so they are polled: "+err.Error(),
		"every", r.opts.Poll)
}

// follow watches the directories. It is called again and again, for directories that are made or replaced later.
func (w *watcher) follow(dirs []string) {
	if w.inotify == nil {
		return
	}
	for _, dir := range dirs {
		_ = w.inotify.Add(dir) // where that fails, polling notices changes
	}
}

func (w *watcher) close() {
	if w.inotify != nil {
		_ = w.inotify.Close()
	}
}
