package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"gpu-cdi-plugin/internal/wake"
)

// How often endpoints are woken if the kernel reports no change.
const (
	pollWatched   = 10 * time.Second       // in case a report was lost
	pollUnwatched = 250 * time.Millisecond // where the kernel cannot report
)

// dirWatch wakes all endpoints after every change in the directory of the sockets. They share one, since the number of
// inotify instances is limited, often to 128.
type dirWatch struct {
	dir  string
	log  *slog.Logger
	open func() (*fsnotify.Watcher, error)

	mu          sync.Mutex
	subscribers []wake.Chan
}

func newDirWatch(dir string, log *slog.Logger) *dirWatch {
	return &dirWatch{dir: dir, log: log, open: fsnotify.NewWatcher}
}

// subscribe has c woken after every change from now on.
func (w *dirWatch) subscribe(c wake.Chan) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.subscribers = append(w.subscribers, c)
}

// run watches the directory until ctx ends.
func (w *dirWatch) run(ctx context.Context) error {
	var watcher *fsnotify.Watcher
	defer func() {
		if watcher != nil {
			_ = watcher.Close()
		}
	}()
	warned := false
	for {
		var err error
		if watcher == nil {
			watcher, err = w.open()
		}
		if err == nil {
			err = watcher.Add(w.dir) // each time, since the directory may be a new one
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !warned {
			warned = true
			w.log.Warn(fmt.Sprintf("the kernel does not report changes in %s, so they are polled for every %s; "+
				"raise fs.inotify.max_user_instances if that is the limit: %v", w.dir, pollUnwatched, err))
		}
		w.wakeAll() // also for what happened before the directory was watched
		var events chan fsnotify.Event
		var failures chan error
		poll := pollUnwatched
		if watcher != nil {
			events, failures = watcher.Events, watcher.Errors
		}
		if err == nil {
			poll = pollWatched
		}
		select {
		case <-ctx.Done():
			return nil
		case <-events:
		case <-failures: //nolint:errcheck // events were lost; what happened is checked anyway
		case <-time.After(poll):
		}
	}
}

func (w *dirWatch) wakeAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.subscribers {
		c.Wake()
	}
}
