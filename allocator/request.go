package allocator

import (
	"fmt"
	"strconv"
	"strings"
)

// Request asks a Pool for devices.
type Request struct {
	// Available are the IDs of the devices to choose from. Must are those of them that must be included. Their order
	// does not matter.
	Available, Must []string
	// Size is the number of devices in the answer.
	Size int
	// Used are the compute slices of each GPU, by its UUID, that are in use by MIG devices outside the pool.
	Used map[string]int
}

// Choice is the answer to a request.
type Choice struct {
	// IDs are the chosen devices, in the pool's order.
	IDs []string
	// Score is the score of the set of GPUs that the devices belong to.
	Score int
	// Exact is set if no other set is better by the policy. If not, the Score of another set can be higher by Bound at
	// most.
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
	// Unusable: IDs are unusable, but must be included or are needed to reach the size.
	Unusable
	// BadSize: the size is negative, smaller than the number of IDs that must be included, or larger than the number of
	// available IDs.
	BadSize
)

// RequestError is a request that has no answer.
type RequestError struct {
	Reason Reason
	// IDs are the devices that the reason is about.
	IDs []string
	// Size is the requested size. Available and Must count the devices of the request.
	Size, Available, Must int
}

// Error names the first few of the IDs, each cut to a length that every real ID has: they come from the caller.
func (e *RequestError) Error() string {
	switch {
	case e.Reason == Unknown:
		return "no such device: " + e.names()
	case e.Reason == Twice:
		return "listed twice: " + e.names()
	case e.Reason == NotAvailable:
		return "must be included, but not available: " + e.names()
	case e.Reason == Unusable:
		return fmt.Sprintf("%d devices requested, which is not possible without unusable ones: %s", e.Size, e.names())
	case e.Size < 0:
		return fmt.Sprintf("%d devices requested", e.Size)
	case e.Size < e.Must:
		return fmt.Sprintf("%d devices requested, but %d must be included", e.Size, e.Must)
	default:
		return fmt.Sprintf("%d devices requested, but %d are available", e.Size, e.Available)
	}
}

func (e *RequestError) names() string {
	const most, longest = 8, 80
	var names []string
	for _, id := range e.IDs[:min(len(e.IDs), most)] {
		if len(id) > longest {
			id = id[:longest] + "..."
		}
		names = append(names, strconv.Quote(id))
	}
	if more := len(e.IDs) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(names, ", ")
}

// resolved is a request that is valid, by the indices of the pool's devices.
type resolved struct {
	state []state // of each device
	size  int
	used  map[string]int // Request.Used
}

// state is the state of a device in a request.
type state byte

const (
	unavailable state = iota
	available
	included // it must be in the answer
)

// resolve validates a request. The error is a *RequestError.
func (p *Pool) resolve(r Request) (*resolved, error) {
	q := &resolved{state: make([]state, len(p.devices)), size: r.Size, used: r.Used}
	fail := func(why Reason, ids []string) (*resolved, error) {
		return nil, &RequestError{Reason: why, IDs: ids, Size: r.Size, Available: len(r.Available), Must: len(r.Must)}
	}
	var unknown, missing, twice []string
	for _, list := range [][]string{r.Available, r.Must} {
		for _, id := range list {
			if _, ok := p.index[id]; !ok {
				unknown = append(unknown, id)
			}
		}
	}
	if len(unknown) > 0 {
		return fail(Unknown, unknown)
	}
	for _, id := range r.Available {
		if s := &q.state[p.index[id]]; *s == available {
			twice = append(twice, id)
		} else {
			*s = available
		}
	}
	if len(twice) > 0 {
		return fail(Twice, twice)
	}
	for _, id := range r.Must {
		switch s := &q.state[p.index[id]]; *s {
		case unavailable:
			missing = append(missing, id)
		case available:
			*s = included
		case included:
			twice = append(twice, id)
		}
	}
	switch {
	case len(missing) > 0:
		return fail(NotAvailable, missing)
	case len(twice) > 0:
		return fail(Twice, twice)
	case r.Size < len(r.Must) || r.Size > len(r.Available):
		return fail(BadSize, nil)
	}
	var unusable, needed []string
	for i, s := range q.state {
		if s == unavailable || p.parent[i] != noParent {
			continue
		}
		unusable = append(unusable, p.devices[i].ID)
		if s == included {
			needed = append(needed, p.devices[i].ID)
		}
		q.state[i] = unavailable
	}
	switch {
	case len(needed) > 0:
		return fail(Unusable, needed)
	case r.Size > len(r.Available)-len(unusable):
		return fail(Unusable, unusable)
	}
	return q, nil
}
