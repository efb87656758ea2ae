package mps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"gpu-cdi-plugin/resource"
)

// notYet is the reason of a GPU whose daemon nobody has seen yet.
const notYet = "its MPS control daemon is being started"

// A daemon that has just been started is asked often, and may take so long to answer.
const (
	firstLook = 20 * time.Millisecond
	lastLook  = time.Second
	// startWithin is how many times as long as for an answer it may take until the first one.
	startWithin = 3
)

// minder looks after the daemon of one GPU.
type minder struct {
	keeper    *Keeper
	uuid, own string
	log       *slog.Logger
	kick      chan struct{}

	// Of the goroutine of run.
	proc      *process
	driver    string // that the process is of
	since     time.Time
	ending    bool               // it was told to
	answered  bool               // it has since it was started
	exclusive bool               // the GPU is, by this process
	given     resource.MPSLimits // by this process to the daemon; what that answers is rounded
	silent    failures
	lookAgain time.Duration
	due       time.Time
	pauses    pauses
	logged    string
	plain     string // why its directories are no volumes
	// unconfined tells that an earlier version started the process, which may do all that root may.
	unconfined bool

	// Under Keeper.mu: the limits that the daemon has, and why it cannot be used, or nothing. Occupied tells that the GPU
	// cannot be used without it.
	ready    resource.MPSLimits
	reason   string
	occupied bool
}

func newMinder(k *Keeper, uuid string) *minder {
	own := filepath.Join(k.opts.Dir, uuid)
	return &minder{
		keeper: k, uuid: uuid, own: own, log: k.opts.Log.With("gpu", uuid),
		kick: make(chan struct{}, 1), reason: notYet, occupied: prepared(own),
	}
}

// run looks after the daemon until ctx ends.
func (m *minder) run(ctx context.Context) {
	if err := m.adopt(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.log.Info(m.uuid + ": its MPS control daemon of before is not there any more: " + err.Error())
	}
	defer func() { m.proc.close() }()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.kick:
		case <-m.proc.end():
		case <-timer.C:
		}
		timer.Reset(m.turn(ctx))
	}
}

// adopt takes over the daemon that an earlier plugin started, or that is there in spite of this one's. If nothing was
// started the error wraps fs.ErrNotExist.
func (m *minder) adopt() error {
	r, err := readRecord(m.own)
	if err != nil {
		return err
	}
	p, err := openProcess(r.PID, r.holds)
	if err != nil {
		return err
	}
	m.proc, m.driver, m.unconfined, m.since = p, r.Driver, !r.confined(), time.Now()
	if m.unconfined {
		m.log.Warn(fmt.Sprintf("%s: its MPS control daemon, process %d, was started by an earlier version and is not confined; "+
			"it is replaced when the last container that uses it has ended", m.uuid, r.PID))
		return nil
	}
	m.log.Info(fmt.Sprintf("%s: its MPS control daemon of before, process %d, was taken over", m.uuid, r.PID))
	return nil
}

// turn looks at the daemon and does one thing about it. It returns when to look again.
func (m *minder) turn(ctx context.Context) time.Duration {
	m.bury()
	want := m.keeper.wanted(m.uuid)
	s, err := m.look(ctx, want)
	if ctx.Err() != nil {
		return m.keeper.opts.Interval
	}
	if s.runs && !m.proc.runs() { // it ended while it was asked
		return 0
	}
	if s.answers && want != nil && !want.Hold && !m.exclusive { // it was taken over
		if err := m.makeExclusive(ctx); err != nil {
			m.trouble("its MPS control daemon can be got round", err)
			return lastLook
		}
	}
	m.judge(want, s, err)
	switch decide(want, s) {
	case start:
		return m.start(ctx, want)
	case limit:
		return m.limit(ctx, want)
	case quit:
		return m.quit(ctx)
	case end:
		return m.end(ctx)
	case forget:
		return m.forget(ctx)
	case rest:
	}
	return m.next(want, s)
}

// next is when to look again if nothing happens.
func (m *minder) next(want *Want, s seen) time.Duration {
	switch {
	case want != nil && !want.Hold && !s.runs:
		return max(time.Until(m.due), firstLook)
	case want == nil && s.busy:
		m.once("its MPS control daemon is not wanted any more and ends when its clients have")
		return lastLook
	case s.runs && !s.answers:
		m.lookAgain = min(max(2*m.lookAgain, firstLook), lastLook)
		return m.lookAgain
	}
	m.lookAgain = 0
	return m.keeper.opts.Interval
}

// bury takes note of a daemon's end.
func (m *minder) bury() {
	if m.proc == nil || m.proc.runs() {
		return
	}
	how := m.proc.how
	m.proc.close()
	ran := time.Since(m.since)
	m.proc, m.answered, m.silent, m.lookAgain, m.given = nil, false, failures{}, 0, resource.MPSLimits{}
	if m.ending {
		m.ending, m.due = false, time.Now()
		m.log.Info(m.uuid + ": its MPS control daemon has ended, as it was told to")
		m.say("its MPS control daemon was told to end", resource.MPSLimits{})
		return
	}
	pause := m.pauses.after(ran)
	m.due = time.Now().Add(pause)
	m.log.Warn(fmt.Sprintf("%s: its MPS control daemon %s; while it is configured it is started again, after %v; it printed %q",
		m.uuid, how, pause, tail(m.own)))
	m.say("its MPS control daemon "+how, resource.MPSLimits{})
}

// look finds out how the daemon is. The error is why it does not answer.
func (m *minder) look(ctx context.Context, want *Want) (seen, error) {
	s := seen{now: time.Now(), due: m.due, runs: m.proc.runs(), recorded: m.exclusive || prepared(m.own)}
	if !s.runs {
		return s, nil
	}
	boundLogs(m.own)
	err := m.question(ctx, want, &s)
	s.answers = err == nil
	switch {
	case s.answers:
		m.silent, m.answered = failures{}, true
	case !m.isNew():
		m.silent.add(s.now)
	}
	s.silent, s.serving = m.silent.count, m.proc.serving()
	return s, err
}

// isNew reports whether the daemon may not be able to answer yet.
func (m *minder) isNew() bool { return time.Since(m.since) < startWithin*m.keeper.opts.Deadline }

// asking is a context for all that is asked of the daemon at once. It ends at the deadline, however many answers a container
// delays, and when the daemon's process ends.
func (m *minder) asking(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, m.keeper.opts.Deadline)
	end := m.proc.end()
	go func() {
		select {
		case <-end:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// question asks the daemon what has to be known of it.
func (m *minder) question(ctx context.Context, want *Want, s *seen) error {
	ctx, cancel := m.asking(ctx)
	defer cancel()
	c, err := m.keeper.control(ctx, m.own)
	if err != nil {
		return err
	}
	s.stale = m.unconfined || c.program.Driver != m.driver
	if want != nil {
		has, err := c.limited(ctx, want.Limits)
		if err != nil {
			return err
		}
		s.limited = has && m.given == want.Limits
	}
	if want == nil || s.stale {
		s.busy, err = c.busy(ctx)
	}
	return err
}

// judge says whether containers can use the daemon.
func (m *minder) judge(want *Want, s seen, err error) {
	switch {
	case want == nil || !s.runs:
	case err != nil && m.isNew() && !m.answered: // it begins
	case err != nil:
		m.trouble("its MPS control daemon does not answer", err)
	case s.limited && m.exclusive:
		if m.say("", want.Limits) {
			m.log.Info(m.uuid+": its MPS control daemon answers; each client may use "+inWords(want.Limits), "pid", m.proc.pid)
		}
	}
}

// say sets the reason and the limits that others see, and reports whether they are others than before.
func (m *minder) say(reason string, ready resource.MPSLimits) bool {
	m.keeper.mu.Lock()
	same := m.reason == reason && m.ready == ready
	m.reason, m.ready = reason, ready
	m.keeper.mu.Unlock()
	if reason == "" {
		m.logged = ""
	}
	if !same {
		m.keeper.opts.Changed()
	}
	return !same
}

// once logs something that goes on, when it begins.
func (m *minder) once(text string) {
	if m.logged != text {
		m.logged = text
		m.log.Info(m.uuid+": "+text, "pid", m.proc.pid)
	}
}

// trouble says what cannot be done. The same trouble is logged loudly once.
func (m *minder) trouble(what string, err error) {
	text := what + ": " + strings.ReplaceAll(err.Error(), "\n", "; ")
	log := m.log.Warn
	if m.logged == text {
		log = m.log.Debug
	}
	m.logged = text
	log(m.uuid + ": " + text)
	m.say(text, resource.MPSLimits{})
}
