package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
)

// follow waits for the end of a lease.
func (s *Service) follow(ctx context.Context, b *begun) {
	defer func() { b.process.close() }()
	asked := make(chan endRequest, 1)
	s.setEnd(b.Pod.UID, func(user int) { s.askEnd(ctx, b, user, asked) })
	defer s.setEnd(b.Pod.UID, nil)
	if s.left(b) <= 0 {
		s.over(b)
	}
	if !s.reopenProcess(ctx, b, asked) {
		return
	}
	for b.ended || s.awaitEnd(ctx, b, asked) {
		if b.Lease.Containers && !b.unused && !b.isDue() && s.adoptContainer(ctx, b, asked) {
			continue
		}
		if b.isDue() {
			s.killRest(ctx, b)
		}
		if ctx.Err() == nil {
			s.end(ctx, b)
		}
		return
	}
}

// reopenProcess opens the process of a lease of an earlier manager. While it is unknown whether that runs, it tries
// again, but not for longer than unknownTime, nor if root has ended the lease. It returns false if ctx ends.
func (s *Service) reopenProcess(ctx context.Context, b *begun, asked <-chan endRequest) bool {
	until := b.unknownUntil()
	for said := false; b.reopen; said = true {
		one, err := reopen(s.o.Procfs, s.o.Boot, b.Lease.Process)
		known := err == nil || errors.Is(err, proc.ErrEnded)
		if known || b.forced.Load() || !time.Now().Before(until) {
			if !known {
				s.o.Log.Error("lease " + b.Pod.Name + " ends, though it is unknown whether its process runs: " +
					wording.OneLine(err))
			}
			if err == nil {
				one.inside = b.Lease.InContainer
			}
			s.mu.Lock()
			b.process, b.ended, b.reopen = one, err != nil, false
			s.mu.Unlock()
			return true
		}
		if !said {
			s.o.Log.Error("lease " + b.Pod.Name + " is kept until its process is known, for " +
				time.Until(until).Round(time.Second).String() + " at most: " + wording.OneLine(err))
		}
		select {
		case <-ctx.Done():
			return false
		case a := <-asked:
			s.endedBy(b, a)
		case <-time.After(min(retryTime, time.Until(until))):
		}
	}
	return true
}

// endRequest is the wish of a user to end a lease.
type endRequest struct {
	user int
	told *process // the process that has got SIGTERM, or nil if that could not be sent
}

// endedBy has a lease be over, since a user has ended it.
func (s *Service) endedBy(b *begun, a endRequest) {
	if b.kill.IsZero() {
		s.o.Log.Info(fmt.Sprintf("lease %s is ended by user %d", b.Pod.Name, a.user))
	}
	b.user = a.user
	s.over(b)
}

// over has a lease be over: it sets when what is left of it is killed, and when it ends whatever is left. The latter
// counts from the recorded end, so that no restart of the manager puts it off, but leaves time to end and to kill.
func (s *Service) over(b *begun) {
	if b.kill.IsZero() {
		b.kill = time.Now().Add(s.o.Grace)
		b.last = b.kill.Add(max(startTime, unknownTime+min(0, s.left(b))))
	}
	if b.forced.Load() {
		b.user, b.last = 0, b.kill.Add(startTime)
	}
}

// isDue reports whether what is left of a lease is to be killed.
func (b *begun) isDue() bool { return !b.kill.IsZero() && !time.Now().Before(b.kill) }

// unknownUntil returns until when a lease is kept while it is unknown what is left of it.
func (b *begun) unknownUntil() time.Time {
	if b.kill.IsZero() {
		return time.Now().Add(unknownTime)
	}
	return b.last
}

// askEnd asks the process of a lease to end, as a user does, and has the lease be over, also if the process has become
// one that the user may not signal: awaitEnd logs that, and ends the containers.
func (s *Service) askEnd(ctx context.Context, b *begun, user int, asked chan<- endRequest) {
	s.mu.Lock()
	told := b.process
	s.mu.Unlock()
	if told.terminate(user) != nil {
		told = nil
	}
	if user == 0 {
		b.forced.Store(true)
	}
	err := s.o.Manager.ChangeLease(ctx, b.Pod.UID, func(l *model.Lease) error {
		l.Ends = min(cmp.Or(l.Ends, math.MaxInt64), sinceBoot())
		return nil
	})
	if err != nil { // the next manager would not know of the end
		s.o.Log.Warn("the end of lease " + b.Pod.Name + " cannot be recorded: " + wording.OneLine(err))
	}
	select {
	case asked <- endRequest{user, told}:
	default: // an earlier request has the same effect, but for b.forced
	}
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
// lease, it asks the process to end, and waits until what is left is to be killed. It returns false if ctx ends.
func (s *Service) awaitEnd(ctx context.Context, b *begun, asked <-chan endRequest) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended, one, first, told := make(chan error, 1), b.process, b.kill.IsZero(), false
	go func() { ended <- one.waitOr(ctx) }()
	for b.kill.IsZero() {
		select {
		case err := <-ended:
			return err == nil
		case a := <-asked:
			s.endedBy(b, a)
			told = a.told == one // otherwise the lease had that process before
		case <-time.After(min(time.Minute, s.left(b))): // a timer stands still while the host sleeps
			if s.left(b) <= 0 {
				s.over(b)
			}
		}
	}
	if one == nil {
		return true
	}
	told = told || s.terminate(b)
	if first && b.Lease.Containers && (one.inside || !told) { // there may be other containers
		oldest, _ := s.openContainers(ctx, b, b.kill)
		if !told && oldest != nil {
			_ = oldest.terminate(b.user)
		}
		oldest.close()
	}
	for {
		select {
		case err := <-ended:
			return err == nil
		case a := <-asked:
			s.endedBy(b, a)
		case <-time.After(time.Until(b.kill)):
			return true
		}
	}
}

// killRest kills what is left of a lease, and waits until that has ended. It gives up at b.last, or if ctx ends:
// processes outside of the containers could otherwise prolong a lease for ever by starting one container after another.
func (s *Service) killRest(ctx context.Context, b *begun) {
	s.unmark(b.Pod.Name) // engines cannot start more containers of the lease
	for pause, said := shortPause, false; ; pause = min(2*pause, startTime) {
		s.over(b) // root may have ended it meanwhile
		if err := b.process.kill(b.user); err != nil && !said {
			s.o.Log.Warn("the command of lease " + b.Pod.Name + " cannot be killed: " + wording.OneLine(err))
			said = true
		}
		var left *process
		var unknown error
		if b.Lease.Containers {
			left, unknown = s.openContainers(ctx, b, b.last)
			left.close()
		}
		runs := b.process != nil && !b.process.hasEnded()
		isOnlyUnknown := left == nil && !runs
		switch {
		case ctx.Err() != nil, isOnlyUnknown && unknown == nil:
			return
		case isOnlyUnknown && b.forced.Load(), !time.Now().Before(b.last):
			s.sayLeft(b, left, runs, unknown)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(pause, time.Until(b.last))):
		}
	}
}

// sayLeft logs what is left of a lease that ends all the same.
func (s *Service) sayLeft(b *begun, inContainer *process, commandRuns bool, unknown error) {
	var why string
	switch {
	case inContainer != nil:
		why = fmt.Sprintf("new processes appear in containers of it, such as process %d", inContainer.PID)
	case commandRuns:
		why = fmt.Sprintf("its command still runs, as process %d", b.process.PID)
	default:
		why = "it is unknown whether a container of it runs: " + wording.OneLine(unknown)
	}
	s.o.Log.Warn("lease " + b.Pod.Name + " ends, though " + why)
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
func (s *Service) setEnd(uid string, end func(user int)) {
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
