package lease

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wording"
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
		s.notPlaced(w, c.among, err)
	}
}

// notPlaced is called when the manager could not allocate devices for a request. The caller holds s.mu.
func (s *Service) notPlaced(w *waiter, among []string, err error) {
	switch {
	case errors.Is(err, manager.ErrRetry):
		s.pause(w, retryTime, err)
	case status.Code(err) == codes.InvalidArgument: // the plugin would say so again
		w.err = fmt.Errorf("%w %s: %w", ErrImpossible, &w.Request, err)
		w.changed.Wake()
	case len(among) > w.Count:
		w.narrow = true
	default:
		s.without(w, among, err)
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
			if one.Busy = used.Reason; one.Busy == "" && s.refused[d.ID].now() {
				one.Busy = s.refused[d.ID].why
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

// follow waits for the end of a lease.
func (s *Service) follow(ctx context.Context, b *begun) {
	defer func() { b.process.close() }()
	asked := make(chan endRequest, 1)
	s.setEnd(b.Pod.UID, func(user int) error { return s.askEnd(ctx, b, user, asked) })
	defer s.setEnd(b.Pod.UID, nil)
	if !s.reopenProcess(ctx, b) {
		return
	}
	for b.ended || s.awaitEnd(ctx, b, asked) {
		if b.Lease.Containers && !b.unused && s.adoptContainer(ctx, b) {
			continue
		}
		if ctx.Err() == nil {
			s.end(ctx, b)
		}
		return
	}
}

// reopenProcess opens the process of a lease of an earlier manager. While it is unknown whether that runs, it tries
// again. It returns false if ctx ends.
func (s *Service) reopenProcess(ctx context.Context, b *begun) bool {
	for said := false; b.reopen; said = true {
		one, err := reopen(s.o.Procfs, s.o.Boot, b.Lease.Process)
		if err == nil || errors.Is(err, proc.ErrEnded) {
			if err == nil && b.Lease.Containers {
				one.inside, _ = one.isInside(b.Pod.Name, b.Caller.UID)
			}
			s.mu.Lock()
			b.process, b.ended, b.reopen = one, err != nil, false
			s.mu.Unlock()
			return true
		}
		if !said {
			s.o.Log.Error("the lease " + b.Pod.Name + " is kept until its process is known: " + wording.OneLine(err))
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(retryTime):
		}
	}
	return true
}

// endRequest is the wish of a user to end a lease. The process has got SIGTERM.
type endRequest struct {
	user int
	of   *process
}

// askEnd asks the process of a lease to end, as a user does, and has the lease be over.
func (s *Service) askEnd(ctx context.Context, b *begun, user int, asked chan<- endRequest) error {
	s.mu.Lock()
	one := b.process
	s.mu.Unlock()
	if err := one.terminate(user); err != nil {
		return err
	}
	err := s.o.Manager.ChangeLease(ctx, b.Pod.UID, func(l *model.Lease) error {
		l.Ends = min(cmp.Or(l.Ends, math.MaxInt64), sinceBoot())
		return nil
	})
	if err != nil { // the next manager would not know of the end
		s.o.Log.Warn("the end of lease " + b.Pod.Name + " cannot be recorded: " + wording.OneLine(err))
	}
	select {
	case asked <- endRequest{user, one}:
	default: // somebody has asked before
	}
	return nil
}

// end gives the devices of a lease back.
func (s *Service) end(ctx context.Context, b *begun) {
	if s.o.Confiner != nil {
		s.o.Confiner.Revoke(ctx, b.Pod.Name)
	}
	if !s.release(ctx, b.Pod.UID) {
		return
	}
	s.unmark(b.Pod.Name)
	if b.unused {
		return
	}
	took, ids := s.since(b), held(b.Placement)
	seconds := took.Seconds() * float64(len(ids))
	s.mu.Lock()
	s.deviceSeconds += seconds
	s.mu.Unlock()
	s.o.Log.Info(fmt.Sprintf("lease %s has ended after %s: %.1f device-seconds", b.Pod.Name,
		took.Round(time.Millisecond), seconds), "devices", ids)
}

// since returns for how long a lease has had its devices. For a lease of an earlier boot only the clock says that.
func (s *Service) since(b *begun) time.Duration {
	if b.Lease.Process.Boot != s.o.Boot {
		return max(0, time.Since(b.Admitted))
	}
	return sinceBoot() - b.Lease.Begins
}

// awaitEnd waits until the process of a lease has ended. If the lease's time is over before that, or someone ends the
// lease, it ends the process. It returns false if ctx ends.
func (s *Service) awaitEnd(ctx context.Context, b *begun, asked <-chan endRequest) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended, one := make(chan error, 1), b.process
	go func() { ended <- one.waitOr(ctx) }()
	for over, stuck := false, false; !over; {
		pause := time.Minute // a timer stands still while the host sleeps
		if !stuck {
			pause = min(pause, s.left(b))
		}
		select {
		case err := <-ended:
			return err == nil
		case a := <-asked:
			b.user, over = a.user, true
			if a.of != one { // which the lease had before
				_ = s.terminate(b)
			}
		case <-time.After(pause):
			if !stuck && s.left(b) <= 0 {
				over = s.terminate(b)
				stuck = !over
			}
		}
	}
	if b.kill.IsZero() {
		b.kill = time.Now().Add(s.o.Grace)
	}
	if one == nil {
		return true
	}
	select {
	case err := <-ended:
		return err == nil
	case <-time.After(time.Until(b.kill)):
		if err := one.signal(b.user, unix.SIGKILL); err != nil && !errors.Is(err, proc.ErrEnded) {
			s.o.Log.Warn("the command of lease " + b.Pod.Name + " cannot be killed: " + wording.OneLine(err))
		}
	}
	return <-ended == nil
}

// terminate asks the process of a lease to end, and reports whether that could be done.
func (s *Service) terminate(b *begun) bool {
	err := b.process.terminate(b.user)
	if err != nil {
		s.o.Log.Warn("the command of lease " + b.Pod.Name + " cannot be ended: " + wording.OneLine(err))
	}
	return err == nil
}

// setEnd sets the function that ends the process of a lease; nil removes it.
func (s *Service) setEnd(uid string, end func(user int) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if end == nil {
		delete(s.ends, uid)
		return
	}
	s.ends[uid] = end
}

// left returns how much of its time a lease has left. If it has no limit, that is a long time.
func (s *Service) left(b *begun) time.Duration {
	now, placed := s.o.Manager.Pod(b.Pod.UID)
	if !placed || now.Lease.Ends == 0 {
		return math.MaxInt64
	}
	return now.Lease.Ends - sinceBoot()
}

// release gives the devices of a lease back. If the change cannot be written, such as on a full disk, it tries again
// until ctx ends and returns false; the next start finds the lease then.
func (s *Service) release(ctx context.Context, uid string) bool {
	for first := true; ; first = false {
		err := s.o.Manager.Release(ctx, uid)
		switch {
		case err == nil, errors.Is(err, manager.ErrNotFound):
			return true
		case ctx.Err() != nil:
			return false
		}
		if first {
			s.o.Log.Error("the devices of " + uid + " cannot be given back yet: " + wording.OneLine(err))
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(retryTime):
		}
	}
}

// End ends the process of a lease: with SIGTERM, and with SIGKILL after a while. It does not wait for that. Others than
// root can only end their own.
//
// Errors: ErrNotFound, ErrNotYours, manager.ErrRetry, and those of the system.
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
	if err := end(by.UID); err != nil {
		return fmt.Errorf("end the command of lease %q: %w", id, err)
	}
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
