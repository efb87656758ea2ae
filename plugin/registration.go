package plugin

import (
	"time"

	"gpu-cdi-plugin/internal/backoff"
)

const (
	// The first pause between registrations is short: what fails while the kubelet starts may succeed a moment later.
	firstPause = time.Millisecond
	lastPause  = 5 * time.Second
	// steady is how long a watch must last for the pause after it to be the first again.
	steady = 10 * time.Second
)

// registrationState is how far an endpoint's registration with the kubelet is.
type registrationState int

const (
	unregistered registrationState = iota // to be registered, at once or after a pause
	registering                           // a Register call is under way
	registered                            // the kubelet accepted, and is expected to call ListAndWatch
	watched                               // the kubelet watches the devices
)

// registration decides when an endpoint registers with the kubelet. It does nothing itself: observe takes an
// observation and returns the actions for the endpoint, finished takes the result of a Register call.
type registration struct {
	grace time.Duration // how long the kubelet may take to watch after the registration
	// discovered is set if the kubelet discovers the endpoint's socket. Then there is no Register call; if the kubelet
	// does not watch, the endpoint makes a new socket for it to discover.
	discovered bool

	state        registrationState
	kubelet      socketID  // the kubelet's socket that the state is about
	delivered    bool      // the last Register call may have reached that kubelet
	due          time.Time // when to register, if unregistered, or when the grace ends, if registered
	watchedSince time.Time
	pauses       backoff.Backoff
}

// anyKubelet stands for a kubelet that discovers sockets. Its own socket does not matter.
var anyKubelet = socketID{inode: 1}

func newRegistration(now time.Time, grace time.Duration, discovered bool) registration {
	r := registration{
		grace: grace, discovered: discovered,
		pauses: backoff.Backoff{First: firstPause, Last: lastPause, Steady: steady},
	}
	if discovered { // the first socket is there already
		r.kubelet = anyKubelet
		r.finished(now, outcome{delivered: true})
	}
	return r
}

// observation is what an endpoint observes of the kubelet.
type observation struct {
	now time.Time
	// kubelet is the kubelet's socket; the zero value is none.
	kubelet socketID
	// streaming is true while a ListAndWatch stream is open that began after the last Register call.
	streaming bool
}

// actions are what an endpoint is to do.
type actions struct {
	// register is to begin a registration, and to cancel one that is under way.
	register bool
	// The kubelet began to watch, ceased to, or did not begin in time.
	watchBegan, watchEnded, notWatched bool
	// next is when to observe again if nothing happens before; zero is never.
	next time.Time
}

func (r *registration) observe(o observation) (do actions) {
	if o.kubelet != r.kubelet {
		r.kubelet = o.kubelet
		if o.kubelet != (socketID{}) {
			do.watchEnded = r.state == watched
			r.delivered = false
			r.state, r.due = unregistered, o.now
			r.pauses.Reset()
		}
	}
	// Before a Register call has reached this kubelet, a stream is an earlier kubelet's, which was slow to open it or
	// does not end.
	isWatched := o.streaming && r.delivered
	switch {
	case isWatched && r.state != watched:
		do.watchBegan = true
		r.state, r.watchedSince = watched, o.now
	case !isWatched && r.state == watched && r.discovered:
		do.watchEnded = true
		r.state, r.due = registered, o.now.Add(r.grace) // the kubelet discovers the socket again when it is back
		r.pauses.Reset()
	case !isWatched && r.state == watched:
		do.watchEnded = true
		r.retry(o.now, o.now.Sub(r.watchedSince))
	case r.state == registered && !o.now.Before(r.due):
		do.notWatched = true
		r.retry(o.now, 0)
	}
	if r.state == unregistered && r.kubelet != (socketID{}) && !o.now.Before(r.due) {
		do.register = true
		r.state, r.delivered = registering, false
	}
	if r.state == registered || r.state == unregistered && r.kubelet != (socketID{}) {
		do.next = r.due
	}
	return do
}

func (r *registration) retry(now time.Time, success time.Duration) {
	r.state, r.due = unregistered, now.Add(r.pauses.After(success))
}

// outcome is the result of a Register call.
type outcome struct {
	// delivered is true if the call may have reached the kubelet. In spite of an error it may have been accepted: the
	// response came too late.
	delivered bool
	err       error
}

// finished takes the result of the Register call.
func (r *registration) finished(now time.Time, o outcome) {
	r.delivered = o.delivered
	if o.err != nil {
		r.retry(now, 0)
		return
	}
	r.state, r.due = registered, now.Add(r.grace)
}
