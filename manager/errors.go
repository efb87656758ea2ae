package manager

import (
	"errors"
	"fmt"
)

var (
	// ErrNotFound means that no pod is placed under a UID, that a pod has no such container, or that a plugin has no
	// such device.
	ErrNotFound = errors.New("not found")
	// ErrConflict means that a request contradicts what is placed: the UID has another request, or the container has
	// ended.
	ErrConflict = errors.New("conflict")
	// ErrPlaced means that a pod that is imported, or a device of it, is placed already.
	ErrPlaced = errors.New("is placed already")
	// ErrInvalid means that a pod cannot be placed as it is described, for example without a UID.
	ErrInvalid = errors.New("invalid pod")
	// ErrBadResponse means that no container can have what a plugin answered. The answer is kept until the pod is
	// released.
	ErrBadResponse = errors.New("answered Allocate with what no container can have")
	// ErrRetry means that nothing was changed, and that the same call can succeed later without any other change of
	// the request: a plugin is away, a device left while it was allocated, or the state could not be written. With
	// state.ErrBroken it is unknown what the disk has: the change may be there after the next start.
	ErrRetry = errors.New("try again")
)

// Reasons of a RejectedError, as a pod's status shows them.
const (
	ReasonUnexpected = "UnexpectedAdmissionError"
	ReasonTopology   = "TopologyAffinityError"
)

// RejectedError is the answer to a pod that cannot have the devices it asks for.
type RejectedError struct {
	Reason string // ReasonUnexpected or ReasonTopology
	// Message is what the kubelet writes into the pod's status.
	Message string
	// Err is the cause. It wraps ErrRetry if the same request can succeed later by itself.
	Err error
}

// Error returns the reason and the message.
func (e *RejectedError) Error() string { return e.Reason + ": " + e.Message }

// Unwrap returns the cause.
func (e *RejectedError) Unwrap() error { return e.Err }

// unexpected is the kubelet's rejection of a pod for an error of Allocate.
func unexpected(err error) *RejectedError {
	return &RejectedError{
		Reason:  ReasonUnexpected,
		Message: fmt.Sprintf("Allocate failed due to %v, which is unexpected", err),
		Err:     err,
	}
}
