package manager

import "time"

// Observer is notified of what plugins do, for metrics. Its methods return at once and may be called concurrently.
type Observer interface {
	// Registered is called when the plugin of a resource has registered, with a Register call or by the plugin watcher.
	Registered(resource string)
	// Allocated is called after each Allocate call, also a failed one. took is its duration.
	Allocated(resource string, took time.Duration)
	// Removed is called when the grace period of a resource has ended and it is removed.
	Removed(resource string)
}

type noObserver struct{}

// Registered implements Observer.
func (noObserver) Registered(string) {}

// Allocated implements Observer.
func (noObserver) Allocated(string, time.Duration) {}

// Removed implements Observer.
func (noObserver) Removed(string) {}
