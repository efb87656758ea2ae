package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"gpu-cdi-plugin/gpu"
)

// Runner prepares devices. Its methods may be called by several goroutines at once.
type Runner struct {
	opts Options
	// driver is a read-write lock for which one can wait with a context. A call of the driver takes 1; a reset, or the
	// release of the driver, takes all. So resets run one at a time, and not during a call.
	driver *semaphore.Weighted

	mu sync.Mutex
	// closed is nil while the driver is open. keepOpen says that the driver must stay open until the program ends.
	closed   *closing
	keepOpen bool
	// running has the preparation of each device that is being prepared, by UUID.
	running map[string]*running
	// unusedResets has the times of resets after which no container got the GPU, by UUID.
	unusedResets map[string]time.Time
}

// closing is a time during which the driver is closed.
type closing struct {
	why    string // such as "it is released"
	since  time.Time
	opened chan struct{} // closed when the driver is open again
}

// running is a preparation of a device.
type running struct {
	ended chan struct{} // closed at its end
	hung  chan struct{} // closed when its reset counts as hung
	err   error         // names the hung reset; set before hung is closed
}

const (
	defaultAwaitUnused = 5 * time.Second
	// wholeDriver is more than the number of concurrent calls of the driver.
	wholeDriver = 1 << 30
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

// WithoutDriver closes the driver while work runs. It waits for calls of the driver and for resets, and blocks new
// ones. Ctx limits the wait and the closing of the driver. Work reports whether to open the driver again; if not, no
// device can be prepared any more. If the driver cannot be closed, work is not run. The text `why` is for errors of
// preparations that wait meanwhile, such as "it is released".
func (r *Runner) WithoutDriver(ctx context.Context, why string, work func() (reopen bool)) error {
	if err := r.hold(ctx, wholeDriver); err != nil {
		return err
	}
	defer r.driver.Release(wholeDriver)
	return r.whileClosed(ctx, why, work)
}

// whileClosed does what WithoutDriver does, for a caller that holds the whole driver.
func (r *Runner) whileClosed(ctx context.Context, why string, work func() (reopen bool)) error {
	if err := r.setClosed(why); err != nil {
		return err
	}
	defer r.setOpen()
	err := r.opts.Driver.Release(ctx)
	if err == nil && !work() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reopenLimit)
	defer cancel()
	return errors.Join(err, r.opts.Driver.Reopen(ctx))
}

func (r *Runner) setClosed(why string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.keepOpen {
		return errors.New("the driver cannot be closed now, since this program is restarting")
	}
	r.closed = &closing{why: why, since: time.Now(), opened: make(chan struct{})}
	return nil
}

func (r *Runner) setOpen() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.closed.opened)
	r.closed = nil
}

// Closed returns a channel that is closed when the driver is open again, or nil if it is open.
func (r *Runner) Closed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed == nil {
		return nil
	}
	return r.closed.opened
}

// KeepOpen keeps the driver open from now on, since the program is about to restart: the new process would open the
// driver during a reset. If the driver is closed, KeepOpen only returns a channel that is closed when it is open again.
func (r *Runner) KeepOpen() (opened <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed != nil {
		return r.closed.opened
	}
	r.keepOpen = true
	return nil
}

// withDriver calls the driver, after waiting while it is closed.
func (r *Runner) withDriver(ctx context.Context, call func() error) error {
	if err := r.hold(ctx, 1); err != nil {
		return err
	}
	defer r.driver.Release(1)
	return call()
}

func (r *Runner) hold(ctx context.Context, weight int64) error {
	if r.driver.Acquire(ctx, weight) != nil {
		return fmt.Errorf("wait for the driver (%s): %w", r.whyNotFree(), context.Cause(ctx))
	}
	return nil
}

// whyNotFree returns why one must wait for the driver.
func (r *Runner) whyNotFree() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed == nil {
		return "other devices are being prepared"
	}
	return r.closed.why + ", since " + timeText(r.closed.since)
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

// check runs the steps that change nothing.
func (x *target) check(ctx context.Context) error {
	return x.steps(ctx,
		step{"sharing", x.checkSharing},
		step{"health", x.checkHealth},
		step{"processes", x.checkProcesses},
		step{"memory", x.checkMemory},
	)
}

// clean restores the settings of the GPU and makes its reset possible.
func (x *target) clean(ctx context.Context) error {
	return x.steps(ctx,
		step{"settings", x.restoreSettings},
		step{"persistence", x.endPersistence},
		step{"reset", x.checkBeforeReset},
	)
}

// runProgram runs the administrator's program. Meanwhile no GPU is reset: the program may run nvidia-smi.
func (x *target) runProgram(ctx context.Context) error {
	if x.task.rules.Policy == None {
		return x.steps(ctx, step{"sharing", x.checkSharing}, step{"exec", x.exec})
	}
	return x.steps(ctx, step{"exec", x.exec})
}

// step is a named step of a preparation.
type step struct {
	name string
	do   stepFunc
}

// stepFunc runs a step and returns what it found or did.
type stepFunc = func(context.Context) (note string, err error)

// errNotDue means that the policy does not include the step, which is then not recorded.
var errNotDue = errors.New("not a step of the policy")

// skippedError means that a step is not run for a device.
type skippedError string

func (s skippedError) Error() string { return string(s) }

// unableError means that a step should be run and cannot be, although the device is given to the container.
type unableError struct{ skippedError }

func (e unableError) Unwrap() error { return e.skippedError }

func unable(format string, args ...any) error {
	return unableError{skippedError(fmt.Sprintf(format, args...))}
}

// steps runs steps and records them until one fails.
func (x *target) steps(ctx context.Context, steps ...step) error {
	for _, s := range steps {
		if err := x.step(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// step runs and records a step. It waits while the driver is closed. While the device is in use, it repeats the step
// for a time: an ended container may still be on the device.
func (x *target) step(ctx context.Context, s step) error {
	x.record.begin("wait")
	note, begun := "", false
	err := x.awaitUnused(ctx, func() error {
		return x.runner.withDriver(ctx, func() (err error) {
			if !begun {
				x.record.begin(s.name)
				begun = true
			}
			note, err = s.do(ctx)
			return err
		})
	})
	return x.record.add(note, x.unlessReset(err))
}

// unlessReset skips a step that the driver refuses until the GPU is reset, if this preparation resets it. That is
// safe: a process that the step would have found makes the reset fail.
func (x *target) unlessReset(err error) error {
	if !errors.Is(err, gpu.ErrResetRequired) || !x.willReset() || x.wasReset || x.task.checkOnly {
		return err
	}
	x.needsReset = cmp.Or(x.needsReset, err)
	return skippedError(err.Error())
}

// awaitUnused repeats a check for Options.AwaitUnused while it returns inUseError.
func (x *target) awaitUnused(ctx context.Context, check func() error) error {
	end := time.Now().Add(x.runner.opts.AwaitUnused)
	var inUse error
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		err := check()
		if inUse != nil && ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
			return inUse // inUse says more than the end of the time limit
		}
		if !InUse(err) || x.task.checkOnly || time.Now().Add(pause).After(end) || !sleep(ctx, pause) {
			return err
		}
		inUse = err
	}
}

// sleep reports whether the time has passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

func (x *target) restoreSettings(ctx context.Context) (string, error) {
	if why := x.whyNotAlone(); why != "" {
		return "", skippedError(why)
	}
	changed, err := x.runner.opts.Driver.RestoreDefaults(ctx, x.d.GPU, x.d.Exclusive)
	return strings.Join(changed, "; "), err
}

// whyNotAlone returns why the container would share the GPU with others, or "".
func (x *target) whyNotAlone() string {
	switch {
	case !x.d.whole():
		return "the device is a part of a GPU"
	case x.shared != "":
		return "the device is shared: " + x.shared
	}
	return ""
}
