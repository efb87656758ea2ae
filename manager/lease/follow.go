package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
)

// follow waits for the end of a lease.
func (s *Service) follow(ctx context.Context, b *begun) {
	defer func() { b.process.close() }()
	asked := make(chan endRequest, 1)
	s.setEnd(b.Pod.UID, func(user int) error { return s.askEnd(ctx, b, user, asked) })
	defer s.setEnd(b.Pod.UID, nil)
	if !s.reopenProcess(ctx, b, asked) {
		return
	}
	for b.ended || s.awaitEnd(ctx, b, asked) {
		if b.Lease.Containers && !b.unused && s.adoptContainer(ctx, b, asked) {
			continue
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
	until := time.Now().Add(unknownTime)
	for said := false; b.reopen; said = true {
		one, err := reopen(s.o.Procfs, s.o.Boot, b.Lease.Process)
		known := err == nil || errors.Is(err, proc.ErrEnded)
		if known || b.forced || !time.Now().Before(until) {
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
			s.o.Log.Error("lease " + b.Pod.Name + " is kept until its process is known, for " + unknownTime.String() +
				" at most: " + wording.OneLine(err))
		}
		select {
		case <-ctx.Done():
			return false
		case a := <-asked:
			s.over(b, a)
		case <-time.After(min(retryTime, time.Until(until))):
		}
	}
	return true
}

// endRequest is the wish of a user to end a lease. The process has got SIGTERM.
type endRequest struct {
	user int
	of   *process
}

// over has a lease be over, as its end was asked for.
func (s *Service) over(b *begun, a endRequest) {
	if b.kill.IsZero() {
		s.o.Log.Info(fmt.Sprintf("lease %s is ended by user %d", b.Pod.Name, a.user))
	}
	b.user, b.forced = a.user, b.forced || a.user == 0
	if b.kill.IsZero() {
		b.kill = time.Now().Add(s.o.Grace)
	}
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
	default: // an earlier request has the same effect
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
	ended, one, first := make(chan error, 1), b.process, b.kill.IsZero()
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
			s.over(b, a)
			over = true
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
	if first && one != nil && one.inside { // there may be other containers
		other, _ := s.openContainers(ctx, b, b.kill)
		other.close()
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
