package prepare

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/internal/host"
)

// DriverReset resets GPUs by the driver's own nvidia-smi or, where the driver has none, by the kernel's reset of PCI
// devices.
//
// Each nvidia-smi has all GPUs open and so keeps others from a reset. Therefore one runs at a time, for all GPUs that
// wait for a reset then. It is not ended with its requests, since that could leave a GPU between two steps of a reset.
type DriverReset struct {
	Host host.Host
	// Find returns nvidia-smi, or false if the driver has none.
	Find func() (Program, bool)
	// Check refuses programs that others than root could change. Nil is trust.RootFile.
	Check func(path string) error
	// LockDir is a directory for the locks of GPUs that nvidia-smi resets; see [DriverReset.StillResetting]. Empty
	// means none.
	LockDir string

	longest time.Duration // how long nvidia-smi may run; 0 is longestReset

	mu      sync.Mutex
	next    *batch     // GPUs that wait for nvidia-smi; nil if none does
	smi     sync.Mutex // held while nvidia-smi runs
	running string     // the PCI addresses of the GPUs that it resets; empty if it does not run
	overdue time.Time  // when all requests for these resets have been abandoned
}

var _ Resetter = (*DriverReset)(nil)

// batch are GPUs that are reset by one nvidia-smi.
type batch struct {
	requests []*request
	done     chan struct{}
}

// request is the reset of one GPU. Outcome and err are set when it is done.
type request struct {
	ctx     context.Context
	d       *Device
	outcome Outcome
	err     error
}

// Ready implements Resetter. No GPU is reset while an nvidia-smi runs that was abandoned, or that an earlier run of
// this program started.
func (r *DriverReset) Ready() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ready()
}

func (r *DriverReset) ready() error {
	if r.running != "" && time.Now().After(r.overdue) {
		return errStillResetting(r.running)
	}
	uuids, err := r.stillResetting()
	if len(uuids) > 0 {
		err = errStillResetting(strings.Join(uuids, ", "))
	}
	return err
}

func errStillResetting(gpus string) error {
	return fmt.Errorf("nvidia-smi still resets %s: if it does not end, the node may need a reboot", gpus)
}

// Reset resets a GPU.
func (r *DriverReset) Reset(ctx context.Context, d Device) (Outcome, error) {
	if _, ok := parseAddress(d.PCIBusID); !ok {
		return ResetFailed, fmt.Errorf("the GPU has the PCI address %q, which is none", d.PCIBusID)
	}
	one := &request{ctx: ctx, d: &d}
	done, err := r.start(one) //nolint:contextcheck // nvidia-smi runs until the last of several requests ends
	if err != nil {
		return ResetFailed, err
	}
	select {
	case <-done:
		return one.outcome, one.err
	case <-ctx.Done():
	}
	if err := r.withdraw(one); err != nil {
		return ResetFailed, fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	wait := 2 * gather // nvidia-smi is not run for a request that has ended
	if deadline, ok := ctx.Deadline(); ok {
		wait = max(wait, time.Until(deadline)) // a reset that began is waited for, also if ctx is canceled
	}
	select {
	case <-done:
		return one.outcome, one.err
	case <-time.After(wait):
		return ResetFailed, &AbandonedError{
			Wait: func() (Outcome, error) { <-done; return one.outcome, one.err },
			Err:  context.Cause(ctx),
		}
	}
}

// longestReset is how long nvidia-smi may run before it is killed. A reset takes seconds, up to a minute with all GPUs
// of a large machine. One that hangs keeps all GPUs from being reset.
const longestReset = 5 * time.Minute

// start starts a reset and returns what is closed when it is done.
func (r *DriverReset) start(one *request) (chan struct{}, error) {
	program, ok := r.Find()
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.ready(); err != nil {
		return nil, err
	}
	if !ok {
		done := make(chan struct{})
		go func() {
			one.outcome, one.err = r.byPCI(one.ctx, one.d)
			close(done)
		}()
		return done, nil
	}
	if r.next == nil {
		r.next = &batch{done: make(chan struct{})}
		go r.runBatch(r.next, program)
	}
	r.next.requests = append(r.next.requests, one)
	return r.next.done, nil
}

// withdraw removes a request that waits until another nvidia-smi has ended, and returns the error for it. It returns
// nil for a request whose own nvidia-smi runs or is about to.
func (r *DriverReset) withdraw(one *request) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next == nil || !slices.Contains(r.next.requests, one) || r.running == "" {
		return nil
	}
	r.next.requests = slices.DeleteFunc(r.next.requests, func(other *request) bool { return other == one })
	return errStillResetting(r.running)
}

// runBatch resets the GPUs of a batch, as soon as it is its turn.
func (r *DriverReset) runBatch(b *batch, smi Program) {
	r.smi.Lock()
	defer r.smi.Unlock()
	time.Sleep(gather)
	r.mu.Lock()
	r.next = nil
	r.mu.Unlock()
	defer close(b.done)
	var wanted []*request
	for _, one := range b.requests {
		one.outcome, one.err = ResetFailed, context.Cause(one.ctx)
		if one.err == nil {
			wanted = append(wanted, one)
		}
	}
	if len(wanted) > 0 {
		r.callSMI(wanted, smi)
	}
}

// callSMI runs nvidia-smi for requests, also after they have been abandoned.
func (r *DriverReset) callSMI(requests []*request, smi Program) {
	var addresses []string
	var last time.Time
	for _, one := range requests {
		addresses = append(addresses, one.d.PCIBusID)
		if deadline, ok := one.ctx.Deadline(); ok && deadline.After(last) {
			last = deadline
		}
	}
	smi.Timeout = cmp.Or(r.longest, longestReset)
	if last.IsZero() {
		last = time.Now().Add(smi.Timeout)
	}
	r.setRunning(strings.Join(addresses, ", "), last)
	defer r.setRunning("", time.Time{})
	var output string
	var status int
	locks, err := r.lock(requests)
	if err == nil {
		smi.Args = append([]string{"--gpu-reset", "-i", strings.Join(addresses, ",")}, smi.Args...)
		smi.inherits = locks
		output, status, err = smi.run(context.Background(), r.Check)
	}
	unlock(locks)
	for _, one := range requests {
		if err != nil {
			one.err = fmt.Errorf("run %s: %w%s", smi.Path, err, quoted(output))
		} else {
			one.outcome, one.err = parseReset(output, status, one.d.PCIBusID)
		}
	}
}

// setRunning sets the GPUs that nvidia-smi resets now, and when it is overdue.
func (r *DriverReset) setRunning(running string, overdue time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running, r.overdue = running, overdue
}
