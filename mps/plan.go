package mps

import "time"

// seen is what is known of a GPU's daemon.
type seen struct {
	now time.Time
	// runs tells that its process is there, and recorded that the GPU was prepared for one.
	runs, recorded bool
	// due is when it may be started again.
	due time.Time
	// answers tells that it answered just now, and silent how often in a row it did not; see failures.
	answers bool
	silent  int
	// limited tells that it has the limits that are wanted.
	limited bool
	// busy tells that it has clients, serving that it has servers, which it may have without clients.
	busy, serving bool
	// stale tells that it belongs to another driver than the one that is installed now, or is not confined.
	stale bool
}

// act is what is done next about a GPU's daemon.
type act int

const (
	rest   act = iota // nothing
	start             // prepare the GPU and start a daemon
	limit             // give it the limits that are wanted
	quit              // tell it to end
	end               // end it by a signal, since it does not listen
	forget            // give the GPU back to processes without MPS
)

// patience is how often in a row a daemon may not answer before it is ended.
const patience = 3

// failures counts how often in a row a daemon did not answer. Failures that follow each other within failureTime are one:
// a daemon that is asked often while it does not answer is not ended sooner.
type failures struct {
	count int
	last  time.Time // that was counted
}

const failureTime = time.Second

func (f *failures) add(now time.Time) {
	if f.count == 0 || now.Sub(f.last) >= failureTime {
		f.count, f.last = f.count+1, now
	}
}

// decide is what to do. A daemon with clients is never ended: what they compute would be lost. One that does not answer
// cannot say whether it has some, and is ended only if it has no server.
func decide(want *Want, s seen) act {
	switch {
	case want != nil && want.Hold:
		return rest
	case !s.runs:
		return decideStart(want, s)
	case !s.answers:
		if s.silent >= patience && !s.serving {
			return end
		}
		return rest
	case (want == nil || s.stale) && !s.busy:
		return quit
	case want != nil && !s.limited:
		return limit
	}
	return rest
}

func decideStart(want *Want, s seen) act {
	switch {
	case want == nil && s.recorded:
		return forget
	case want != nil && !s.now.Before(s.due):
		return start
	}
	return rest
}

// The pauses before a daemon is started again double from the first to the last. A daemon that has run for a steady time
// begins with the first.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 30 * time.Second
	steady     = time.Minute
)

// pauses are those between starts.
type pauses struct{ next time.Duration }

// after is the pause after a daemon that ran for so long, or could not be started.
func (p *pauses) after(ran time.Duration) time.Duration {
	if ran >= steady {
		p.next = 0
	}
	pause := max(p.next, firstPause)
	p.next = min(2*pause, lastPause)
	return pause
}
