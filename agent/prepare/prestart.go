// Package prepare prepares a device for the container that is about to get it: it checks that the device is healthy
// and that nothing uses it and, by policy, puts its settings back and resets the GPU. A device that does not pass is
// not given to the container. [FreedChecker] checks a device after its last container.
//
// The package knows no door and calls the driver only through [Options].Driver. Outside the host's PID namespace the
// driver shows no processes of others: then the policies above Check judge a device's use by its memory alone, and
// Check skips the memory too.
package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// Policy is what is done with a device before a container gets it.
type Policy string

// The policies.
const (
	None  Policy = "none"
	Check Policy = "check" // the device is healthy and unused
	Clean Policy = "clean" // its settings are at their defaults
	Reset Policy = "reset" // it was reset
)

// Policies lists the policies. Each does what those before it do.
func Policies() []Policy { return []Policy{None, Check, Clean, Reset} }

// includes reports whether the policy does what another does.
func (p Policy) includes(other Policy) bool {
	return slices.Index(Policies(), p) >= slices.Index(Policies(), other)
}

// DefaultMemoryTolerance is the memory, in bytes, that may be used on a device without processes. NVML's "used" leaves
// out what the driver reserves; drivers report some MiB on an idle GPU and tens of MiB with a console on it. The
// context of a process takes more, and is found by the process besides.
const DefaultMemoryTolerance = 256 << 20

// Rules are what a resource's devices are prepared by.
type Rules struct {
	Policy Policy
	// Strict refuses a device that policy Reset cannot reset. Without it, such a device is cleaned.
	Strict bool
	// Programs may use the device by the names of their executables; see [DefaultPrograms]. Only processes of the host
	// and privileged ones are excused by their name.
	Programs []string
	// MemoryTolerance is the memory in bytes that may be in use; see [DefaultMemoryTolerance].
	MemoryTolerance uint64
	// Exec is an administrator's program that runs last, also with the policy None. An empty Path is none. Its failure
	// refuses the device. Its environment has GPU_DEVICE_UUID, GPU_UUID, GPU_PCI_BUS_ID, GPU_POLICY and GPU_SHARED.
	// GPU_SHARED has the reason why others may use the device too, and is empty if they may not.
	Exec Program
}

// Device is a device that a container is about to get.
type Device struct {
	// UUID is the device's, and GPU that of the GPU that it is on, or its own.
	UUID, GPU string
	// PCIBusID is the GPU's address, such as "0000:17:00.0".
	PCIBusID string
	// Nodes are the paths of the GPU's device nodes on the host, or none if they are unknown. A GPU of which a process
	// has one open is not reset.
	Nodes []string
	// SharesMemory is whether a MIG device has its memory together with others: they have the same GPU instance.
	SharesMemory bool
	// Exclusive is whether the GPU's compute mode is to be EXCLUSIVE_PROCESS, as MPS needs.
	Exclusive bool
	// Others returns the other containers that have the GPU already, or "". State.Shared knows only what is offered
	// now; a container can have the GPU as a replica or under another resource name from before a reload, or from
	// another device plugin. It is called before a whole GPU is changed, and must return soon. It may be nil.
	Others func() (reason string, err error)
}

// whole reports whether the device is all of its GPU.
func (d *Device) whole() bool { return d.UUID == d.GPU }

// Driver is what the driver is asked for. UUIDs name devices. nvml.Session implements it.
type Driver interface {
	// Use returns what uses a device. Errors of this method and the next two may wrap gpu.ErrResetRequired.
	Use(ctx context.Context, uuid string) (gpu.Use, error)
	// RestoreDefaults puts the settings of a GPU back and returns what was not at its default.
	RestoreDefaults(ctx context.Context, uuid string, exclusive bool) ([]string, error)
	// SetPersistence sets the persistence mode of a GPU and returns whether that changed it.
	SetPersistence(ctx context.Context, uuid string, on bool) (bool, error)
	// Release closes the driver, so that this process does not keep a GPU from its reset. No method of Driver or State
	// is called by this package until Reopen, and the driver must stay closed until then whoever else uses it.
	Release(ctx context.Context) error
	// Reopen ends Release.
	Reopen(ctx context.Context) error
}

// State is what the node knows about its devices.
type State interface {
	// Healthy probes a device and returns why a container must not have it, or nil. The error is a *[NeedsResetError] if
	// a reset of the GPU may end that.
	Healthy(ctx context.Context, uuid string) error
	// Shared returns why other containers may use the same device, such as "it has 4 replicas", or "". It says nothing
	// of the other MIG devices of a GPU.
	Shared(ctx context.Context, uuid string) (reason string, err error)
	// WasReset is called after a GPU was reset, before it is probed again.
	WasReset(uuid string)
	// CannotReset returns what SetCannotReset was called with, until the driver changes or the GPU is reset, or "".
	CannotReset(uuid string) string
	// SetCannotReset is called after a reset of a GPU was refused for a reason that lasts.
	SetCannotReset(uuid, reason string)
}

// NeedsResetError reports why a device is not healthy that a reset of its GPU may heal.
type NeedsResetError struct{ Err error }

// Error is why.
func (e *NeedsResetError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *NeedsResetError) Unwrap() error { return e.Err }

// Options are what a Runner works with. All but Resetter are needed.
type Options struct {
	Host   host.Host
	Driver Driver
	State  State
	// Resetter resets GPUs. Without it no GPU can be reset.
	Resetter Resetter
	// Check refuses programs that others than root could change. Nil is trust.RootFile.
	Check func(path string) error
	// AwaitUnused is how long processes and memory of a container that has just ended may stay on its device; 0 is 5 s.
	AwaitUnused time.Duration
	// Log gets warnings that are not about a container.
	Log *slog.Logger
}

const defaultAwaitUnused = 5 * time.Second

// Runner prepares devices. Its methods may be called by several goroutines at once.
type Runner struct {
	opts Options
	gate gate

	mu sync.Mutex
	// running has the devices that are being prepared, by UUID. A channel is closed at the end.
	running map[string]chan struct{}
	// unusedResets has when GPUs were reset that no container has had since, by UUID.
	unusedResets map[string]time.Time
}

// New returns a Runner.
func New(opts Options) *Runner {
	if opts.AwaitUnused == 0 {
		opts.AwaitUnused = defaultAwaitUnused
	}
	return &Runner{opts: opts, running: map[string]chan struct{}{}, unusedResets: map[string]time.Time{}}
}

// Run prepares a device, which may be done any number of times. It returns when ctx ends whatever the driver does, and
// ctx should have a deadline; then steps and resets that have not ended go on, and until they have, the device is
// refused. An error is an *[Error]: the device must not be given to the container.
func (r *Runner) Run(ctx context.Context, d Device, rules Rules) (Record, error) {
	x := &run{Runner: r, d: d, rules: rules, excused: map[int]bool{}}
	x.healthy = func(ctx context.Context) error { return r.opts.State.Healthy(ctx, d.UUID) }
	return r.perform(ctx, x, x.steps)
}

// perform runs steps on a device and records them. No other steps run on it until they and its reset have ended, also
// after perform has returned.
func (r *Runner) perform(ctx context.Context, x *run, steps func(context.Context) error) (Record, error) {
	x.record = Record{UUID: x.d.UUID, Policy: x.rules.Policy, Time: time.Now(), Steps: []Step{}}
	x.begin("wait")
	if err := r.lock(ctx, &x.d); err != nil {
		return x.end(fmt.Errorf("an earlier preparation or reset of it has not ended: %w", err))
	}
	ended := make(chan error, 1)
	go func() {
		err := steps(ctx)
		if x.resetting == nil {
			if err == nil && !x.checkOnly { // a container gets the device, at least if it is not too late
				x.setUnusedReset(time.Time{})
			}
			r.unlock(x.d.UUID)
			ended <- err
			return
		}
		ended <- err
		x.awaitAbandoned()
		x.restorePersistence(ctx)
		r.unlock(x.d.UUID)
	}()
	select {
	case err := <-ended:
		return x.end(err)
	case <-ctx.Done():
	}
	select { // a step that heeds ctx has the better error
	case err := <-ended:
		return x.end(err)
	case <-time.After(abandonAfter):
		return x.end(fmt.Errorf("it has not returned in time: %w", context.Cause(ctx)))
	}
}

// abandonAfter is how long Run waits for a step to return after ctx has ended.
const abandonAfter = 200 * time.Millisecond

// lock marks the device as being prepared, in memory. Before that it waits until no other run prepares the device or,
// for a MIG device, its GPU. (The lock files of resets are in resetlock.go.)
func (r *Runner) lock(ctx context.Context, d *Device) error {
	for {
		r.mu.Lock()
		other := cmp.Or(r.running[d.UUID], r.running[d.GPU])
		if other == nil {
			r.running[d.UUID] = make(chan struct{})
			r.mu.Unlock()
			return nil
		}
		r.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (r *Runner) unlock(uuid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.running[uuid])
	delete(r.running, uuid)
}

// Wait waits until no device is being prepared, also for steps that go on after Run has returned, or until ctx ends. A
// program that ends during a reset would leave the persistence mode of the GPU off.
func (r *Runner) Wait(ctx context.Context) {
	for {
		var one chan struct{}
		r.mu.Lock()
		for _, one = range r.running {
			break
		}
		r.mu.Unlock()
		if one == nil {
			return
		}
		select {
		case <-one:
		case <-ctx.Done():
			return
		}
	}
}

// run is the preparation of one device.
type run struct {
	*Runner
	recorder
	d     Device
	rules Rules
	// healthy probes the device after a reset.
	healthy func(context.Context) error
	// manual is whether an administrator asked for the reset: what was tried before does not keep it from being tried.
	manual bool
	// checkOnly is whether no container waits for the device: what uses it is returned at once, and nothing is changed.
	checkOnly bool
	// shared is why other containers may use the device, and others are those that have its GPU already, or empty.
	shared, others string
	// excused has the PIDs of the processes that may be on the device.
	excused map[int]bool
	// needsReset is what only a reset can mend, or nil.
	needsReset error
	wasReset   bool
	// persistent is whether persistence mode was switched off and is to be on again.
	persistent bool
	// resetting waits for the reset that was abandoned. It is nil if none was.
	resetting func() (Outcome, error)
}

// steps runs all steps and stops at the first that fails.
func (x *run) steps(ctx context.Context) error {
	if !slices.Contains(Policies(), x.rules.Policy) {
		return fmt.Errorf("there is no policy %q", x.rules.Policy)
	}
	if !x.rules.Policy.includes(Check) {
		if x.rules.Exec.Path == "" {
			return nil
		}
		return x.withDriver(ctx, step{"sharing", x.checkSharing}, step{"exec", x.exec})
	}
	// All steps run in one call of gate.use: no reset of another GPU can begin between them. Otherwise the GPUs of a
	// pod would each wait for the resets of all others.
	err := x.withDriver(ctx,
		step{"sharing", x.checkSharing},
		step{"health", x.checkHealth},
		step{"processes", x.checkProcesses},
		step{"memory", x.checkMemory},
		step{"settings", x.restoreSettings},
		step{"persistence", x.endPersistence},
		step{"reset", x.checkBeforeReset},
	)
	if err == nil {
		err = x.step(ctx, "reset", x.reset)
	}
	x.restorePersistence(ctx)
	if err == nil && x.wasReset {
		err = x.withDriver(ctx, step{"memory", x.checkMemory})
	}
	if err == nil && x.rules.Exec.Path != "" { // nvidia-smi in it, say, would open a GPU that is being reset
		err = x.withDriver(ctx, step{"exec", x.exec})
	}
	return err
}

// withDriver runs steps that use the driver, and stops at the first that fails. Before that it waits for resets.
func (x *run) withDriver(ctx context.Context, steps ...step) error {
	x.begin("wait")
	return x.gate.use(ctx, func() error {
		for _, s := range steps {
			if err := x.step(ctx, s.name, x.unlessReset(s.do)); err != nil {
				return err
			}
		}
		return nil
	})
}

// unlessReset skips a step that the driver refuses until the GPU is reset, if this run resets it. That is safe: a
// process that the step would have found makes the reset fail.
func (x *run) unlessReset(do stepFunc) stepFunc {
	return func(ctx context.Context) (string, error) {
		note, err := do(ctx)
		if errors.Is(err, gpu.ErrResetRequired) && x.resetDue() && !x.wasReset && !x.checkOnly {
			x.needsReset = cmp.Or(x.needsReset, err)
			err = skippedError(err.Error())
		}
		return note, err
	}
}

// step is a step by its name in the record.
type step struct {
	name string
	do   stepFunc
}

// stepFunc does a step and returns what it found or did.
type stepFunc = func(context.Context) (note string, err error)

// errNotDue is returned by a step that the policy does not have; nothing is recorded.
var errNotDue = errors.New("not a step of the policy")

// skippedError is the result of a step that cannot be done for a device.
type skippedError string

// Error is why.
func (s skippedError) Error() string { return string(s) }

func (x *run) restoreSettings(ctx context.Context) (string, error) {
	if !x.rules.Policy.includes(Clean) {
		return "", errNotDue
	}
	if why := x.whyNotAlone(); why != "" {
		return "", skippedError(why)
	}
	changed, err := x.opts.Driver.RestoreDefaults(ctx, x.d.GPU, x.d.Exclusive)
	return strings.Join(changed, "; "), err
}

// whyNotAlone returns why the whole GPU is not this container's alone, or "".
func (x *run) whyNotAlone() string {
	switch {
	case !x.d.whole():
		return "the device is a part of a GPU"
	case x.shared != "" || x.others != "":
		return "the device is shared: " + cmp.Or(x.shared, x.others)
	}
	return ""
}
