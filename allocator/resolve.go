package allocator

// query is a request in terms of a node's GPUs.
type query struct {
	available, must set
	size            int
}

// resolve checks a request. The error is a *RequestError.
func (p *Pool) resolve(r Request) (query, error) {
	available, err := p.places(r.Available)
	if err != nil {
		return query{}, err
	}
	must, err := p.places(r.Must)
	if err != nil {
		return query{}, err
	}
	fail := func(why Reason, ids []string) (query, error) {
		return query{}, &RequestError{Reason: why, IDs: ids, Size: r.Size, Available: len(available), Must: len(must)}
	}
	if missing := p.missing(available, must); len(missing) > 0 {
		return fail(NotAvailable, missing)
	}
	if r.Size < len(must) || r.Size > len(available) {
		return fail(BadSize, nil)
	}
	if bad := p.unusable(must); len(bad) > 0 {
		return fail(Unusable, bad)
	}
	if bad := p.unusable(available); r.Size > len(available)-len(bad) {
		return fail(Unusable, bad)
	}
	q := query{size: r.Size}
	p.mark(&q.available, available)
	p.mark(&q.must, must)
	return q, nil
}

// places are those of the IDs. The error is a *RequestError that names those which are unknown or there twice.
func (p *Pool) places(ids []string) ([]int, error) {
	places := make([]int, 0, len(ids))
	seen := make([]bool, len(p.devices))
	var unknown, twice []string
	for _, id := range ids {
		switch i, ok := p.place[id]; {
		case !ok:
			unknown = append(unknown, id)
		case seen[i]:
			twice = append(twice, id)
		default:
			seen[i] = true
			places = append(places, i)
		}
	}
	switch {
	case len(unknown) > 0:
		return nil, &RequestError{Reason: Unknown, IDs: unknown}
	case len(twice) > 0:
		return nil, &RequestError{Reason: Twice, IDs: twice}
	}
	return places, nil
}

// missing are the IDs of those in must that are not available.
func (p *Pool) missing(available, must []int) []string {
	if len(must) == 0 {
		return nil
	}
	can := make([]bool, len(p.devices))
	for _, i := range available {
		can[i] = true
	}
	var ids []string
	for _, i := range must {
		if !can[i] {
			ids = append(ids, p.devices[i].ID)
		}
	}
	return ids
}

func (p *Pool) unusable(places []int) []string {
	var ids []string
	for _, i := range places {
		if p.parent[i] == unusable {
			ids = append(ids, p.devices[i].ID)
		}
	}
	return ids
}

func (p *Pool) mark(s *set, places []int) {
	for _, i := range places {
		if p.parent[i] != unusable {
			s.add(p.parent[i])
		}
	}
}
