package allocator

// resolved is a request whose IDs are known.
type resolved struct {
	// state is that of each device of the pool.
	state []state
	size  int
	used  map[string]int // of the request
}

// state is what a request says of a device.
type state byte

const (
	elsewhere state = iota
	available
	taken // it must be included
)

// resolve checks a request. The error is a *RequestError.
func (p *Pool) resolve(r Request) (*resolved, error) {
	q := &resolved{state: make([]state, len(p.devices)), size: r.Size, used: r.Used}
	fail := func(why Reason, ids []string) (*resolved, error) {
		return nil, &RequestError{Reason: why, IDs: ids, Size: r.Size, Available: len(r.Available), Must: len(r.Must)}
	}
	if unknown := p.unknown(r); len(unknown) > 0 {
		return fail(Unknown, unknown)
	}
	if twice := p.advance(q, r.Available, elsewhere); len(twice) > 0 {
		return fail(Twice, twice)
	}
	// A device is in Must a second time if it was taken, and not available if it is still elsewhere.
	var missing []string
	for _, id := range r.Must {
		if q.state[p.place[id]] == elsewhere {
			missing = append(missing, id)
		}
	}
	if len(missing) > 0 {
		return fail(NotAvailable, missing)
	}
	if twice := p.advance(q, r.Must, available); len(twice) > 0 {
		return fail(Twice, twice)
	}
	if r.Size < len(r.Must) || r.Size > len(r.Available) {
		return fail(BadSize, nil)
	}
	lost, needed := p.dropUnusable(q)
	switch {
	case len(needed) > 0:
		return fail(Unusable, needed)
	case r.Size > len(r.Available)-len(lost):
		return fail(Unusable, lost)
	}
	return q, nil
}

// unknown are the IDs that the pool does not have.
func (p *Pool) unknown(r Request) []string {
	var ids []string
	for _, list := range [][]string{r.Available, r.Must} {
		for _, id := range list {
			if _, ok := p.place[id]; !ok {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// advance moves the devices from a state to the next, and returns those that were not in it.
func (p *Pool) advance(q *resolved, ids []string, from state) []string {
	var others []string
	for _, id := range ids {
		s := &q.state[p.place[id]]
		if *s != from {
			others = append(others, id)
			continue
		}
		*s = from + 1
	}
	return others
}

// dropUnusable takes the unusable devices out of what is available. It returns them, and those that must be included.
func (p *Pool) dropUnusable(q *resolved) (lost, needed []string) {
	for i, s := range q.state {
		switch {
		case s == elsewhere || p.parent[i] != unusable:
			continue
		case s == taken:
			needed = append(needed, p.devices[i].ID)
		}
		lost = append(lost, p.devices[i].ID)
		q.state[i] = elsewhere
	}
	return lost, needed
}

// query is the request in terms of the node's GPUs.
func (p *Pool) query(r *resolved) query {
	q := query{size: r.size}
	for i, s := range r.state {
		if s != elsewhere {
			q.available.add(p.parent[i])
		}
		if s == taken {
			q.must.add(p.parent[i])
		}
	}
	q.from = q.available
	return q
}
