package plugin

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/exit"
)

// How often a directory is looked at: where the kernel tells of changes, in case it lost one; and where it does not,
// because the user's inotify instances have run out.
const (
	pollWatched   = 10 * time.Second
	pollUnwatched = 250 * time.Millisecond
)

// watch follows the directory of the sockets. It is an actor with many listeners.
type watch struct {
	dir     string
	kubelet string // the kubelet's socket, or empty
	log     *slog.Logger
	open    func() (*fsnotify.Watcher, error)
	polled  sync.Once

	mu         sync.Mutex
	listeners  []chan<- struct{}
	generation uint64   // counts the kubelet's sockets
	pinned     *os.File // the kubelet's socket; while it is open, no other can have its inode
	problem    error    // why there is no such socket
}

func newWatch(dir, kubelet string, log *slog.Logger) *watch {
	return &watch{dir: dir, kubelet: kubelet, log: log, open: fsnotify.NewWatcher}
}

// listen has c poked after every change. It is for the life of the watch.
func (w *watch) listen(c chan<- struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listeners = append(w.listeners, c)
}

// kubeletSocket returns a number that is another one whenever the kubelet has made its socket anew, and 0 while there is
// none; then the error says what is the matter. If the kubelet finds sockets by itself, the number is always 1.
func (w *watch) kubeletSocket() (generation uint64, err error) {
	if w.kubelet == "" {
		return 1, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	// The kernel may be about to tell.
	w.lookAtKubelet()
	if w.pinned == nil {
		return 0, w.problem
	}
	return w.generation, nil
}

// run follows the directory until ctx ends.
func (w *watch) run(ctx context.Context) error {
	defer w.unpin()
	events := w.follow()
	defer func() { events.close() }()
	for {
		// What changed before the watch began is seen here.
		w.look()
		select {
		case <-ctx.Done():
			return nil
		case <-events.changed():
		case <-events.failed(): //nolint:errcheck // what was lost is looked for
		case <-time.After(events.poll()):
		}
		if !events.alive() {
			events.close()
			events = w.follow()
		}
	}
}

// look finds out about the kubelet's socket, and tells the listeners to look at what is theirs.
func (w *watch) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lookAtKubelet()
	for _, c := range w.listeners {
		poke(c)
	}
}

func (w *watch) lookAtKubelet() {
	if w.kubelet == "" || w.isPinned() {
		return
	}
	w.dropPin()
	fd, err := unix.Open(w.kubelet, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		w.problem = exit.With(exit.Unreachable, dialHint(err),
			fmt.Errorf("look for the kubelet: %w", &fs.PathError{Op: "open", Path: w.kubelet, Err: err}))
		return
	}
	f := os.NewFile(uintptr(fd), w.kubelet)
	if info, err := f.Stat(); err != nil || info.Mode().Type() != fs.ModeSocket {
		_ = f.Close()
		w.problem = fmt.Errorf("look for the kubelet: %s is not a socket; remove it and restart the kubelet", w.kubelet)
		return
	}
	w.pinned, w.problem = f, nil
	w.generation++
}

// isPinned reports whether the kubelet's socket is the one that is known.
func (w *watch) isPinned() bool {
	if w.pinned == nil {
		return false
	}
	known, err := w.pinned.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(w.kubelet)
	return err == nil && os.SameFile(known, there)
}

func (w *watch) dropPin() {
	if w.pinned != nil {
		_ = w.pinned.Close()
		w.pinned = nil
	}
}

func (w *watch) unpin() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dropPin()
}

// follow asks the kernel to tell of changes in the directory. If it cannot, the directory is polled.
func (w *watch) follow() *events {
	dir, err := os.Stat(w.dir)
	if err != nil {
		// Without the directory there is no socket either; that is said where one is missed.
		return &events{dir: w.dir}
	}
	watcher, err := w.open()
	if err == nil {
		if err = watcher.Add(w.dir); err == nil {
			return &events{dir: w.dir, inode: dir, watcher: watcher}
		}
		_ = watcher.Close()
	}
	w.polled.Do(func() {
		w.log.Warn("the kernel does not report changes of "+w.dir+", so it is polled; raise fs.inotify.max_user_instances: "+
			err.Error(), "every", pollUnwatched)
	})
	return &events{dir: w.dir, inode: dir}
}

// events are what the kernel tells of a directory; without a watcher, nothing.
type events struct {
	dir     string
	inode   os.FileInfo
	watcher *fsnotify.Watcher
}

func (e *events) changed() <-chan fsnotify.Event {
	if e.watcher == nil {
		return nil
	}
	return e.watcher.Events
}

// failed receives after the kernel dropped events; what they would have told is looked for.
func (e *events) failed() <-chan error {
	if e.watcher == nil {
		return nil
	}
	return e.watcher.Errors
}

func (e *events) poll() time.Duration {
	if e.watcher == nil {
		return pollUnwatched
	}
	return pollWatched
}

// alive reports whether the kernel would tell of changes: the directory is the one that is watched.
func (e *events) alive() bool {
	if e.watcher == nil {
		return false
	}
	there, err := os.Stat(e.dir)
	return err == nil && os.SameFile(e.inode, there)
}

func (e *events) close() {
	if e.watcher != nil {
		_ = e.watcher.Close()
	}
}
