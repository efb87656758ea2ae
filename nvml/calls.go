package nvml

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// calls bounds the calls into the driver.
//
// A call that hangs in the driver cannot be cancelled. So each call runs in a goroutine of its own, and its caller
// waits until the caller's context ends. Then the call is abandoned: it is outstanding until the driver returns from
// it. Meanwhile
//   - no other call about the same subject is made, so that outstanding calls do not pile up;
//   - the subject's last answer is used, until the call has hung for longer than its caller tolerates; then the error
//     is a [timeoutError];
//   - the library is not closed, which would free memory that the call uses.
//
// When the call returns, its answer is kept as the last one, and the next call about the subject can be made.
//
// A subject is the object of a call, such as "driver", "GPU 3" or "health of GPU-...".
type calls struct {
	mu          sync.Mutex
	running     map[string]*call // by subject
	lastAnswers map[string]any   // by subject, until the library is closed
	returned    func()           // see whenReturned
}

// call is a goroutine that calls one or more functions of the driver about one subject.
type call struct {
	calls *calls
	begun time.Time
	done  chan struct{} // closed when the call has returned
	// progress returns what the call has read so far, or nil if it has read nothing.
	progress func() any

	// Guarded by calls.mu:
	function  string // the function that the call is in
	partial   any    // what the call had read when it entered that function
	abandoned bool
	answer    any
	err       error
}

// timeoutError means that a call has not returned in time. Its text does not change while the call hangs.
type timeoutError struct{ function string }

func (e *timeoutError) Error() string {
	return fmt.Sprintf("does not answer (%s has not returned)", e.function)
}

// ask runs work, which calls the driver about a subject, and waits until ctx ends. If the error is a *timeoutError,
// the result is the subject's last answer or, if there is none, what the call has read so far.
func ask[T any](
	ctx context.Context, cs *calls, subject string, tolerated time.Duration, work func(*call) (T, error),
) (T, error) {
	c, returned := cs.do(ctx, subject, func(c *call) (any, error) { return work(c) })
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if returned {
		answer, _ := c.answer.(T)
		return answer, c.err
	}
	last, known := cs.lastAnswers[subject].(T)
	switch {
	case !known:
		last, _ = c.partial.(T)
	case time.Since(c.begun) < tolerated:
		return last, nil
	}
	return last, &timeoutError{c.function}
}

// do runs work as a call about a subject, and waits until it has returned. If another call about the subject is
// running, do waits for that one first. If the other call is abandoned or does not return before ctx ends, do returns
// it instead.
func (cs *calls) do(ctx context.Context, subject string, work func(*call) (any, error)) (c *call, returned bool) {
	for {
		c, started, abandoned := cs.start(subject, work)
		switch {
		case started:
			return c, c.wait(ctx)
		case abandoned:
			return c, false
		}
		select {
		case <-c.done:
		case <-ctx.Done():
			return c, false
		}
	}
}

// start starts work, unless a call about the subject is running: then it returns the running call.
func (cs *calls) start(subject string, work func(*call) (any, error)) (c *call, started, abandoned bool) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if c := cs.running[subject]; c != nil {
		return c, false, c.abandoned
	}
	if cs.running == nil {
		cs.running, cs.lastAnswers = map[string]*call{}, map[string]any{}
	}
	c = &call{calls: cs, begun: time.Now(), done: make(chan struct{}), function: "its first call"}
	cs.running[subject] = c
	go func() {
		answer, err := work(c)
		cs.end(subject, c, answer, err)
	}()
	return c, true, false
}

func (cs *calls) end(subject string, c *call, answer any, err error) {
	cs.mu.Lock()
	c.answer, c.err = answer, err
	delete(cs.running, subject)
	if err == nil {
		cs.lastAnswers[subject] = answer
	} else {
		delete(cs.lastAnswers, subject)
	}
	close(c.done)
	abandoned, returned := c.abandoned, cs.returned
	cs.mu.Unlock()
	if abandoned && returned != nil {
		returned()
	}
}

// wait waits until the call has returned. When ctx ends, wait abandons the call and returns false.
func (c *call) wait(ctx context.Context) (returned bool) {
	select {
	case <-c.done:
		return true
	case <-ctx.Done():
	}
	c.calls.mu.Lock()
	defer c.calls.mu.Unlock()
	select {
	case <-c.done: // the call has returned meanwhile
		return true
	default:
		c.abandoned = true
		return false
	}
}

// enter records the function that the call is about to enter.
func (c *call) enter(function string) {
	c.calls.mu.Lock()
	defer c.calls.mu.Unlock()
	c.function = function
	if c.progress != nil {
		c.partial = c.progress()
	}
}

// outstanding counts the abandoned calls that have not returned.
func (cs *calls) outstanding() int {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	n := 0
	for _, c := range cs.running {
		if c.abandoned {
			n++
		}
	}
	return n
}

// inFlight lists all calls that have not returned, such as "nvmlDeviceGetUUID (GPU 3)", sorted.
func (cs *calls) inFlight() []string {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	var list []string
	for subject, c := range cs.running {
		list = append(list, fmt.Sprintf("%s (%s)", c.function, subject))
	}
	slices.Sort(list)
	return list
}

// runs reports whether a call about the subject has not returned.
func (cs *calls) runs(subject string) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.running[subject] != nil
}

// hasAnswered reports whether a last answer of the subject is kept.
func (cs *calls) hasAnswered(subject string) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	_, known := cs.lastAnswers[subject]
	return known
}

// whenReturned sets the function that is called when an abandoned call returns. It may be nil.
func (cs *calls) whenReturned(f func()) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.returned = f
}

// forget drops the last answers of all subjects.
func (cs *calls) forget() {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	clear(cs.lastAnswers)
}
