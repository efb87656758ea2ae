package mps

import "time"

// state is what is known of a GPU's daemon.
type state struct {
	now time.Time
	// runs is whether its process exists, and prepared whether the GPU was prepared for a daemon.
	runs, prepared bool
	// startAfter is when it may be started again.
	startAfter time.Time
	// answers is whether it answered just now, and silent how long it has not. patience is how long it may not.
	answers          bool
	silent, patience time.Duration
	// limited is whether it has the desired limits.
	limited bool
	// busy is whether it has clients, and serving whether it has servers, which can be without clients.
	busy, serving bool
	// stale is whether it belongs to another driver version than the installed one.
	stale bool
}

// action is the next step for a GPU's daemon.
type action int

const (
	none    action = iota
	start          // prepare the GPU and start a daemon
	limit          // set the desired limits
	quit           // send the command to end
	kill           // end it with signals, since it does not answer
	release        // make the GPU usable without MPS
)

// decide returns the next action. A daemon with clients is never ended: what they compute would be lost. One that does
// not answer cannot report its clients, and is killed only if it has no server.
func decide(desired *Daemon, s state) action {
	switch {
	case desired != nil && desired.Hold:
		return none
	case !s.runs && desired == nil && s.prepared:
		return release
	case !s.runs && desired != nil && !s.now.Before(s.startAfter):
		return start
	case !s.runs:
		return none
	case !s.answers && s.silent >= s.patience && !s.serving:
		return kill
	case !s.answers:
		return none
	case (desired == nil || s.stale) && !s.busy:
		return quit
	case desired != nil && !s.limited:
		return limit
	}
	return none
}
