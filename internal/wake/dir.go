package wake

import "github.com/fsnotify/fsnotify"

// NewDirWatcher returns an fsnotify watcher to which the goroutine that receives its events can add directories. A
// plain fsnotify watcher deadlocks if a watched directory is moved away and removed at once: it sends the error while
// it holds the lock that Add needs. The channel Errors keeps one error until it is received, and drops further errors.
func NewDirWatcher() (*fsnotify.Watcher, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	sent, received := w.Errors, make(chan error, 1)
	w.Errors = received
	go func() { // ends when the watcher is closed
		for err := range sent {
			select {
			case received <- err:
			default:
			}
		}
	}()
	return w, nil
}
