package prestart

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
)

// DriverReset resets GPUs by the driver's own nvidia-smi or, where the driver has none, by the kernel's reset of PCI
// devices.
type DriverReset struct {
	Host host.Host
	// Find returns nvidia-smi, or false if the driver has none.
	Find func() (Program, bool)
	// Check refuses programs that others than root could change. Nil is trust.RootFile.
	Check func(path string) error

	mu      sync.Mutex
	running map[string]bool // GPUs whose reset has not returned, by UUID
}

var _ Resetter = (*DriverReset)(nil)

// Reset resets a GPU. A reset that does not return keeps later ones of the same GPU from being tried.
func (r *DriverReset) Reset(ctx context.Context, d Device) (Outcome, error) {
	if !r.begin(d.GPU) {
		return ResetFailed, errors.New("an earlier reset of the GPU has not returned: the node may need a reboot")
	}
	type result struct {
		outcome Outcome
		err     error
	}
	done := make(chan result, 1)
	go func() {
		outcome, err := r.reset(ctx, d)
		r.end(d.GPU)
		done <- result{outcome, err}
	}()
	select {
	case got := <-done:
		return got.outcome, got.err
	case <-ctx.Done():
	}
	select {
	case got := <-done:
		return got.outcome, got.err
	case <-time.After(stuckAfter):
		return ResetFailed, fmt.Errorf("the reset has not returned: %w", context.Cause(ctx))
	}
}

func (r *DriverReset) begin(gpu string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running[gpu] {
		return false
	}
	if r.running == nil {
		r.running = map[string]bool{}
	}
	r.running[gpu] = true
	return true
}

func (r *DriverReset) end(gpu string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.running, gpu)
}

// stuckAfter is how long a killed nvidia-smi may take to end.
const stuckAfter = time.Second

func (r *DriverReset) reset(ctx context.Context, d Device) (Outcome, error) {
	if d.PCIBusID == "" {
		return ResetFailed, errors.New("the PCI address of the GPU is unknown")
	}
	if smi, ok := r.Find(); ok {
		return r.bySMI(ctx, smi, d.PCIBusID)
	}
	return r.byPCI(&d)
}

func (r *DriverReset) bySMI(ctx context.Context, smi Program, address string) (Outcome, error) {
	if deadline, ok := ctx.Deadline(); ok && smi.Timeout == 0 {
		smi.Timeout = time.Until(deadline)
	}
	smi.Args = append([]string{"--gpu-reset", "-i", address}, smi.Args...)
	output, status, err := smi.run(ctx, r.Check)
	if err != nil {
		return ResetFailed, fmt.Errorf("run %s: %w%s", smi.Path, err, quoted(output))
	}
	return parseReset(output, status)
}

// statusNotSupported is nvidia-smi's exit status for "the requested operation is not available on target device" (its
// manual, RETURN VALUE).
const statusNotSupported = 3

// resetTexts are what nvidia-smi writes about a GPU that was not reset, in lower case, as seen with drivers from 418 to
// 580. The exit status is 255 for most of them. The first that occurs counts: the long text about processes that use a
// GPU mentions other reasons as examples.
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

// parseReset tells from the output and exit status of nvidia-smi how a reset ended. The output has no defined form:
// what is unknown is a failure.
func parseReset(output string, status int) (Outcome, error) {
	lower := strings.ToLower(output)
	if status == 0 && strings.Contains(lower, "successfully reset") {
		return ResetDone, nil
	}
	for _, row := range resetTexts {
		if strings.Contains(lower, row.text) {
			return row.outcome, errors.New("nvidia-smi: " + firstReason(output, row.text))
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

// firstReason is the line of the output that has a text, which is in lower case.
func firstReason(output, text string) string {
	for line := range strings.Lines(output) {
		if strings.Contains(strings.ToLower(line), text) {
			return plain(line)
		}
	}
	return plain(output)
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
		return ResetFailed, errors.New("the device nodes of the GPU are unknown, so it may be in use")
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
