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

// withDeadline returns a context that ends after a time.
func withDeadline(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// askText asks for a text, and tolerates no call that hangs.
func askText(ctx context.Context, cs *calls, subject string, work func(*call) string) (string, error) {
	return ask(ctx, cs, subject, 0, func(c *call) (string, error) { return work(c), nil })
}

func isTimeout(err error) bool {
	_, ok := errors.AsType[*timeoutError](err)
	return ok
}

func TestCallThatHangsIsReportedAndNotRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var cs calls
		answer := make(chan struct{})
		hang := func(c *call) string { c.enter("nvmlX"); <-answer; return "late" }
		const want = "does not answer (nvmlX has not returned)"
		_, err := askText(withDeadline(t, 3*time.Second), &cs, "GPU 1", hang)
		if !isTimeout(err) || err.Error() != want {
			t.Fatalf("got the error %v, want %q", err, want)
		}
		time.Sleep(time.Minute)
		again := func(*call) string { t.Error("called again"); return "" }
		if _, err := askText(withDeadline(t, time.Hour), &cs, "GPU 1", again); err == nil || err.Error() != want {
			t.Errorf("the second time: got the error %v, want %q", err, want)
		}
		good := func(*call) string { return "good" }
		if got, err := askText(withDeadline(t, time.Second), &cs, "GPU 2", good); err != nil || got != "good" {
			t.Errorf("another GPU: %q, %v", got, err)
		}
		if n := cs.outstanding(); n != 1 {
			t.Errorf("%d calls are outstanding, want 1", n)
		}
		if got := strings.Join(cs.inFlight(), ", "); got != "nvmlX (GPU 1)" {
			t.Errorf("in flight are %q", got)
		}
		close(answer)
		synctest.Wait()
		got, err := askText(withDeadline(t, time.Second), &cs, "GPU 1", good)
		if err != nil || got != "good" || cs.outstanding() != 0 {
			t.Errorf("after the answer: %q, error %v, %d outstanding calls", got, err, cs.outstanding())
		}
	})
}

// While a call hangs, its subject's last answer is used, and comes with the error when that is no longer tolerated.
func TestLastAnswerIsUsedWhileACallIsTolerated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var cs calls
		const tolerated = 4 * time.Second
		answer := make(chan struct{})
		read := func(text string, until <-chan struct{}) (string, error) {
			return ask(withDeadline(t, time.Second), &cs, "GPU 1", tolerated, func(*call) (string, error) {
				if until != nil {
					<-until
				}
				return text, nil
			})
		}
		for _, c := range []struct {
			until   <-chan struct{}
			wait    time.Duration
			timeout bool
		}{{nil, 0, false}, {answer, 0, false}, {answer, tolerated - time.Second - 1, false}, {answer, 1, true}} {
			time.Sleep(c.wait)
			if got, err := read("first", c.until); got != "first" || isTimeout(err) != c.timeout {
				t.Errorf("got %q, error %v", got, err)
			}
		}
		close(answer)
		synctest.Wait()
		if got, err := read("second", nil); got != "second" || err != nil {
			t.Errorf("after the answer: %q, %v", got, err)
		}
	})
}

func TestCallsAboutASubjectTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var cs calls
		running, errs := 0, make(chan error)
		work := func(*call) string {
			if running++; running > 1 {
				t.Error("two at a time")
			}
			time.Sleep(time.Second)
			running--
			return ""
		}
		ctx := withDeadline(t, 4*time.Second+time.Millisecond)
		for range 6 {
			go func() {
				_, err := askText(ctx, &cs, "GPU 1", work)
				errs <- err
			}()
		}
		failed := 0
		for range 6 {
			if err := <-errs; err != nil {
				failed++
			}
		}
		if failed != 2 { // in four seconds there are four turns; the fifth has begun and is abandoned
			t.Errorf("%d of 6 gave up, want 2", failed)
		}
		time.Sleep(time.Second)
	})
}

func TestReturnOfAnAbandonedCallIsReported(t *testing.T) {
	for name, c := range map[string]struct {
		takes time.Duration
		late  bool
	}{
		"in time": {time.Second, false},
		"late":    {3 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var cs calls
				reported := false
				cs.whenReturned(func() { reported = true })
				work := func(*call) string { time.Sleep(c.takes); return "" }
				_, err := askText(withDeadline(t, 2*time.Second), &cs, "driver", work)
				time.Sleep(time.Minute)
				synctest.Wait()
				if (err != nil) != c.late || reported != c.late {
					t.Errorf("error %v, reported %v; want %v", err, reported, c.late)
				}
			})
		})
	}
}

func TestTimeoutNamesTheFunctionThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var cs calls
		_, err := askText(withDeadline(t, 2*time.Second), &cs, "GPU 1", func(c *call) string {
			for i := range 5 {
				c.enter(fmt.Sprintf("nvml%d", i))
				time.Sleep(700 * time.Millisecond)
			}
			return ""
		})
		if err == nil || !strings.Contains(err.Error(), "(nvml2 ") {
			t.Errorf("got the error %v, want one about nvml2", err)
		}
		time.Sleep(time.Minute)
	})
}

func TestTimeoutHasWhatTheCallHasLearned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var cs calls
		got, err := askText(withDeadline(t, time.Second), &cs, "GPU 1", func(c *call) string {
			learned := "nothing"
			c.progress = func() any { return learned }
			c.enter("nvml1")
			learned = "much"
			c.enter("nvml2")
			time.Sleep(time.Minute)
			return "all"
		})
		if got != "much" || !isTimeout(err) {
			t.Errorf("got %q and the error %v", got, err)
		}
		time.Sleep(time.Hour)
	})
}
