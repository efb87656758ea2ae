package nvml

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// tasks keeps the calls into the driver that are under way, each under the name of what it is about: the system, a
// GPU, a pair of GPUs. There is one at a time for each, so that calls that never return do not pile up.
type tasks struct {
	mu      sync.Mutex
	running map[string]*task
}

// task is a goroutine that calls the driver. Who waits for it may give up; then it is left behind and goes on when
// the driver lets it.
type task struct {
	done  chan struct{}
	since time.Time

	mu        sync.Mutex
	call      string // the NVML function that it is in
	finished  bool
	abandoned bool
}

// do runs work in a goroutine and waits for it until ctx ends. If the task of that name that somebody else waits for
// is under way, its turn is after that one; if one is left behind, nothing is done. The error says which call has not
// returned. Work that ends after do gave up is followed by late, if any.
func (ts *tasks) do(ctx context.Context, name string, work func(*task), late func()) error {
	t := &task{done: make(chan struct{}), since: time.Now()}
	if err := ts.enter(ctx, name, t); err != nil {
		return err
	}
	go func() {
		defer close(t.done)
		defer ts.leave(name)
		work(t)
		if t.finish() && late != nil {
			late()
		}
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
			return old.noAnswer()
		}
		select {
		case <-old.done:
		case <-ctx.Done():
			return old.noAnswer()
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

// leftBehind is the number of tasks that nobody waits for any more.
func (ts *tasks) leftBehind() int { return len(ts.abandoned()) }

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

// settle waits for the tasks that were left behind, and returns the number of those that are so still after that time.
func (ts *tasks) settle(within time.Duration) int {
	late := time.After(within)
	for _, t := range ts.abandoned() {
		select {
		case <-t.done:
		case <-late:
			return ts.leftBehind()
		}
	}
	return ts.leftBehind()
}

// calling notes the NVML function that the task is about to call.
func (t *task) calling(function string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.call = function
}

// finish notes that the work is done and reports whether nobody waits for it any more.
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
	return t.noAnswer()
}

func (t *task) noAnswer() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Errorf("%s: %w for %s", t.call, ErrNoAnswer, time.Since(t.since).Round(time.Millisecond))
}
