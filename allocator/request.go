package allocator

import "fmt"

// Request is a request for devices of a Pool.
type Request struct {
	// Available are the IDs of the devices to choose from. Must are the IDs of devices that must be included. Their
	// order does not matter.
	Available, Must []string
	// Size is the number of devices in the answer.
	Size int
	// Used are the compute slices that MIG devices outside the pool use, by the UUID of the GPU.
	Used map[string]int
}

// Choice is the answer to a request.
type Choice struct {
	// IDs are the chosen devices, in the pool's order.
	IDs []string
	// Score is the score of the set of the devices' GPUs.
	Score int
}

// Reason says why a request has no answer.
type Reason int

// The reasons.
const (
	// Unknown: an ID is not in the pool.
	Unknown Reason = iota + 1
	// Twice: an ID is in a list more than once.
	Twice
	// NotAvailable: an ID in Must is not in Available.
	NotAvailable
	// Unusable: devices in Must, or devices without which the size cannot be reached, are unusable.
	Unusable
	// BadSize: the size is negative, smaller than the number of IDs in Must, or larger than the number of IDs in
	// Available.
	BadSize
)

// RequestError means that a request has no answer.
type RequestError struct {
	Reason Reason
	// IDs are the devices to which the reason applies.
	IDs []string
	// Size is the requested size. Available and Must are the numbers of devices in these lists of the request.
	Size, Available, Must int
}

// Error shortens IDs that are longer than any real ID, since IDs come from the caller.
func (e *RequestError) Error() string {
	requested, are := fmt.Sprintf("%d devices requested", e.Size), "are"
	if e.Size == 1 {
		requested = "1 device requested"
	}
	if e.Available == 1 {
		are = "is"
	}
	switch {
	case e.Reason == Unknown:
		return fmt.Sprintf("no such device: %.80q", e.IDs[0])
	case e.Reason == Twice:
		return fmt.Sprintf("listed twice: %.80q", e.IDs[0])
	case e.Reason == NotAvailable:
		return fmt.Sprintf("must be included, but not available: %.80q", e.IDs[0])
	case e.Reason == Unusable:
		return fmt.Sprintf("%s, which is not possible without unusable ones: %q", requested, e.IDs)
	case e.Size < 0:
		return requested
	case e.Size < e.Must:
		return fmt.Sprintf("%s, but %d must be included", requested, e.Must)
	default:
		return fmt.Sprintf("%s, but %d %s available", requested, e.Available, are)
	}
}

// state is the state of a device in a request.
type state byte

const (
	unavailable state = iota
	available
	included // it must be in the answer
)

// resolve validates a request and returns the state of each device. The error is a *RequestError.
func (p *Pool) resolve(r Request) ([]state, error) {
	states := make([]state, len(p.devices))
	fail := func(why Reason, ids ...string) ([]state, error) {
		return nil, &RequestError{Reason: why, IDs: ids, Size: r.Size, Available: len(r.Available), Must: len(r.Must)}
	}
	for _, id := range r.Available {
		i, ok := p.index[id]
		switch {
		case !ok:
			return fail(Unknown, id)
		case states[i] == available:
			return fail(Twice, id)
		}
		states[i] = available
	}
	for _, id := range r.Must {
		i, ok := p.index[id]
		switch {
		case !ok:
			return fail(Unknown, id)
		case states[i] == unavailable:
			return fail(NotAvailable, id)
		case states[i] == included:
			return fail(Twice, id)
		}
		states[i] = included
	}
	if r.Size < len(r.Must) || r.Size > len(r.Available) {
		return fail(BadSize)
	}
	var unusable, needed []string
	for i, s := range states {
		if s == unavailable || p.parent[i] != noParent {
			continue
		}
		unusable = append(unusable, p.devices[i].ID)
		if s == included {
			needed = append(needed, p.devices[i].ID)
		}
		states[i] = unavailable
	}
	switch {
	case len(needed) > 0:
		return fail(Unusable, needed...)
	case r.Size > len(r.Available)-len(unusable):
		return fail(Unusable, unusable...)
	}
	return states, nil
}
