package prepare

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/internal/host"
)

// DriverReset resets GPUs with the driver's nvidia-smi or, if the driver has none, through the kernel's reset of PCI
// devices.
//
// An nvidia-smi has all GPUs open while it runs, and so prevents other resets. So only one runs at a time, for all
// GPUs of a container. When the request ends, nvidia-smi continues: killing it could leave a GPU between two steps of
// a reset.
type DriverReset struct {
	Host host.Host
	// Find returns nvidia-smi, or false if the driver has none.
	Find func() (Program, bool)
	// Check returns an error if users other than root could change a program. Nil means trust.RootFile.
	Check func(path string) error
	// LockDir is a directory for the locks of GPUs that nvidia-smi is resetting; see [DriverReset.StillResetting]. If
	// it is empty, there are no locks.
	LockDir string

	mu        sync.Mutex
	running   string    // names the GPUs that are being reset, or empty
	since     time.Time // when their reset began
	abandoned bool      // whether the running reset was abandoned
}

var _ Resetter = (*DriverReset)(nil)

// Ready implements Resetter. While an abandoned reset or a reset of an earlier run continues, no GPU can be reset.
func (r *DriverReset) Ready() error {
	uuids, err := r.StillResetting()
	if err != nil {
		return err
	}
	if len(uuids) > 0 {
		return errStillResetting(strings.Join(uuids, ", "))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.abandoned {
		return errStillResetting(r.running + ", since " + timeText(r.since))
	}
	return nil
}

func errStillResetting(gpus string) error {
	return fmt.Errorf("nvidia-smi still resets %s: if it does not end, the node may need a reboot", gpus)
}

// Reset implements Resetter.
func (r *DriverReset) Reset(ctx context.Context, gpus []Device) []ResetResult {
	results := make([]ResetResult, len(gpus))
	if err := r.begin(ctx, gpus); err != nil {
		for i := range results {
			results[i].Err = err
		}
		return results
	}
	ended := make(chan struct{})
	var reset []ResetResult
	go func() { //nolint:contextcheck // a running reset does not end with its request
		defer close(ended)
		defer r.setRunning("")
		reset = r.reset(gpus)
	}()
	var overdue <-chan time.Time // never ready if ctx has no deadline
	if deadline, ok := ctx.Deadline(); ok {
		overdue = time.After(time.Until(deadline))
	}
	select {
	case <-ended:
		return reset
	case <-overdue:
	}
	since := r.setAbandoned()
	for i := range results {
		wait := func(ctx context.Context) ResetResult {
			select {
			case <-ended:
				return reset[i]
			case <-ctx.Done():
				return results[i]
			}
		}
		results[i].Err = &AbandonedError{Wait: wait, Since: since}
	}
	return results
}

// begin records that GPUs are being reset. If another reset prevents that, it returns an error.
func (r *DriverReset) begin(ctx context.Context, gpus []Device) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	for _, d := range gpus {
		if _, ok := parseAddress(d.PCIBusID); !ok {
			return fmt.Errorf("the GPU's PCI address %q is invalid", d.PCIBusID)
		}
	}
	if err := r.Ready(); err != nil {
		return err
	}
	r.setRunning(names(gpus))
	return nil
}

func addresses(gpus []Device) string {
	var list []string
	for _, d := range gpus {
		list = append(list, d.PCIBusID)
	}
	return strings.Join(list, ",")
}

func (r *DriverReset) setRunning(running string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running, r.since, r.abandoned = running, time.Now(), false
}

// setAbandoned returns when the reset began.
func (r *DriverReset) setAbandoned() (since time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.abandoned = r.running != ""
	return r.since
}

func (r *DriverReset) reset(gpus []Device) []ResetResult {
	smi, ok := r.Find()
	if ok {
		return r.bySMI(gpus, smi)
	}
	results := make([]ResetResult, len(gpus))
	var all sync.WaitGroup
	for i := range gpus {
		all.Go(func() { results[i].Outcome, results[i].Err = r.byPCI(&gpus[i]) })
	}
	all.Wait()
	return results
}

// longestReset is how long nvidia-smi may run before it is killed. A reset takes seconds, or up to a minute with all
// GPUs of a large machine. An nvidia-smi that hangs prevents resets of all GPUs.
const longestReset = 5 * time.Minute

func (r *DriverReset) bySMI(gpus []Device, smi Program) []ResetResult {
	output, status, err := r.runSMI(gpus, smi)
	results := make([]ResetResult, len(gpus))
	for i, d := range gpus {
		if err != nil {
			results[i].Err = fmt.Errorf("run %s: %w%s", smi.Path, err, quoted(output))
		} else {
			results[i].Outcome, results[i].Err = parseReset(output, status, d.PCIBusID)
		}
	}
	return results
}

func (r *DriverReset) runSMI(gpus []Device, smi Program) (output string, status int, err error) {
	locks, err := r.lock(gpus)
	defer unlock(locks)
	if err != nil {
		return "", 0, err
	}
	smi.Timeout = cmp.Or(smi.Timeout, longestReset)
	smi.Args = append([]string{"--gpu-reset", "-i", addresses(gpus)}, smi.Args...)
	smi.inherits = locks
	return smi.Run(context.Background(), r.Check)
}
