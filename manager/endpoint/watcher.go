package endpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/internal/wake"
)

// Limits of the plugin watcher.
const (
	maxSockets     = 256
	maxDirectories = 256
)

// watcher is the plugin watcher. It registers the plugin at each socket below a directory, as long as the socket
// exists.
type watcher struct {
	registry *Registry
	dir      string
	lock     *fileio.Lock
	notify   *fsnotify.Watcher
	sockets  map[string]*watched // by path relative to dir
	running  sync.WaitGroup
	warned   map[string]bool // paths for which it was logged that they are skipped
}

// watched is a socket that was found.
type watched struct {
	id     unixsocket.ID
	cancel context.CancelFunc
	done   chan struct{} // closed when the plugin is no longer registered
}

func newWatcher(r *Registry, dir string) (*watcher, error) {
	held, err := claimRegistry(dir)
	if err != nil {
		return nil, err
	}
	notify, err := wake.NewDirWatcher()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch %s for plugins: %w", dir, err), held.File().Close())
	}
	return &watcher{
		registry: r, dir: dir, lock: held, notify: notify, sockets: map[string]*watched{}, warned: map[string]bool{},
	}, nil
}

// close releases what newWatcher has opened.
func (w *watcher) close() { _ = errors.Join(w.notify.Close(), w.lock.File().Close()) }

// run keeps the registrations equal to the existing sockets until ctx ends. A notification from the kernel only causes
// a new search: notifications can be lost, and those about one path can be about several files.
func (w *watcher) run(ctx context.Context) {
	defer w.close()
	defer w.running.Wait()
	for {
		w.reconcile(ctx, w.search())
		select {
		case <-ctx.Done():
			return
		case <-w.notify.Events:
		case <-w.notify.Errors: //nolint:errcheck // notifications were lost; the search finds what they were about
		}
		w.drain()
	}
}

// settle is how long the watcher collects notifications before it searches.
const settle = 10 * time.Millisecond

// drain receives further notifications for a short time, since often many arrive together.
func (w *watcher) drain() {
	for settled := time.After(settle); ; {
		select {
		case <-settled:
			return
		case <-w.notify.Events:
		case <-w.notify.Errors: //nolint:errcheck // as above
		}
	}
}

// search returns the sockets below the directory, and watches all directories.
func (w *watcher) search() map[string]unixsocket.ID {
	found := map[string]unixsocket.ID{}
	directories := 0
	_ = filepath.WalkDir(w.dir, func(path string, entry fs.DirEntry, err error) error {
		name, _ := filepath.Rel(w.dir, path)
		switch {
		case err != nil:
			if !errors.Is(err, fs.ErrNotExist) { // otherwise it was removed meanwhile
				w.skip(name, err)
			}
		case name != "." && strings.HasPrefix(entry.Name(), "."):
			if entry.IsDir() {
				return fs.SkipDir
			}
		case entry.IsDir():
			if directories++; directories > maxDirectories {
				w.skip("", fmt.Errorf("there are more than %d directories", maxDirectories))
				return fs.SkipAll
			}
			if err := w.watch(path); err != nil {
				w.skip(name, err)
				return fs.SkipDir
			}
		case entry.Type() == fs.ModeSocket:
			if len(found) == maxSockets {
				w.skip("", fmt.Errorf("there are more than %d sockets", maxSockets))
				return fs.SkipAll
			}
			if id, err := unixsocket.Identify(path); err == nil { // otherwise it was removed meanwhile
				found[name] = id
			}
		}
		return nil
	})
	return found
}

// watch begins to watch a directory for changes. It returns an error if other users can create sockets there.
func (w *watcher) watch(dir string) error {
	if err := trust.Dir(dir); err != nil {
		return err
	}
	return w.notify.Add(dir)
}

// skip logs why a path is not searched, once for each path.
func (w *watcher) skip(name string, err error) {
	if !w.warned[name] && len(w.warned) < maxDirectories {
		w.warned[name] = true
		w.registry.opts.Log.Warn("device plugins in a directory are not registered",
			"directory", filepath.Join(w.dir, name), "error", err)
	}
}

// reconcile ends the registrations of sockets that are gone, and then begins those of new sockets. A socket that was
// replaced is both gone and new.
func (w *watcher) reconcile(ctx context.Context, found map[string]unixsocket.ID) {
	for name, old := range w.sockets {
		if found[name] != old.id {
			old.cancel()
			<-old.done
			delete(w.sockets, name)
		}
	}
	for name, id := range found {
		if w.sockets[name] == nil {
			ctx, cancel := context.WithCancel(ctx)
			s := &watched{id: id, cancel: cancel, done: make(chan struct{})}
			w.sockets[name] = s
			w.running.Go(func() {
				defer close(s.done)
				w.registry.follow(ctx, socket{dir: w.dir, name: name})
			})
		}
	}
}

// Pauses between attempts to register a plugin. Each is twice as long as the one before.
const (
	firstPause = 500 * time.Millisecond
	lastPause  = 2*time.Minute + 2*time.Second
)

// follow registers the plugin at a socket. When ctx ends, it ends the registration.
func (r *Registry) follow(ctx context.Context, s socket) {
	r.setSocket(s, false)
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.sockets, s.path())
	}()
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		e, err := r.introduce(ctx, s)
		if err == nil {
			r.setSocket(s, true)
			<-ctx.Done()
			e.close() // the end of the stream removes the instance
			return
		}
		if ctx.Err() != nil {
			return
		}
		r.opts.Log.Warn("the registration of a plugin at a socket failed", "socket", s.path(), "retry", pause, "error", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// setSocket records whether the plugin at a socket is registered.
func (r *Registry) setSocket(s socket, registered bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sockets[s.path()] = registered
}
