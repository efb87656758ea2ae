package lease

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
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
	s.restore()
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

// restore has the leases followed whose processes still run, and releases the devices of the others.
func (s *Service) restore() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.o.Manager.Pods() {
		if p.Lease == nil {
			continue
		}
		if p.Lease.Process.PID == 0 && p.Lease.Process.Boot == s.o.Boot {
			s.begun = append(s.begun, &begun{Placement: p})
			continue
		}
		one, err := reopen(s.o.Procfs, s.o.Boot, p.Lease.Process)
		if err != nil && !errors.Is(err, proc.ErrEnded) {
			s.o.Log.Error("the lease " + p.Pod.Name + " is kept until the next start: " + wording.OneLine(err))
			continue
		}
		s.begun = append(s.begun, &begun{Placement: p, process: one, ended: err != nil})
	}
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
		var requests []Request
		for _, w := range waiting {
			requests = append(requests, w.Request)
		}
		i, c := next(requests, devices)
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
		UID: "lease-" + id, Namespace: Namespace, Name: id, Among: c.among,
		Containers: []model.Container{{Name: container, Limits: map[string]int{c.resource: w.Count}}},
	}
	lease := w.lease
	lease.Begins = sinceBoot()
	placed, err := s.o.Manager.Lease(ctx, pod, w.by, lease)
	s.mu.Lock()
	defer s.mu.Unlock()
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
	rejected, isRejected := errors.AsType[*manager.RejectedError](err)
	switch {
	case errors.Is(err, manager.ErrRetry), isRejected && rejected.Reason == manager.ReasonOutOfPods:
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
	for _, r := range s.o.Manager.Resources() {
		for _, d := range r.Devices {
			broken := d.Health != manager.Healthy || d.Withheld
			one := Device{
				ID: d.ID, Resource: r.Name, NUMA: d.NUMA,
				Broken: broken, Free: !broken && d.Pod == "", Refused: s.refused[d.ID].now(),
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

// explain tells the waiting requests why they wait. The caller holds s.mu.
func (s *Service) explain(waiting []*waiter, devices []Device) {
	ends := map[string]time.Duration{} // of the leases, by device
	for _, p := range s.o.Manager.Pods() {
		if p.Lease != nil && p.Lease.Ends > 0 {
			for _, id := range held(p) {
				ends[id] = p.Lease.Ends
			}
		}
	}
	for _, w := range waiting {
		free, all, refused := 0, 0, ""
		var known []time.Duration
		for _, d := range w.candidates(devices) {
			switch {
			case d.Broken:
				continue
			case d.Refused && !w.unprepared():
				refused = "; " + d.ID + " is left out: " + s.refused[d.ID].why
			case d.Free:
				free++
			case ends[d.ID] > 0:
				known = append(known, ends[d.ID])
			}
			all++
		}
		reason := fmt.Sprintf("%d of %s that would do are free", free, wording.Count(all, "device")) + refused
		slices.Sort(known)
		if missing := w.Count - free; missing > 0 && missing <= len(known) {
			reason += "; enough will be in " + (known[missing-1] - sinceBoot()).Truncate(time.Second).String()
		}
		switch err := w.possible(devices); {
		case len(devices) == 0:
			reason = "no device plugin has listed devices yet"
		case err != nil: // not all plugins are connected
			reason = wording.OneLine(err) + " so far"
		}
		w.reason = reason
		w.changed.Wake()
	}
}

// follow waits for the end of a lease.
func (s *Service) follow(ctx context.Context, b *begun) {
	defer b.process.close()
	if !b.ended && !s.awaitEnd(ctx, b) {
		return
	}
	s.release(ctx, b.Pod.UID)
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
func (s *Service) awaitEnd(ctx context.Context, b *begun) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended, asked, user := make(chan error, 1), make(chan int, 1), b.Caller.UID
	go func() { ended <- b.wait(ctx) }()
	s.setEnd(b.Pod.UID, func(user int) error {
		err := b.terminate(user)
		if err == nil {
			select {
			case asked <- user:
			default: // somebody has asked before
			}
		}
		return err
	})
	defer s.setEnd(b.Pod.UID, nil)
	for over, stuck := false, false; !over; {
		pause := time.Minute // a timer stands still while the host sleeps
		if !stuck {
			pause = min(pause, s.left(b))
		}
		select {
		case err := <-ended:
			return err == nil
		case user = <-asked:
			over = true
		case <-time.After(pause):
			if stuck || s.left(b) > 0 {
				continue
			}
			if err := b.terminate(user); err != nil {
				s.o.Log.Warn("the command of lease " + b.Pod.Name + " cannot be ended: " + wording.OneLine(err))
				stuck = true
			}
			over = !stuck
		}
	}
	if b.process == nil {
		return true
	}
	select {
	case err := <-ended:
		return err == nil
	case <-time.After(s.o.Grace):
		if err := b.process.signal(user, unix.SIGKILL); err != nil && !errors.Is(err, proc.ErrEnded) {
			s.o.Log.Warn("the command of lease " + b.Pod.Name + " cannot be killed: " + wording.OneLine(err))
		}
	}
	return <-ended == nil
}

// terminate asks the process of a lease to end, as a user does.
func (b *begun) terminate(user int) error {
	if b.process == nil {
		return nil
	}
	if err := b.process.signal(user, unix.SIGTERM); !errors.Is(err, proc.ErrEnded) {
		return err
	}
	return nil
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

// wait waits until the process of a lease has ended, or ctx ends; then it returns an error.
func (b *begun) wait(ctx context.Context) error {
	if b.process == nil {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return b.process.wait(ctx)
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
// until ctx ends; the next start finds the lease then.
func (s *Service) release(ctx context.Context, uid string) {
	for first := true; ; first = false {
		err := s.o.Manager.Release(ctx, uid)
		if err == nil || errors.Is(err, manager.ErrNotFound) || ctx.Err() != nil {
			return
		}
		if first {
			s.o.Log.Error("the devices of " + uid + " cannot be given back yet: " + wording.OneLine(err))
		}
		select {
		case <-ctx.Done():
			return
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
// Errors: ErrNotFound, ErrNotYours, ErrInvalid, and those of Manager.Extend.
func (s *Service) Extend(ctx context.Context, id string, by model.Caller, left time.Duration) error {
	p, err := s.find(id, by)
	if err != nil {
		return err
	}
	lease := *p.Lease
	lease.Ends = sinceBoot() + left
	switch {
	case p.Lease.Ends == 0:
		return fmt.Errorf("%w: the lease %s has no time limit", ErrInvalid, id)
	case lease.Ends < p.Lease.Ends:
		return fmt.Errorf("%w: the lease %s ends later than that", ErrInvalid, id)
	}
	if err := s.o.Manager.SetLease(ctx, p.Pod.UID, lease); err != nil {
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

// Counts are numbers about leases.
type Counts struct {
	Leases, Waiting int
	DeviceSeconds   float64 // of the leases that have ended since the start of the manager
}

// Counts returns the present numbers.
func (s *Service) Counts() Counts {
	s.mu.Lock()
	c := Counts{Waiting: len(s.queue), DeviceSeconds: s.deviceSeconds}
	s.mu.Unlock()
	for _, p := range s.o.Manager.Pods() {
		if p.Lease != nil {
			c.Leases++
		}
	}
	return c
}

// Lease is a lease that has begun.
type Lease struct {
	ID       string    `json:"id"`
	UID      int       `json:"uid"` // of the user
	PID      int       `json:"pid"`
	Command  string    `json:"command"`
	Resource string    `json:"resource"`
	Devices  []string  `json:"devices"` // their IDs
	Models   []string  `json:"models,omitempty"`
	Since    time.Time `json:"since"`
	// Ends is when its time is over, by the present clock.
	Ends *time.Time `json:"ends,omitempty"`
}

// List returns the leases and the waiting requests, both in order, and the devices that could not be leased of late.
func (s *Service) List() (leases []Lease, waiting []Waiting, busy []Busy) {
	for _, p := range s.o.Manager.Pods() {
		if p.Lease == nil {
			continue
		}
		l := Lease{
			ID: p.Pod.Name, UID: p.Caller.UID, PID: p.Lease.Process.PID, Command: p.Lease.Command, Devices: held(p),
			Since: p.Admitted,
		}
		for _, a := range p.Allocations {
			l.Resource = a.Resource
		}
		for _, id := range l.Devices {
			if info := s.o.Describe(id); info.Model != "" {
				l.Models = append(l.Models, strings.TrimSpace(info.Model+" "+info.Profile))
			}
		}
		l.Models = slices.Compact(l.Models)
		if p.Lease.Ends > 0 {
			ends := time.Now().Add(p.Lease.Ends - sinceBoot()).Round(time.Second)
			l.Ends = &ends
		}
		leases = append(leases, l)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.queue {
		if w.placed == nil {
			waiting = append(waiting, s.describe(w))
		}
	}
	maps.DeleteFunc(s.refused, func(_ string, r refusal) bool { return time.Since(r.at) > shownTime })
	for _, id := range slices.Sorted(maps.Keys(s.refused)) {
		busy = append(busy, Busy{id, s.refused[id].why, s.refused[id].at})
	}
	return leases, waiting, busy
}
