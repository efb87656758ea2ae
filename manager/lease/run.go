package lease

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
)

// Run finds the leases of an earlier manager again, moves the queue, and ends leases, until ctx ends. The leases stay.
func (s *Service) Run(ctx context.Context) error {
	var followed sync.WaitGroup
	defer followed.Wait()
	s.mu.Lock()
	s.started = time.Now()
	s.mu.Unlock()
	s.wakeAfter(registerTime)
	s.wakeAfter(emptyTime)
	if err := s.restore(); err != nil {
		return fmt.Errorf("restore the leases: %w", err)
	}
	var events <-chan manager.Event
	for {
		if events == nil {
			events = s.o.Manager.Watch(ctx)
		}
		s.mu.Lock()
		list := s.begun
		s.begun = nil
		s.mu.Unlock()
		for _, b := range list {
			followed.Go(func() { s.follow(ctx, b) })
		}
		s.advance(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-s.wake:
		case _, open := <-events:
			if !open { // too many changes at once, or the manager ends
				events = nil
				select {
				case <-ctx.Done():
				case <-time.After(retryTime):
				}
			}
		}
	}
}

func (s *Service) wakeAfter(t time.Duration) { time.AfterFunc(t, s.wake.Wake) }

// restore has all leases followed, also those whose process has ended.
func (s *Service) restore() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	leases := map[string]bool{}
	for _, p := range s.o.Manager.Pods() {
		if p.Lease == nil {
			continue
		}
		leases[p.Pod.Name] = true
		if p.Lease.Process.PID == 0 && p.Lease.Process.Boot == s.o.Boot {
			s.begun = append(s.begun, newBegun(p, nil))
			continue
		}
		b := newBegun(p, nil)
		b.reopen = true
		s.begun = append(s.begun, b)
	}
	return s.makeMarks(leases)
}

// advance gives devices to requests in the queue until no more of them can be met.
func (s *Service) advance(ctx context.Context) {
	for ctx.Err() == nil {
		s.mu.Lock()
		if !slices.ContainsFunc(s.queue, (*waiter).waits) { // most changes are of others
			s.mu.Unlock()
			return
		}
		devices := s.devices()
		waiting := s.unplaced(devices)
		var demands []demand
		for _, w := range waiting {
			demands = append(demands, s.demand(w))
		}
		i, c := next(demands, devices)
		if c == nil {
			s.explain(waiting, devices)
		}
		s.mu.Unlock()
		if c == nil {
			return
		}
		s.place(ctx, waiting[i], *c)
	}
}

// demand returns a request with the time after which its command has ended, even if it ignores SIGTERM.
func (s *Service) demand(w *waiter) demand {
	if w.limit == 0 {
		return demand{Request: w.Request}
	}
	return demand{w.Request, w.limit + s.o.Grace}
}

// unplaced returns the requests that wait for devices. Those that the host cannot meet fail. The caller holds s.mu.
func (s *Service) unplaced(devices []Device) []*waiter {
	complete := s.complete(devices)
	var list []*waiter
	for _, w := range s.queue {
		if !w.waits() {
			continue
		}
		if complete {
			w.err = w.possible(devices)
		}
		if w.err != nil {
			w.changed.Wake()
			continue
		}
		list = append(list, w)
	}
	return list
}

// waits reports whether a request waits for devices and has not just failed to get some. The caller holds s.mu.
func (w *waiter) waits() bool { return w.placed == nil && w.err == nil && !time.Now().Before(w.pause) }

// complete reports whether there are no other devices, as far as is known. Those of a plugin that restarts are still
// listed. The caller holds s.mu.
func (s *Service) complete(devices []Device) bool {
	since := time.Since(s.started)
	return since >= registerTime && len(devices) > 0 || since >= emptyTime
}

// place has the manager choose and hold devices for a request.
func (s *Service) place(ctx context.Context, w *waiter, c choice) {
	if w.narrow {
		c.among = c.among[:w.Count]
	}
	id := strings.ToLower(rand.Text()[:8])
	pod := model.Pod{
		UID: "lease-" + id, Namespace: Namespace, Name: id, Among: c.among, Unhealthy: c.unprepared,
		Containers: []model.Container{{Name: container, Limits: map[string]int{c.resource: w.Count}}},
	}
	lease := w.lease
	lease.Begins, lease.Passed = sinceBoot(), c.passes
	placed, err := s.o.Manager.Lease(ctx, pod, w.by, lease)
	s.mu.Lock()
	defer s.mu.Unlock()
	w.unprepared = c.unprepared
	switch {
	case err == nil:
		w.placed = &placed
		w.changed.Wake()
		if !slices.Contains(s.queue, w) { // it has been given up meanwhile
			s.giveBack(w)
			s.wake.Wake()
		}
	case ctx.Err() == nil:
		s.notPlaced(w, c, err)
	}
}

// notPlaced is called when the manager could not allocate devices for a request. The caller holds s.mu.
func (s *Service) notPlaced(w *waiter, c choice, err error) {
	switch {
	case errors.Is(err, manager.ErrRetry):
		s.pause(w, retryTime, err)
	case status.Code(err) == codes.InvalidArgument: // the plugin would say so again
		w.err = fmt.Errorf("%w %s: %w", ErrImpossible, &w.Request, err)
		w.changed.Wake()
	case len(c.among) > w.Count:
		w.narrow = true
	default:
		var devices []deviceKey
		for _, id := range c.among {
			devices = append(devices, deviceKey{c.resource, id})
		}
		s.without(w, devices, err)
	}
}

// devices returns the devices that plugins list. The caller holds s.mu.
func (s *Service) devices() []Device {
	var list []Device
	described := map[string]Info{}
	ends := map[string]time.Duration{} // of leases, by the UID of the pod
	for _, p := range s.o.Manager.Pods() {
		if p.Lease != nil && p.Lease.Ends > 0 {
			ends[p.Pod.UID] = p.Lease.Ends
		}
	}
	now := sinceBoot()
	for _, r := range s.o.Manager.Resources() {
		for _, d := range r.Devices {
			one := Device{ID: d.ID, Resource: r.Name, NUMA: d.NUMA}
			used := s.usedBy(d)
			one.Users = used.PIDs
			one.Broken = d.Health != manager.Healthy && used.Reason == "" || d.Withheld
			one.Free = !one.Broken && d.Pod == ""
			if one.Busy = used.Reason; one.Busy == "" && s.refused[one.key()].now() {
				one.Busy = s.refused[one.key()].why
			}
			if end := ends[d.Pod]; end > 0 {
				one.Within = max(0, end+s.o.Grace-now)
			}
			info, known := described[one.device()]
			if !known {
				info = s.o.Describe(d.ID)
				described[one.device()] = info
			}
			one.Info = info
			list = append(list, one)
		}
	}
	return list
}

// usedBy returns what uses a device without a lease, as far as the plugin says so. A device that is unhealthy for no
// other reason can be leased again when the use has ended.
func (s *Service) usedBy(d manager.Device) Use {
	if d.Health != manager.Unhealthy || d.Pod != "" {
		return Use{}
	}
	return s.o.UsedBy(d.ID)
}

// End ends a lease as the end of its time does: its process gets SIGTERM, and SIGKILL after a while. It does not wait
// for that. Others than root can only end their own. A process that the user may not signal is left alone, and the
// lease ends without it.
//
// Errors: ErrNotFound, ErrNotYours, manager.ErrRetry.
func (s *Service) End(id string, by model.Caller) error {
	p, err := s.find(id, by)
	if err != nil {
		return err
	}
	s.mu.Lock()
	end := s.ends[p.Pod.UID]
	s.mu.Unlock()
	if end == nil { // its devices are being prepared
		return fmt.Errorf("the lease %q is about to begin: %w", id, manager.ErrRetry)
	}
	end(by.UID)
	return nil
}

// Extend has a lease end after a time from now, which is later than before.
//
// Errors: ErrNotFound, ErrNotYours, ErrInvalid, and those of Manager.ChangeLease.
func (s *Service) Extend(ctx context.Context, id string, by model.Caller, left time.Duration) error {
	p, err := s.find(id, by)
	if err != nil {
		return err
	}
	err = s.o.Manager.ChangeLease(ctx, p.Pod.UID, func(l *model.Lease) error {
		ends := sinceBoot() + left
		switch {
		case l.Ends == 0:
			return fmt.Errorf("%w: the lease %s has no time limit", ErrInvalid, id)
		case l.Passed:
			return fmt.Errorf("%w: the lease %s passed others in the queue, since it ends before they can begin", ErrInvalid, id)
		case l.Ends <= sinceBoot():
			return fmt.Errorf("%w: the time of the lease %s is over", ErrInvalid, id)
		case ends < l.Ends:
			return fmt.Errorf("%w: the lease %s ends later than that", ErrInvalid, id)
		}
		l.Ends = ends
		return nil
	})
	if err != nil {
		return err
	}
	s.wake.Wake() // for the expected times
	return nil
}

// find finds a lease that a user may change: root any one, and others their own.
func (s *Service) find(id string, by model.Caller) (model.Placement, error) {
	for _, p := range s.o.Manager.Pods() {
		switch {
		case p.Lease == nil || p.Pod.Name != id:
		case by.UID != 0 && by.UID != p.Caller.UID:
			return model.Placement{}, fmt.Errorf("lease %q: %w", id, ErrNotYours)
		default:
			return p, nil
		}
	}
	return model.Placement{}, fmt.Errorf("%w %q", ErrNotFound, id)
}
