package allocator

import (
	"fmt"
	"strconv"
	"strings"
)

// Request is what is asked of a Pool.
type Request struct {
	// Available are the IDs of the devices to choose from, and Must those of them that must be in the answer. Their order
	// does not matter.
	Available, Must []string
	// Size is how many devices the answer has.
	Size int
	// Used are the compute slices that containers have of each GPU, by its UUID, as MIG devices that are not in the pool.
	Used map[string]int
}

// Choice is an answer.
type Choice struct {
	// IDs are the devices in the pool's order.
	IDs []string
	// Score is the score of the set of GPUs that the devices belong to, each GPU once.
	Score int
	// Exact tells that no other set is better by the policy's objective. If not, Bound is how much higher the Score of
	// another can be at most.
	Exact bool
	Bound int
}

// Reason is why a request has no answer.
type Reason int

// The reasons.
const (
	// Unknown: IDs are not in the pool.
	Unknown Reason = iota + 1
	// Twice: IDs are in a list more than once.
	Twice
	// NotAvailable: IDs that must be included are not available.
	NotAvailable
	// Unusable: IDs that must be included cannot be used, or are needed because the others are too few.
	Unusable
	// BadSize: the size is negative, less than the number of IDs that must be included, or more than are available.
	BadSize
)

// RequestError is a request that has no answer.
type RequestError struct {
	Reason Reason
	// IDs are the devices that it is about.
	IDs []string
	// Size is what was asked for; Available and Must count what could have been chosen and had to be.
	Size, Available, Must int
}

// IDs come from whoever asks: a message names a few, each cut to a length that every real one has.
const (
	namesInError = 8
	nameInError  = 80
)

// Error says what is wrong, with the first few of the IDs.
func (e *RequestError) Error() string {
	switch e.Reason {
	case Unknown:
		return "no such device: " + e.names()
	case Twice:
		return "there twice: " + e.names()
	case NotAvailable:
		return "must be included, but not available: " + e.names()
	case Unusable:
		return fmt.Sprintf("%d devices are asked for, and cannot be had without: %s", e.Size, e.names())
	}
	switch {
	case e.Size < 0:
		return fmt.Sprintf("%d devices are asked for", e.Size)
	case e.Size < e.Must:
		return fmt.Sprintf("%d devices are asked for, and %d must be included", e.Size, e.Must)
	default:
		return fmt.Sprintf("%d devices are asked for, and %d are available", e.Size, e.Available)
	}
}

func (e *RequestError) names() string {
	var names []string
	for _, id := range e.IDs[:min(len(e.IDs), namesInError)] {
		if len(id) > nameInError {
			id = id[:nameInError] + "..."
		}
		names = append(names, strconv.Quote(id))
	}
	if more := len(e.IDs) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(names, ", ")
}
