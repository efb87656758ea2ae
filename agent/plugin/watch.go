package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/fsnotify/fsnotify"

	"gpu-cdi-plugin/internal/wake"
)

// How often endpoints are woken if the kernel reports no change.
const (
	pollWatched   = 10 * time.Second       // in case a report was lost
	pollUnwatched = 250 * time.Millisecond // if the kernel cannot report changes
	pollMissing   = time.Second            // for the directory itself
)

// watchDir wakes all endpoints after every change in the directory of the sockets, until ctx ends. All endpoints share
// one inotify watcher, since the number of these is limited, often to 128.
func (p *Plugin) watchDir(ctx context.Context) {
	var watcher *fsnotify.Watcher
	defer func() {
		if watcher != nil {
			_ = watcher.Close()
		}
	}()
	watch := func() (err error) {
		if watcher == nil {
			if watcher, err = p.opts.newWatcher(); err != nil {
				return err
			}
		}
		return watcher.Add(p.opts.dir()) // again and again, since the directory may have been replaced
	}
	warned := false
	for {
		err := watch()
		var events <-chan fsnotify.Event
		var failures <-chan error
		if watcher != nil {
			events, failures = watcher.Events, watcher.Errors
		}
		poll := pollWatched
		if err != nil {
			poll = pollUnwatched
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !warned {
			warned = true
			p.opts.Log.Warn(fmt.Sprintf("the kernel does not report changes in %s, so they are polled for every %s until "+
				"it does; raise fs.inotify.max_user_instances or fs.inotify.max_user_watches if that is the limit: %v",
				p.opts.dir(), pollUnwatched, err))
		}
		p.wakeAll() // for changes before the directory was watched
		select {
		case <-ctx.Done():
			return
		case <-events:
		case <-failures: //nolint:errcheck // events were lost; the wake-ups make up for that
		case <-time.After(wake.Next(poll)):
		}
	}
}

func (p *Plugin) wakeAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.endpoints {
		e.server.wake.Wake()
	}
}
