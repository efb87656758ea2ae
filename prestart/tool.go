package prestart

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

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

	longest time.Duration // how long nvidia-smi may run; 0 is longestReset

	mu      sync.Mutex
	next    *batch     // GPUs that wait for nvidia-smi; nil if none does
	smi     sync.Mutex // held while nvidia-smi runs
	resets  string     // the PCI addresses of the GPUs that it resets; empty if it does not run
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

// Ready implements Resetter. An nvidia-smi that was abandoned keeps resets of all GPUs from being tried.
func (r *DriverReset) Ready() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ready()
}

func (r *DriverReset) ready() error {
	if r.resets != "" && time.Now().After(r.overdue) {
		return r.hangs()
	}
	return nil
}

func (r *DriverReset) hangs() error {
	return fmt.Errorf("nvidia-smi still resets %s: if it does not end, the node may need a reboot", r.resets)
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
		return ResetFailed, &AbandonedError{Ended: done, Err: context.Cause(ctx)}
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
			one.outcome, one.err = r.byPCI(one.d)
			close(done)
		}()
		return done, nil
	}
	if r.next == nil {
		r.next = &batch{done: make(chan struct{})}
		go r.run(r.next, program)
	}
	r.next.requests = append(r.next.requests, one)
	return r.next.done, nil
}

// withdraw takes back a request that waits for nvidia-smi, and returns what it waited for. It returns nil if nvidia-smi
// has the request.
func (r *DriverReset) withdraw(one *request) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next == nil || !slices.Contains(r.next.requests, one) || r.resets == "" {
		return nil
	}
	r.next.requests = slices.DeleteFunc(r.next.requests, func(other *request) bool { return other == one })
	return r.hangs()
}

// run resets the GPUs of a batch, as soon as it is its turn.
func (r *DriverReset) run(b *batch, smi Program) {
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
		r.runSMI(wanted, smi)
	}
}

// runSMI runs nvidia-smi for requests, also after they have been abandoned.
func (r *DriverReset) runSMI(requests []*request, smi Program) {
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
	r.runs(strings.Join(addresses, ", "), last)
	defer r.runs("", time.Time{})
	smi.Args = append([]string{"--gpu-reset", "-i", strings.Join(addresses, ",")}, smi.Args...)
	output, status, err := smi.run(context.Background(), r.Check)
	for _, one := range requests {
		if err != nil {
			one.err = fmt.Errorf("run %s: %w%s", smi.Path, err, quoted(output))
		} else {
			one.outcome, one.err = parseReset(output, status, one.d.PCIBusID)
		}
	}
}

// runs notes for which GPUs nvidia-smi runs, and when it is overdue.
func (r *DriverReset) runs(resets string, overdue time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.resets, r.overdue = resets, overdue
}

// statusNotSupported is nvidia-smi's exit status for "the requested operation is not available on target device" (its
// manual, RETURN VALUE).
const statusNotSupported = 3

// resetTexts are what nvidia-smi writes in a line about a GPU that was not reset, in lower case, as reported for
// drivers from 418 to 580. The exit status is 255 for most of them.
var resetTexts = []struct {
	text    string
	outcome Outcome
}{
	{"in use by another client", ResetBusy},
	{"currently in use by another process", ResetBusy},
	{"being used by some other process", ResetBusy},
	{"currently being used by one or more other processes", ResetBusy},
	{"is the primary gpu", ResetRefused},
	{"nvlink", ResetRefused},
	{"nvswitch", ResetRefused},
	{"must be reset together", ResetRefused},
	{"not supported", ResetNotSupported},
	{"does not support", ResetNotSupported},
}

// parseReset reads from the output and exit status of nvidia-smi how the reset of one of the GPUs ended. The output has
// no defined form: what is unknown is a failure.
func parseReset(output string, status int, address string) (Outcome, error) {
	var own, general []string // lines about the GPU, and about none in particular
	for line := range strings.Lines(output) {
		switch this, anyone := mentions(line, address); {
		case this:
			own = append(own, line)
		case !anyone:
			general = append(general, line)
		}
	}
	if len(own) == 0 {
		own = general
	}
	for _, line := range own {
		lower := strings.ToLower(line)
		if strings.Contains(lower, "successfully reset") {
			return ResetDone, nil
		}
		for _, row := range resetTexts {
			if strings.Contains(lower, row.text) {
				return row.outcome, errors.New("nvidia-smi: " + plain(line))
			}
		}
	}
	switch status {
	case 0:
		return ResetDone, nil
	case statusNotSupported:
		return ResetNotSupported, fmt.Errorf("nvidia-smi ended with status %d%s", status, quoted(output))
	default:
		return ResetFailed, fmt.Errorf("nvidia-smi ended with status %d%s", status, quoted(output))
	}
}

// addressPattern is a PCI address: domain, bus, device and function. NVML and nvidia-smi write domains of 8 digits.
var addressPattern = regexp.MustCompile(`([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])`)

// parseAddress returns a PCI address in the one form that is compared.
func parseAddress(text string) (string, bool) {
	m := addressPattern.FindStringSubmatch(text)
	if m == nil || m[0] != text {
		return "", false
	}
	domain, err := strconv.ParseUint(m[1], 16, 32)
	return strings.ToLower(fmt.Sprintf("%x:%s:%s.%s", domain, m[2], m[3], m[4])), err == nil
}

// mentions reports whether a line has a PCI address, and whether it has any.
func mentions(line, address string) (this, anyone bool) {
	want, _ := parseAddress(address)
	for _, found := range addressPattern.FindAllString(line, -1) {
		got, ok := parseAddress(found)
		this, anyone = this || ok && got == want, anyone || ok
	}
	return this, anyone
}

// byPCI resets a GPU by the file reset of its PCI device. The kernel does not ask who uses the device, so the GPU must
// not be open in any process, nor be the machine's display. The kernel waits for the device, up to a minute.
func (r *DriverReset) byPCI(d *Device) (Outcome, error) {
	dir := r.Host.Sys("bus/pci/devices", d.PCIBusID)
	display, err := os.ReadFile(filepath.Join(dir, "boot_vga"))
	if err == nil && strings.TrimSpace(string(display)) == "1" {
		return ResetRefused, errors.New("it is the primary GPU")
	}
	if len(d.Nodes) == 0 {
		return ResetFailed, errors.New("the device nodes of the GPU are unknown, so it may be in use: reload the driver")
	}
	switch users, err := holders(r.Host, d.Nodes); {
	case err != nil:
		return ResetFailed, fmt.Errorf("find who uses the GPU: %w", err)
	case len(users) > 0:
		return ResetBusy, errors.New("the GPU is in use")
	}
	f, err := os.OpenFile(filepath.Join(dir, "reset"), os.O_WRONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		return ResetNotSupported, errors.New("the driver has no nvidia-smi, and the PCI device has no reset")
	}
	if err == nil {
		_, err = f.WriteString("1")
		err = errors.Join(err, f.Close())
	}
	switch {
	case err == nil:
		return ResetDone, nil
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EAGAIN):
		return ResetBusy, err
	case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EOPNOTSUPP):
		return ResetNotSupported, err
	default:
		return ResetFailed, err
	}
}
