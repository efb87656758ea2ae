package nvml

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// tasks holds the calls into the driver that are under way, by the name of their subject: the driver, a GPU, a pair of
// GPUs. There is one at a time for each, so that calls that never return do not pile up.
type tasks struct {
	mu      sync.Mutex
	running map[string]*task
}

// task is a goroutine that calls the driver. When its caller stops waiting the task is abandoned: it goes on as soon as
// the driver lets it.
type task struct {
	done  chan struct{}
	since time.Time

	mu        sync.Mutex
	call      string // the NVML function that it is in
	partial   any    // what the work has learned so far
	finished  bool
	abandoned bool
}

// silence is the error of a task that has not ended. It wraps ErrNoAnswer. Its text is the same as long as it lasts.
type silence struct {
	call    string
	since   time.Time
	partial any // of the task
}

func (s *silence) Error() string {
	if s.call == "" {
		return ErrNoAnswer.Error()
	}
	return fmt.Sprintf("%v (%s has not returned)", ErrNoAnswer, s.call)
}

func (s *silence) Unwrap() error { return ErrNoAnswer }

// do runs work in a goroutine and waits for it until ctx ends. If a task of that name is under way and its caller waits
// for it, work follows it; if that task is abandoned, work is not run. The error is a *silence or nil. After work that
// ends when do has returned, late is called, if it is not nil.
func (ts *tasks) do(ctx context.Context, name string, work func(*task), late func()) error {
	t := &task{done: make(chan struct{}), since: time.Now()}
	if err := ts.enter(ctx, name, t); err != nil {
		return err
	}
	go func() {
		abandoned := false
		defer func() {
			if abandoned && late != nil {
				late() // when the name is free, so that it can ask again
			}
		}()
		defer close(t.done)
		defer ts.leave(name)
		work(t)
		abandoned = t.finish()
	}()
	return t.wait(ctx)
}

// enter makes t the running task of that name.
func (ts *tasks) enter(ctx context.Context, name string, t *task) error {
	for {
		old := ts.tryEnter(name, t)
		if old == nil {
			return nil
		}
		if old.isAbandoned() {
			return old.silence()
		}
		select {
		case <-old.done:
		case <-ctx.Done():
			return old.silence()
		}
	}
}

func (ts *tasks) tryEnter(name string, t *task) (old *task) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if old := ts.running[name]; old != nil {
		return old
	}
	if ts.running == nil {
		ts.running = map[string]*task{}
	}
	ts.running[name] = t
	return nil
}

func (ts *tasks) leave(name string) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	delete(ts.running, name)
}

// underWay lists the calls that have not returned, such as "nvmlDeviceGetUUID (GPU 3)", sorted.
func (ts *tasks) underWay() []string {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	var calls []string
	for name, t := range ts.running {
		calls = append(calls, fmt.Sprintf("%s (%s)", t.silence().call, name))
	}
	slices.Sort(calls)
	return calls
}

func (ts *tasks) abandoned() []*task {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	var left []*task
	for _, t := range ts.running {
		if t.isAbandoned() {
			left = append(left, t)
		}
	}
	return left
}

// settle waits for each abandoned task until it is of that age, and returns the number of those that are under way still.
func (ts *tasks) settle(age time.Duration) int {
	for _, t := range ts.abandoned() {
		select {
		case <-t.done:
		case <-time.After(age - time.Since(t.since)):
		}
	}
	return len(ts.abandoned())
}

// calling notes the NVML function that the task is about to call.
func (t *task) calling(function string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.call = function
}

// learned notes what the work has learned so far.
func (t *task) learned(partial any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.partial = partial
}

// finish notes that the work is done and reports whether the task was abandoned.
func (t *task) finish() (abandoned bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.finished = true
	return t.abandoned
}

// abandon notes that nobody waits for the work any more, and reports whether it had been done by then.
func (t *task) abandon() (finished bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.abandoned = !t.finished
	return t.finished
}

func (t *task) isAbandoned() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.abandoned
}

func (t *task) wait(ctx context.Context) error {
	select {
	case <-t.done:
		return nil
	case <-ctx.Done():
	}
	if t.abandon() {
		<-t.done
		return nil
	}
	return t.silence()
}

func (t *task) silence() *silence {
	t.mu.Lock()
	defer t.mu.Unlock()
	return &silence{t.call, t.since, t.partial}
}
