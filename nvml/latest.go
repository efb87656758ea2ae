package nvml

import (
	"context"
	"errors"
	"sync"
	"time"
)

// answers holds what each subject answered last. It is valid until the driver is shut down.
type answers struct {
	mu     sync.Mutex
	latest map[string]any // by the name of the task
}

func (a *answers) get(name string) any {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.latest[name]
}

// set notes an answer; nil removes it.
func (a *answers) set(name string, answer any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.latest == nil {
		a.latest = map[string]any{}
	}
	if a.latest[name] = answer; answer == nil {
		delete(a.latest, name)
	}
}

func (a *answers) clear() {
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.latest)
}

// errNoTurn is the error of a task that did not get to call the driver.
var errNoTurn = errors.New("too many other calls have not returned")

// read asks the driver in the task of that name, and waits until ctx ends. While the task goes on after that, the answer
// is the subject's last one, without an error until the task is older than the library's tolerance. Where there is no
// last answer it is what the task has learned so far. An error about a task that has not ended is a *silence.
func read[T any](ctx context.Context, l *Library, name string, ask func(*task) (T, error)) (T, error) {
	d := l.driver
	var answer T
	var err error
	work := func(t *task) {
		if answer, err = ask(t); err != nil {
			d.answers.set(name, nil)
			return
		}
		d.answers.set(name, answer)
	}
	late := func() {
		if l.answered != nil && !errors.Is(err, errNoTurn) {
			l.answered()
		}
	}
	silent := d.tasks.do(ctx, name, work, late)
	if silent == nil {
		return answer, err
	}
	s, _ := errors.AsType[*silence](silent)
	last, ok := d.answers.get(name).(T)
	switch {
	case !ok:
		last, _ = s.partial.(T)
		return last, silent
	case time.Since(s.since) < l.tolerance:
		return last, nil
	default:
		return last, silent
	}
}
