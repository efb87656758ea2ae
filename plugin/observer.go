package plugin

import (
	"time"

	"google.golang.org/grpc/codes"
)

// Observer is told what happens, for metrics. Its methods return at once and may be called at the same time.
type Observer interface {
	// Registered tells about an attempt to register; err is nil if the kubelet took it.
	Registered(resource string, err error)
	// Connected tells that the kubelet began to read the resource's list, or that it stopped.
	Connected(resource string, connected bool)
	// Allocated tells about a call of Allocate: how it was answered, for how many devices, and in what time.
	Allocated(resource string, code codes.Code, devices int, took time.Duration)
}

// nobody is told and does nothing.
type nobody struct{}

// Registered does nothing.
func (nobody) Registered(string, error) {}

// Connected does nothing.
func (nobody) Connected(string, bool) {}

// Allocated does nothing.
func (nobody) Allocated(string, codes.Code, int, time.Duration) {}
