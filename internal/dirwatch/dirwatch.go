// Package dirwatch makes watchers of directories that do not deadlock.
package dirwatch

import "github.com/fsnotify/fsnotify"

// New returns a watcher of fsnotify, to which directories can be added by the goroutine that receives from it. A
// watcher of fsnotify alone deadlocks then if a watched directory is moved away and removed at once: it sends the error
// while it holds the lock that Add takes. The channel Errors keeps one error until it is received, and drops those that
// follow.
func New() (*fsnotify.Watcher, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	sent, received := w.Errors, make(chan error, 1)
	w.Errors = received
	go func() { // until Close
		for err := range sent {
			select {
			case received <- err:
			default:
			}
		}
	}()
	return w, nil
}
