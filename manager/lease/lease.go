// Package lease gives devices to processes on hosts without Kubernetes. A lease is a pod of one container whose life is
// a process: it ends when the process has ended, however that happens, also while the manager is away, and with the
// boot. Who cannot have devices now waits in a queue, first come, first served.
package lease

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"gpu-cdi-plugin/internal/fair"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/model"
)

// Manager has the methods of the device manager that leases need. See manager.Manager.
type Manager interface {
	Lease(ctx context.Context, p model.Pod, by model.Caller, l model.Lease) (model.Placement, error)
	Start(ctx context.Context, podUID, container string) (model.RunOptions, error)
	RunOptions(ctx context.Context, podUID, container string) (model.RunOptions, error)
	ChangeLease(ctx context.Context, podUID string, change func(*model.Lease) error) error
	Release(ctx context.Context, podUID string) error
	Pods() []model.Placement
	Pod(podUID string) (model.Placement, bool)
	Resources() []manager.Resource
	Watch(ctx context.Context) <-chan manager.Event
}

// Namespace is the namespace of the pods that are leases.
const Namespace = "leases"

// container is the name of a lease's container.
const container = "main"

const (
	// refusalTime is how long a device is left alone that could not be prepared, and shownTime how long that is shown.
	refusalTime = 10 * time.Second
	shownTime   = 10 * time.Minute
	// registerTime is how long after the start no request fails for want of devices: a plugin registers one resource
	// after the other. If none lists a device at all, that is after emptyTime.
	registerTime = 2 * time.Second
	emptyTime    = 10 * time.Second
	// retryTime is the time between two attempts to record or release devices, such as on a full disk.
	retryTime = time.Second
	// startTime is how long a container may take to appear after its command was killed, and to start again.
	startTime = time.Second
	// unknownTime is how long a lease is kept at most while it is unknown whether its process or a container of it runs,
	// and while what is left of a lease that is over cannot be killed. What uses a device after that, the check before
	// the next lease finds.
	unknownTime = 30 * time.Second
	// shortPause is the time between the first two attempts to kill what is left.
	shortPause = 10 * time.Millisecond
	// maxWaiting is how many requests can wait, and maxWaitingOfUser how many of one user other than root. If all places
	// are taken, the user who has most loses the newest to a user who has fewer, or to root.
	maxWaiting       = 384
	maxWaitingOfUser = 64
	maxCommand       = 200 // bytes of a command that are recorded
	maxReason        = 500 // bytes of a reason why devices cannot be had
)

var (
	// ErrTooMany means that too many requests wait.
	ErrTooMany = errors.New("too many requests wait for devices")
	// ErrNotFound means that there is no lease with an ID.
	ErrNotFound = errors.New("there is no lease")
	// ErrNotYours means that a lease or a process belongs to another user.
	ErrNotYours = errors.New("it belongs to another user")
)

// Options are the options of a Service. All but Confiner are required.
type Options struct {
	Manager Manager
	// Describe returns what the plugin says about a device, given by its ID.
	Describe func(id string) Info
	// UsedBy returns what uses a device without a lease, and since when that is known, if the device is unhealthy only
	// because of that. Otherwise the text is empty.
	UsedBy func(id string) Use
	Procfs string // the path of /proc
	Boot   string // the kernel's boot ID
	// Dir is where the directory with the files of leases is made. All can read it, and only this user can write to it.
	Dir string
	// Grace is how long a command has between SIGTERM and SIGKILL when its time is over.
	Grace time.Duration
	// Confiner is nil if processes cannot be confined.
	Confiner Confiner
	Log      *slog.Logger
}

// A Confiner limits which devices processes can open.
type Confiner interface {
	// Confine has the process of a lease, given by the lease's ID, open the devices of the run options only. The pidfd
	// is that of the process: if it has ended, Confine fails, and confines no later process with its PID.
	Confine(ctx context.Context, id string, process model.Caller, pidfd *os.File, o model.RunOptions) error
	// Revoke has the processes that are left of a lease open no devices any more, if Confine was called for it.
	Revoke(ctx context.Context, id string)
}

// Service gives and ends leases. Run must be called; the other methods may be called concurrently.
type Service struct {
	o    Options
	wake wake.Chan // when the queue may move
	// marks is where the directory with the files of leases is, from Run on.
	marks proc.Place

	mu      sync.Mutex
	started time.Time                 // when Run was called
	queue   []*waiter                 // in the order of arrival
	begun   []*begun                  // leases that Run does not follow yet
	ends    map[string]func(user int) // end the process of a lease, by the pod's UID
	refused map[deviceKey]refusal     // devices that could not be prepared
	account func(uid uint32) uint32   // the user whose places in the queue those of a UID are
	// deviceSeconds are those of the leases that have ended.
	deviceSeconds float64
}

// begun is a lease that has begun.
type begun struct {
	model.Placement

	process *process // nil if the lease has only a time. Changed under Service.mu
	reopen  bool     // whether the process is to be opened as it is recorded
	ended   bool     // whether the process has ended
	unused  bool     // whether nobody ever had the devices
	// When the lease is over: as if this user had ended it, when what is left is killed, and when the lease ends at the
	// latest, whatever is left.
	user       int
	kill, last time.Time // zero while it is not over
	// forced means that root has ended the lease: it then ends even if it is unknown what is left of it.
	forced atomic.Bool
}

// newBegun returns a lease that has begun. When its time is over, its process is ended as by its user.
func newBegun(p model.Placement, process *process) *begun {
	return &begun{Placement: p, process: process, user: p.Caller.UID}
}

// refusal is why a device could not be prepared.
type refusal struct {
	why string
	at  time.Time
}

// now reports whether the device is still left alone.
func (r refusal) now() bool { return time.Since(r.at) < refusalTime }

// waiter is a request in the queue.
type waiter struct {
	Request

	by         model.Caller
	user       string // the name of the caller's user
	account    uint32 // the user whose place in the queue it has
	lease      model.Lease
	limit      time.Duration // from the begin of the lease, or 0
	since      time.Time
	pause      time.Time        // until which later requests pass it
	narrow     bool             // whether the manager gets no choice, to learn which devices it cannot allocate
	changed    wake.Chan        // when one of these has changed:
	placed     *model.Placement // the devices that are chosen for it, until they are prepared
	unprepared bool             // whether these are not prepared
	err        error            // why it cannot be met
	reason     string           // why it has not been met yet
}

// New returns a Service; call Run.
func New(o Options) *Service {
	return &Service{
		o: o, wake: wake.New(), ends: map[string]func(user int){}, refused: map[deviceKey]refusal{},
		account: fair.Account,
	}
}

// Ask is a request for a lease, and who sends it.
type Ask struct {
	Request

	Command string        // for people
	For     time.Duration // after which the process is ended; 0 means no limit
	By      model.Caller  // who asks
	// PID is the process that has the lease, if that is not the caller.
	PID int
	// Timed means that no process has the lease: it ends after For.
	Timed bool
	// Confine has the process open the leased devices only, if that is possible. The lease then ends with the process,
	// whatever containers it has started.
	Confine bool
}

// Waiting is a request in the queue.
type Waiting struct {
	Request  string    `json:"request"` // like "2 devices"
	UID      int       `json:"uid"`
	User     string    `json:"user"` // the name of the user, or the number
	PID      int       `json:"pid"`
	Command  string    `json:"command"`
	Since    time.Time `json:"since"`
	Position int       `json:"position"` // from 1
	Reason   string    `json:"reason"`
}

// Busy is a device that something uses without a lease, or that could not be prepared when it was asked for.
type Busy struct {
	Resource string    `json:"resource"`
	Device   string    `json:"device"`
	Reason   string    `json:"reason"`
	At       time.Time `json:"at"`
}

// Granted is a lease that begins.
type Granted struct {
	ID      string           `json:"id"`
	Devices []string         `json:"devices"`           // their IDs
	Indexes []string         `json:"indexes,omitempty"` // those on the host, sorted like the devices; empty if not known
	Options model.RunOptions `json:"runOptions"`
	// Confined reports whether the process can open no other devices.
	Confined bool `json:"confined,omitempty"`
}

// Acquire waits until a request is met, and gives the devices to a process until that ends. It calls `waits` at each
// change of the queue, and `grant` when the devices are prepared: an error of that means that nobody will use them.
// When ctx ends, it gives up.
//
// Errors: ErrInvalid, ErrImpossible, ErrTooMany, ErrNotYours, that of `grant`, and that of ctx.
func (s *Service) Acquire(ctx context.Context, ask Ask, waits func(Waiting), grant func(Granted) error) error {
	if err := ask.check(); err != nil {
		return err
	}
	caller, err := s.open(ask.By.PID, ask.By.UID)
	if err != nil {
		return err
	}
	holder := caller
	switch {
	case ask.Timed:
		holder = nil
	case ask.PID != 0:
		holder, err = s.open(ask.PID, ask.By.UID)
	}
	if holder != caller { // until the lease begins, its process is the caller: nobody else knows of it
		defer caller.close()
	}
	if err != nil {
		return err
	}
	if ask.trusted = ask.By.UID == 0; holder != nil {
		ask.pid = holder.PID
	}
	err = s.acquire(ctx, ask, caller, holder, waits, grant)
	if err != nil {
		holder.close()
	}
	return err
}

func (s *Service) acquire(
	ctx context.Context, ask Ask, caller, holder *process, waits func(Waiting), grant func(Granted) error,
) error {
	w, err := s.enter(ask, caller)
	if err != nil {
		return err
	}
	granted, err := s.await(ctx, w, waits)
	if err == nil && w.lease.Containers {
		err = s.mark(&granted)
	}
	if err == nil {
		granted.Confined = s.confine(ctx, ask, caller, granted)
		if err = s.begin(ctx, w, holder); err == nil {
			err = grant(granted)
		}
	}
	if err != nil {
		s.leave(w)
		return err
	}
	s.mu.Lock()
	s.remove(w)
	s.begun = append(s.begun, newBegun(*w.placed, holder))
	s.mu.Unlock()
	s.wake.Wake()
	s.o.Log.Info(fmt.Sprintf("lease %s begins: %s for user %d, process %d (%s)", granted.ID,
		wording.Count(len(granted.Devices), "device"), ask.By.UID, w.placed.Lease.Process.PID, w.lease.Command),
		"devices", granted.Devices)
	return nil
}

// begin records whose lease it is and when it ends, unless that is recorded already.
func (s *Service) begin(ctx context.Context, w *waiter, holder *process) error {
	lease := *w.placed.Lease
	lease.Process = model.Process{Boot: s.o.Boot}
	if holder != nil {
		lease.Process = holder.Process
	}
	switch {
	case w.limit > 0 && lease.Passed: // it promised to end by then
		lease.Ends = lease.Begins + w.limit
	case w.limit > 0:
		lease.Ends = sinceBoot() + w.limit
	}
	if lease == *w.placed.Lease {
		return nil
	}
	w.placed.Lease = &lease
	return s.o.Manager.ChangeLease(ctx, w.placed.Pod.UID, func(l *model.Lease) error {
		*l = lease
		return nil
	})
}

// check returns an error that wraps ErrInvalid if the request makes no sense.
func (a *Ask) check() error {
	switch {
	case a.Timed && a.For <= 0:
		return fmt.Errorf("%w: a lease without a process needs a time", ErrInvalid)
	case a.For < 0 || a.PID < 0 || a.Timed && a.PID > 0:
		return fmt.Errorf("%w: the time or the process", ErrInvalid)
	}
	return a.Request.check()
}

// open opens a process of a user.
func (s *Service) open(pid, user int) (*process, error) {
	p, err := open(s.o.Procfs, s.o.Boot, pid)
	if errors.Is(err, proc.ErrEnded) {
		err = fmt.Errorf("%w: process %d has ended", ErrInvalid, pid)
	}
	if err != nil {
		return nil, err
	}
	if err := p.belongsTo(user); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// confine confines the process of a lease if that is asked for and possible.
func (s *Service) confine(ctx context.Context, ask Ask, caller *process, g Granted) bool {
	if !ask.Confine || ask.PID != 0 || ask.Timed || s.o.Confiner == nil {
		return false
	}
	err := s.o.Confiner.Confine(ctx, g.ID, ask.By, caller.pidfd, g.Options)
	if err != nil {
		s.o.Log.Warn("the command of lease " + g.ID + " is not confined to its devices: " + wording.OneLine(err))
	}
	return err == nil
}

// enter adds a request to the end of the queue.
func (s *Service) enter(ask Ask, caller *process) (*waiter, error) {
	w := &waiter{
		Request: ask.Request, by: ask.By, user: UserName(ask.By.UID), limit: ask.For, since: time.Now(), changed: wake.New(),
		lease: model.Lease{
			Process: caller.Process, Command: wording.Shorten(printable(ask.Command), maxCommand), Containers: !ask.Confine,
		},
		reason: "it has just been asked for",
	}
	w.account = s.account(uint32(ask.By.UID))
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.makePlace(w.account) {
		return nil, ErrTooMany
	}
	s.queue = append(s.queue, w)
	s.wake.Wake()
	return w, nil
}

// makePlace makes a place in the queue for a user, and reports whether there is one. The caller holds s.mu.
func (s *Service) makePlace(to uint32) bool {
	var accounts []uint32
	var waiting []*waiter
	mine := 0
	for _, w := range s.queue {
		if w.account == to {
			mine++
		}
		if w.placed == nil && w.err == nil {
			accounts, waiting = append(accounts, w.account), append(waiting, w)
		}
	}
	if mine >= maxWaitingOfUser && to != 0 {
		return false
	}
	if len(s.queue) < maxWaiting {
		return true
	}
	i := fair.GivesWay(accounts, to)
	if i < 0 {
		return false
	}
	w := waiting[i]
	w.err = fmt.Errorf("%w: another user waits with fewer", ErrTooMany)
	w.changed.Wake()
	s.remove(w)
	return true
}

// leave removes a request from the queue, and gives back what it got meanwhile.
func (s *Service) leave(w *waiter) {
	s.mu.Lock()
	s.remove(w)
	s.giveBack(w)
	s.mu.Unlock()
	s.wake.Wake()
}

// giveBack has Run release the devices that were chosen for a request. The caller holds s.mu.
func (s *Service) giveBack(w *waiter) {
	if w.placed != nil {
		s.begun = append(s.begun, &begun{Placement: *w.placed, ended: true, unused: true})
		w.placed = nil
	}
}

// remove removes a request from the queue. The caller holds s.mu.
func (s *Service) remove(w *waiter) {
	s.queue = slices.DeleteFunc(s.queue, func(other *waiter) bool { return other == w })
}

// await waits until the devices of a request are chosen and prepared.
func (s *Service) await(ctx context.Context, w *waiter, waits func(Waiting)) (Granted, error) {
	var last Waiting
	for {
		select {
		case <-ctx.Done():
			return Granted{}, context.Cause(ctx)
		case <-w.changed:
		}
		s.mu.Lock()
		placed, err, now := w.placed, w.err, s.describe(w)
		s.mu.Unlock()
		switch {
		case err != nil:
			return Granted{}, err
		case placed == nil:
			if now != last {
				waits(now)
			}
			last = now
			continue
		}
		options, err := s.start(ctx, w, placed.Pod.UID)
		if err == nil {
			return s.granted(*placed, options), nil
		}
		if ctx.Err() != nil {
			return Granted{}, context.Cause(ctx)
		}
		s.mu.Lock()
		s.giveBack(w)
		s.without(w, heldBy(*placed), err)
		s.mu.Unlock()
		s.wake.Wake()
	}
}

func (s *Service) granted(p model.Placement, o model.RunOptions) Granted {
	g := Granted{ID: p.Pod.Name, Devices: held(p), Options: o}
	for _, id := range g.Devices {
		g.Indexes = append(g.Indexes, s.o.Describe(id).Index)
	}
	return g
}

// start prepares the devices of a request, unless it says that they are in use.
func (s *Service) start(ctx context.Context, w *waiter, uid string) (model.RunOptions, error) {
	if w.unprepared { // written before w.placed was seen
		return s.o.Manager.RunOptions(ctx, uid, container)
	}
	o, err := s.o.Manager.Start(ctx, uid, container)
	if err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		maps.DeleteFunc(s.refused, func(d deviceKey, _ refusal) bool { return slices.Contains(heldBy(*w.placed), d) })
	}
	return o, err
}

// without is called when a request could not have devices. Those that the error names are left alone for a while, by
// all requests. If it names none of several, all of them are left alone if there are enough others for the request. If
// not, the request waits, and others can have them. The caller holds s.mu.
func (s *Service) without(w *waiter, devices []deviceKey, why error) {
	text := reasonOf(why)
	atFault := slices.DeleteFunc(slices.Clone(devices), func(d deviceKey) bool {
		return len(devices) > 1 && !names(why, (&Device{ID: d.id}).device())
	})
	if len(atFault) == 0 {
		taken := map[deviceKey]bool{}
		for _, d := range devices {
			taken[d] = true
		}
		if w.choice(s.devices(), func(d deviceKey) bool { return taken[d] }) != nil {
			atFault = devices
		}
	}
	if w.unprepared || len(w.Devices) > 0 || len(atFault) == 0 {
		s.pause(w, refusalTime, why)
		return
	}
	var ids []string
	for _, d := range atFault {
		s.refused[d] = refusal{text, time.Now()}
		ids = append(ids, d.id)
	}
	s.o.Log.Warn("devices cannot be leased now: "+text, "devices", ids)
	s.wakeAfter(refusalTime)
}

// names reports whether the error of a plugin names a device: at the begin of a line. Other text, which can be that of
// users, such as a path of cgroups, does not count.
func names(err error, device string) bool {
	text := err.Error()
	if refused, ok := errors.AsType[*endpoint.PluginError](err); ok {
		text = refused.Message // not shortened
	}
	for line := range strings.Lines(text) {
		rest, found := strings.CutPrefix(line, device)
		if found && (strings.HasPrefix(rest, " ") || strings.HasPrefix(rest, "::")) { // behind :: is that of a part
			return true
		}
	}
	return false
}

// pause has a request wait for a while, and later ones pass it. The caller holds s.mu.
func (s *Service) pause(w *waiter, t time.Duration, why error) {
	s.o.Log.Warn("a request waits, and later ones pass it: "+reasonOf(why), "request", w.String(), "uid", w.by.UID)
	w.reason, w.pause = reasonOf(why), time.Now().Add(t)
	w.changed.Wake()
	s.wakeAfter(t)
}

// reasonOf returns why devices cannot be had, for people: if a plugin refused them, in its words alone, without the
// calls by which they came.
func reasonOf(err error) string {
	if refused, ok := errors.AsType[*endpoint.PluginError](err); ok {
		err = refused
	}
	return wording.Shorten(printable(wording.OneLine(err)), maxReason)
}

// describe returns what people see of a request. The caller holds s.mu.
func (s *Service) describe(w *waiter) Waiting {
	return Waiting{
		Request: w.String(), UID: w.by.UID, User: w.user, PID: w.by.PID, Command: w.lease.Command, Since: w.since,
		Position: slices.Index(s.queue, w) + 1, Reason: w.reason,
	}
}

// held returns the IDs of the devices of a lease.
func held(p model.Placement) []string {
	var ids []string
	for _, d := range heldBy(p) {
		ids = append(ids, d.id)
	}
	return ids
}

// heldBy returns the devices of a lease or a pod.
func heldBy(p model.Placement) []deviceKey {
	var list []deviceKey
	for _, a := range p.Allocations {
		for _, id := range a.IDs {
			list = append(list, deviceKey{a.Resource, id})
		}
	}
	return list
}
