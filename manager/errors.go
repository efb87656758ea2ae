package manager

import (
	"errors"
	"fmt"
)

var (
	// ErrNotFound means that no placed pod has the UID, that the pod has no such container, or that the plugin has no
	// such device.
	ErrNotFound = errors.New("not found")
	// ErrConflict means that a request contradicts a placement: the UID was placed for another request, or the
	// container has ended.
	ErrConflict = errors.New("conflict")
	// ErrPlaced means that an imported pod, or a device of that pod, is already placed.
	ErrPlaced = errors.New("is already placed")
	// ErrInvalid means that a pod cannot be placed as it is described, for example because it has no UID.
	ErrInvalid = errors.New("invalid pod")
	// ErrBadResponse means that a plugin's response to Allocate is not valid for any container. The response is kept
	// until the pod is released.
	ErrBadResponse = errors.New("returned an invalid response to Allocate")
	// ErrRetry means that nothing was changed and that the same call can succeed later: a plugin is disconnected, a
	// device left the list during Allocate, or the state could not be written. If it also wraps state.ErrBroken, it is
	// unknown whether the change is on the disk: it may be there after the next start.
	ErrRetry = errors.New("try again")
)

// Reasons of a RejectedError, like those in a pod's status. After ReasonOutOf comes the name of the resource.
const (
	ReasonUnexpected = "UnexpectedAdmissionError"
	ReasonTopology   = "TopologyAffinityError"
	ReasonOutOf      = "OutOf"
	ReasonOutOfPods  = ReasonOutOf + "pods"
)

// RejectedError is the answer to a pod that cannot have the devices that it requests.
type RejectedError struct {
	Reason string // ReasonUnexpected, ReasonTopology, or ReasonOutOf with a resource
	// Message is the message that the kubelet writes into the pod's status, without the code of gRPC before the error of
	// a plugin.
	Message string
	// Err is the cause. It wraps ErrRetry if the same request can succeed later.
	Err error
}

// Error returns the reason and the message.
func (e *RejectedError) Error() string { return e.Reason + ": " + e.Message }

// Unwrap returns the cause.
func (e *RejectedError) Unwrap() error { return e.Err }

// outOf returns the kubelet's rejection of a pod that requests more of a resource, or "pods", than the node has left.
func outOf(resource string, requested, used, capacity int) *RejectedError {
	message := fmt.Sprintf("Node didn't have enough resource: %s, requested: %d, used: %d, capacity: %d",
		resource, requested, used, capacity)
	return &RejectedError{Reason: ReasonOutOf + resource, Message: message, Err: errors.New(message)}
}

// unexpected returns the kubelet's rejection of a pod because of an error in Allocate.
func unexpected(err error) *RejectedError {
	return &RejectedError{
		Reason:  ReasonUnexpected,
		Message: fmt.Sprintf("Allocate failed due to %v, which is unexpected", err),
		Err:     err,
	}
}
