package plugin

import (
	"math/rand/v2"
	"time"
)

// The pauses between registrations that fail double from the first to the last. The first is short: what fails while the
// kubelet starts may be right in a moment.
const (
	firstPause = time.Millisecond
	lastPause  = 5 * time.Second
	// steady is how long a connection must last for the next loss to be a first one.
	steady = 10 * time.Second
)

// backoff makes pauses that double, each half of it by chance, so that the plugins of a node do not call at once.
type backoff struct {
	next time.Duration
}

func (b *backoff) reset() { b.next = 0 }

func (b *backoff) pause() time.Duration {
	pause := max(b.next, firstPause)
	b.next = min(2*pause, lastPause)
	return pause/2 + rand.N(pause/2+1)
}

// seen is what an endpoint sees of the kubelet.
type seen struct {
	now time.Time
	// kubelet is the number of the kubelet's socket, or 0.
	kubelet uint64
	// streaming tells that somebody reads the list who began after the last announcement did.
	streaming bool
}

// phase is where an endpoint is in its life with the kubelet.
type phase int

const (
	unknown    phase = iota // the kubelet is to be told
	announcing              // it is being told
	announced               // it took it, and should ask for the list
	connected               // it reads the list
)

// life decides when an endpoint is announced to the kubelet. It does nothing itself: look takes what is seen, ended the
// result of an announcement.
type life struct {
	grace time.Duration
	// finds tells that the kubelet finds the socket by itself: it is waited for before the socket is announced again.
	finds bool

	phase   phase
	told    bool      // the kubelet heard of the last announcement
	kubelet uint64    // the one that the phase is about
	due     time.Time // of the next step, in unknown and announced
	since   time.Time // the kubelet has been connected
	pauses  backoff
}

// step is what look wants done.
type step struct {
	// announce tells to begin an announcement, and to forget one that is under way.
	announce bool
	// gained and lost tell that the kubelet began or stopped to read the list, silent that it never did.
	gained, lost, silent bool
	// wake is when to look again if nothing happens before; zero is never.
	wake time.Time
}

func (l *life) look(s seen) (do step) {
	if s.kubelet != l.kubelet {
		l.kubelet = s.kubelet
		if s.kubelet != 0 {
			do.lost = l.phase == connected
			l.told = false
			l.phase, l.due = unknown, s.now
			l.pauses.reset()
		}
	}
	// As long as this kubelet did not hear of it, it is one before that reads the list: it had been told and was slow, or
	// does not end.
	reads := s.streaming && l.told
	switch {
	case reads && l.phase != connected:
		do.gained = true
		l.phase, l.since = connected, s.now
	case !reads && l.phase == connected:
		do.lost = true
		l.missed(s.now)
	case l.phase == announced && !s.now.Before(l.due):
		do.silent = true
		l.retry(s.now)
	}
	if l.phase == unknown && l.kubelet != 0 && !s.now.Before(l.due) {
		do.announce = true
		l.phase, l.told = announcing, false
	}
	if l.phase == announced || l.phase == unknown && l.kubelet != 0 {
		do.wake = l.due
	}
	return do
}

// missed is what follows the loss of a connection. A kubelet that finds sockets by itself does so again when it is back.
func (l *life) missed(now time.Time) {
	if now.Sub(l.since) >= steady {
		l.pauses.reset()
	}
	if l.finds {
		l.phase, l.due = announced, now.Add(l.grace)
		return
	}
	l.retry(now)
}

func (l *life) retry(now time.Time) { l.phase, l.due = unknown, now.Add(l.pauses.pause()) }

// outcome is how an announcement ended.
type outcome struct {
	// told tells that the kubelet heard of it. It may have taken it in spite of an error: the answer came too late.
	told bool
	err  error
}

// ended notes the end of an announcement.
func (l *life) ended(now time.Time, o outcome) {
	l.told = o.told
	if o.err != nil {
		l.retry(now)
		return
	}
	l.phase, l.due = announced, now.Add(l.grace)
}
