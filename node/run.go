package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// retryAfter is when a failed reconcile is tried again, at the latest.
const retryAfter = 5 * time.Second

// stuckAfter is how long a look at the node may take. The driver's own deadlines are a quarter of it.
const stuckAfter = 2 * time.Minute

// Alive is nil while the inventory goes on, and the error says for how long it has not.
func (i *Inventory) Alive() error {
	still := time.Since(time.Unix(0, i.beat.Load()))
	if still < stuckAfter {
		return nil
	}
	return fmt.Errorf("no look at the GPUs has ended for %s", still.Round(time.Second))
}

// Run keeps the state until ctx ends. The error is nil or ErrDriverChanged.
func (i *Inventory) Run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, i.release()) }()
	watcher := i.newWatcher()
	defer watcher.close()
	due := time.NewTimer(i.opts.Interval)
	defer due.Stop()
	poll := time.NewTicker(i.opts.Poll)
	defer poll.Stop()
	watcher.follow(i.watchedDirs())
	if i.moved() { // since Start, when nobody was watching
		i.Kick()
	}
	for {
		i.beat.Store(time.Now().UnixNano())
		watcher.follow(i.watchedDirs())
		select {
		case <-ctx.Done():
			return nil
		case <-i.kick:
		case <-due.C:
		case <-poll.C:
			if !i.moved() {
				continue
			}
		case <-watcher.events:
			if !i.moved() {
				continue
			}
		case err := <-watcher.errors:
			i.log.Warn("the kernel does not report changes of the host's files, so they are polled: "+err.Error(), "every", i.opts.Poll)
			continue
		}
		began := time.Now()
		if err := i.reconcile(ctx); err != nil {
			return err
		}
		due.Reset(i.wait() - time.Since(began))
	}
}

// moved reports whether something is not as it was at the last reconcile.
func (i *Inventory) moved() bool { return !i.untouched() || i.fingerprint() != i.print }

// wait is the time between the beginnings of two reconciles, if nothing happens.
func (i *Inventory) wait() time.Duration {
	if i.State().Err != nil {
		return min(i.opts.Interval, retryAfter)
	}
	return i.opts.Interval
}

// watchedDirs are the directories in which a change should be noticed at once.
func (i *Inventory) watchedDirs() []string {
	dirs := append([]string{}, i.opts.Dirs...)
	if i.library != "" {
		dirs = append(dirs, filepath.Dir(i.library))
	}
	return dirs
}

// watcher is an inotify watcher, or nothing where there are none left: then the polling has to do.
type watcher struct {
	inotify *fsnotify.Watcher
	events  chan fsnotify.Event
	errors  chan error
}

func (i *Inventory) newWatcher() *watcher {
	w, err := i.opts.newWatcher()
	if err != nil {
		i.log.Warn("the kernel does not report changes of the host's files, so they are polled: "+err.Error(), "every", i.opts.Poll)
		return &watcher{}
	}
	return &watcher{w, w.Events, w.Errors}
}

// follow watches the directories. One that is not there, and one that took another's place, is followed when it is
// asked for again.
func (w *watcher) follow(dirs []string) {
	if w.inotify == nil {
		return
	}
	for _, dir := range dirs {
		_ = w.inotify.Add(dir) // where that fails, polling notices what happens
	}
}

func (w *watcher) close() {
	if w.inotify != nil {
		_ = w.inotify.Close()
	}
}
