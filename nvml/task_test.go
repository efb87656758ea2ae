package nvml

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// inTime is a context with a deadline.
func inTime(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestTaskThatHangsIsReportedAndNotRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ts tasks
		answer := make(chan struct{})
		hang := func(t *task) { t.calling("nvmlX"); <-answer }
		err := ts.do(inTime(t, 3*time.Second), "GPU 1", hang, nil)
		if want := "does not answer (nvmlX has not returned)"; !errors.Is(err, ErrNoAnswer) || err.Error() != want {
			t.Fatalf("got the error %v, want %q", err, want)
		}
		time.Sleep(time.Minute)
		err = ts.do(inTime(t, time.Hour), "GPU 1", func(*task) { t.Error("called again") }, nil)
		if want := "does not answer (nvmlX has not returned)"; err == nil || err.Error() != want {
			t.Errorf("the second time: got the error %v, want %q", err, want)
		}
		if err := ts.do(inTime(t, time.Second), "GPU 2", func(*task) {}, nil); err != nil {
			t.Errorf("another GPU: %v", err)
		}
		if n := len(ts.abandoned()); n != 1 {
			t.Errorf("%d tasks are left behind, want 1", n)
		}
		close(answer)
		synctest.Wait()
		if err := ts.do(inTime(t, time.Second), "GPU 1", func(*task) {}, nil); err != nil || len(ts.abandoned()) != 0 {
			t.Errorf("after the answer: error %v, %d tasks left behind", err, len(ts.abandoned()))
		}
	})
}

func TestTasksOfOneNameTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ts tasks
		under, errs := 0, make(chan error)
		work := func(*task) {
			if under++; under > 1 {
				t.Error("two at a time")
			}
			time.Sleep(time.Second)
			under--
		}
		ctx := inTime(t, 4*time.Second+time.Millisecond)
		for range 6 {
			go func() { errs <- ts.do(ctx, "GPU 1", work, nil) }()
		}
		failed := 0
		for range 6 {
			if err := <-errs; err != nil {
				failed++
			}
		}
		if failed != 2 { // in four seconds there are four turns; the fifth has begun and is given up
			t.Errorf("%d of 6 gave up, want 2", failed)
		}
		time.Sleep(time.Second)
	})
}

func TestTaskThatEndsLateIsFollowedUp(t *testing.T) {
	for name, c := range map[string]struct {
		takes time.Duration
		late  bool
	}{
		"in time": {time.Second, false},
		"late":    {3 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var ts tasks
				late := false
				err := ts.do(inTime(t, 2*time.Second), "system", func(*task) { time.Sleep(c.takes) }, func() { late = true })
				time.Sleep(time.Minute)
				synctest.Wait()
				if (err != nil) != c.late || late != c.late {
					t.Errorf("got the error %v and late %v, want %v", err, late, c.late)
				}
			})
		})
	}
}

func TestTaskNamesTheCallThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ts tasks
		err := ts.do(inTime(t, 2*time.Second), "GPU 1", func(t *task) {
			for i := range 5 {
				t.calling(fmt.Sprintf("nvml%d", i))
				time.Sleep(700 * time.Millisecond)
			}
		}, nil)
		if err == nil || !strings.Contains(err.Error(), "(nvml2 ") {
			t.Errorf("got the error %v, want one about nvml2", err)
		}
		time.Sleep(time.Minute)
	})
}
