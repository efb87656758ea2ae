package manager

import "time"

// Observer is notified of what plugins do, for metrics. Its methods return at once and may be called concurrently.
type Observer interface {
	// Registered is called when the plugin of a resource has registered, by a Register call or by its socket in the
	// plugin watcher's directory.
	Registered(resource string)
	// Allocated is called after each Allocate call, even if it failed. `took` is the duration of the call.
	Allocated(resource string, took time.Duration)
	// Removed is called when a resource is removed, since its grace period has ended.
	Removed(resource string)
}

type noObserver struct{}

// Registered implements Observer.
func (noObserver) Registered(string) {}

// Allocated implements Observer.
func (noObserver) Allocated(string, time.Duration) {}

// Removed implements Observer.
func (noObserver) Removed(string) {}
