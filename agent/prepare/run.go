package prepare

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
)

// Runner prepares devices. Its methods may be called by several goroutines at once.
type Runner struct {
	opts Options
	// driver is a read-write lock for which one can wait with a context. A call of the driver takes 1; a reset, or the
	// release of the driver, takes all. So resets run one at a time, and not during a call.
	driver *semaphore.Weighted

	mu sync.Mutex
	// closed is nil while the driver is open. keepOpen says that the driver must stay open.
	closed   *closing
	keepOpen bool
	// running has the preparation of each device that is being prepared, by UUID.
	running map[string]*running
	// unusedResets has the times of resets after which no container got the GPU, by UUID.
	unusedResets map[string]time.Time
}

// running is a preparation of a device.
type running struct {
	ended chan struct{} // closed at its end
	hung  chan struct{} // closed when its reset counts as hung
	err   error         // names the hung reset; set before hung is closed
}

const (
	defaultAwaitUnused = 5 * time.Second
	// abandonAfter is how long a step may take to return after ctx has ended.
	abandonAfter = 200 * time.Millisecond
)

// New returns a Runner.
func New(opts Options) *Runner {
	opts.AwaitUnused = cmp.Or(opts.AwaitUnused, defaultAwaitUnused)
	return &Runner{
		opts: opts, driver: semaphore.NewWeighted(wholeDriver),
		running: map[string]*running{}, unusedResets: map[string]time.Time{},
	}
}

// Run prepares the devices of a container. It may be repeated. First all devices are checked, then their settings are
// restored, then their GPUs are reset together. A phase begins only if all devices have passed the previous one, and
// the container may get its devices only if all have passed the last.
//
// Run returns when ctx ends, which should have a deadline. A step or reset that has not returned by then is abandoned:
// its device is refused until the step or reset returns.
//
// The records are those of the devices that failed or passed all phases. The error names each failed device and its
// step.
func (r *Runner) Run(ctx context.Context, devices []Device, rules Rules) ([]Record, error) {
	p := r.newPreparation(ctx, devices, task{rules: rules, healthy: r.opts.State.Healthy})
	passed := p.run(ctx)
	if passed { // the container gets the devices
		for _, x := range p.targets {
			x.setUnusedReset(time.Time{})
		}
	}
	return p.finish(ctx, passed)
}

// Wait waits until no device is being prepared, including steps that continue after Run has returned, or until ctx
// ends. A program that ended during a reset would leave the persistence mode of the GPU off. Hung resets are not waited
// for: they go on without this process, and the next one finds them (DriverReset.StillResetting).
func (r *Runner) Wait(ctx context.Context) {
	for one := r.anyRunning(); one != nil; one = r.anyRunning() {
		select {
		case <-one.ended:
		case <-one.hung:
		case <-ctx.Done():
			return
		}
	}
}

// anyRunning returns one of the preparations whose reset is not hung, or nil.
func (r *Runner) anyRunning() *running {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.running {
		if one.err == nil {
			return one
		}
	}
	return nil
}

// task says what devices are prepared for.
type task struct {
	rules Rules
	// healthy probes a device after a reset, given by its UUID.
	healthy func(ctx context.Context, uuid string) error
	// manual says that an administrator requested the reset: earlier failures do not prevent another attempt.
	manual bool
	// checkOnly says that no container waits for the device: the check returns what uses it at once, and changes
	// nothing.
	checkOnly bool
}

// preparation prepares the devices of one container, or runs the same steps for another purpose.
type preparation struct {
	runner  *Runner
	task    task
	targets []*target
}

// target is a device that is being prepared.
type target struct {
	runner *Runner
	task   task
	record *recorder
	d      Device
	// late is closed shortly after ctx has ended, when steps that obey ctx have returned.
	late <-chan struct{}
	// shared says why other containers may use the device too, or is empty.
	shared string
	// excused has the PIDs of processes that may use the device, since they are known programs or a desktop.
	excused map[int]bool
	// needsReset is the fault that only a reset can heal, or nil.
	needsReset error
	// resetDue says that the GPU must be reset, and wasReset that it was.
	resetDue, wasReset bool
	resetNote          string
	// persistent says that persistence mode was switched off and must be restored.
	persistent bool
	// hungReset is nil unless the reset was abandoned and has not ended.
	hungReset *AbandonedError

	locked bool
	// result is set by the work on the device, and err by preparation.await: why the device failed, or nil.
	result, err error
	// abandoned is closed when the abandoned work returns; nil without abandoned work. Until then only the work may
	// use the fields above.
	abandoned <-chan struct{}
}

func (r *Runner) newPreparation(ctx context.Context, devices []Device, t task) *preparation {
	late := make(chan struct{})
	context.AfterFunc(ctx, func() { time.AfterFunc(abandonAfter, func() { close(late) }) })
	p := &preparation{runner: r, task: t}
	for _, d := range devices {
		p.targets = append(p.targets, &target{
			runner: r, task: t, late: late, record: newRecorder(d.UUID, t.rules.Policy), d: d, excused: map[int]bool{},
		})
	}
	return p
}

// run runs all phases and reports whether all devices have passed.
func (p *preparation) run(ctx context.Context) bool {
	policy, exec := p.task.rules.Policy, p.task.rules.Exec.Path != ""
	if !p.lock(ctx) {
		return false
	}
	if policy.Includes(Check) && !p.each(ctx, (*target).check) {
		return false
	}
	if policy.Includes(Clean) && !p.each(ctx, (*target).clean) {
		return false
	}
	if policy.Includes(Reset) && !p.reset(ctx) {
		return false
	}
	return !exec || p.each(ctx, (*target).runProgram)
}

// lock marks the devices as being prepared. It waits until no other preparation has one of them or, for a MIG device,
// its GPU. (resetlock.go has the lock files of resets.)
func (p *preparation) lock(ctx context.Context) bool {
	for {
		other := p.tryLock()
		if other == nil {
			return true
		}
		select {
		case <-other.ended:
			continue
		case <-other.hung:
		case <-ctx.Done():
		}
		p.refuseLocked(ctx)
		if !p.passed() {
			return false
		}
	}
}

// refuseLocked sets the errors of the devices whose reset is hung, and once ctx has ended, of all devices that others
// have locked.
func (p *preparation) refuseLocked(ctx context.Context) {
	p.runner.mu.Lock()
	defer p.runner.mu.Unlock()
	for _, x := range p.targets {
		switch other := x.otherRun(); {
		case other == nil:
		case other.err != nil:
			x.err = other.err
		case ctx.Err() != nil:
			x.err = fmt.Errorf("an earlier preparation of the device has not ended: %w", context.Cause(ctx))
		}
	}
}

// tryLock locks all devices or none. If none, it returns one of the other preparations.
func (p *preparation) tryLock() *running {
	p.runner.mu.Lock()
	defer p.runner.mu.Unlock()
	for _, x := range p.targets {
		if other := x.otherRun(); other != nil {
			return other
		}
	}
	for _, x := range p.targets {
		p.runner.running[x.d.UUID] = &running{ended: make(chan struct{}), hung: make(chan struct{})}
		x.locked = true
	}
	return nil
}

func (x *target) otherRun() *running {
	return cmp.Or(x.runner.running[x.d.UUID], x.runner.running[x.d.GPU])
}

// unlock ends the preparation of the device once the work on it has returned and its reset has ended.
func (x *target) unlock(ctx context.Context) {
	if x.abandoned == nil && x.hungReset == nil && !x.persistent {
		x.endRun()
		return
	}
	go func() {
		if x.abandoned != nil {
			<-x.abandoned
		}
		hung := x.hungReset != nil
		x.awaitReset(ctx)
		x.restorePersistence(ctx)
		x.endRun()
		if hung { // not earlier, since a container that gets the GPU now would be refused
			x.runner.opts.State.EndHold(x.d.GPU)
		}
	}()
}

func (x *target) endRun() {
	x.runner.mu.Lock()
	defer x.runner.mu.Unlock()
	close(x.runner.running[x.d.UUID].ended)
	delete(x.runner.running, x.d.UUID)
}

// each runs steps on all devices concurrently, and reports whether all have passed.
func (p *preparation) each(ctx context.Context, steps func(*target, context.Context) error) bool {
	var ended []<-chan struct{}
	for _, x := range p.targets {
		ended = append(ended, inBackground(func() { x.result = steps(x, ctx) }))
	}
	for i, x := range p.targets {
		x.await(ctx, ended[i])
	}
	return p.passed()
}

func inBackground(work func()) <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		work()
	}()
	return ended
}

// await waits for work on the device and takes its result. It abandons work that takes too long.
func (x *target) await(ctx context.Context, ended <-chan struct{}) {
	select {
	case <-ended:
		x.err = x.result
	case <-x.late:
		x.err = fmt.Errorf("the step has not returned in time: %w", context.Cause(ctx))
		x.abandoned = ended
	}
}

func (p *preparation) passed() bool {
	for _, x := range p.targets {
		if x.err != nil {
			return false
		}
	}
	return true
}

// finish unlocks the devices and returns the records.
func (p *preparation) finish(ctx context.Context, passed bool) ([]Record, error) {
	var records []Record
	var failed refusal
	for _, x := range p.targets {
		if x.err != nil || passed {
			record, err := x.record.end(x.err)
			records = append(records, record)
			if err != nil {
				failed = append(failed, err)
			}
		}
		if x.locked {
			x.unlock(ctx)
		}
	}
	if len(failed) > 0 {
		return records, failed
	}
	return records, nil
}
