package manager

import "time"

// Observer is notified of what plugins do, for metrics. Its methods return at once and may be called concurrently.
type Observer interface {
	// Registered is called when the plugin of a resource has registered, at kubelet.sock or by the plugin watcher.
	Registered(resource string)
	// Allocated is called when a call of Allocate has ended, also with an error. took is its duration.
	Allocated(resource string, took time.Duration)
	// Removed is called when a resource is removed, since its plugin was away for too long.
	Removed(resource string)
}

// noObserver ignores all notifications.
type noObserver struct{}

// Registered implements Observer.
func (noObserver) Registered(string) {}

// Allocated implements Observer.
func (noObserver) Allocated(string, time.Duration) {}

// Removed implements Observer.
func (noObserver) Removed(string) {}
