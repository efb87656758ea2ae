package sim

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ResetResult is the result of resets of a GPU by nvidia-smi.
type ResetResult string

// The results of resets, in the order of the library's numbers.
const (
	ResetWorks        ResetResult = "works"
	ResetBusy         ResetResult = "busy"          // the GPU is in use by another client
	ResetNotSupported ResetResult = "not-supported" // as in virtual machines
	ResetNeedsPeers   ResetResult = "needs-peers"   // as on NVSwitch machines before Hopper
	ResetHangs        ResetResult = "hangs"         // nvidia-smi never returns
)

var resetResults = []ResetResult{ResetWorks, ResetBusy, ResetNotSupported, ResetNeedsPeers, ResetHangs}

// ResetResults lists the results.
func ResetResults() []string {
	var names []string
	for _, r := range resetResults {
		names = append(names, string(r))
	}
	return names
}

// ResetFault is the result of resets of a GPU until Clear.
type ResetFault struct {
	Result ResetResult
	// Tries is the number of resets after which resets work again; 0 means never.
	Tries int
	// Delay is how long a successful reset takes, at most an hour.
	Delay time.Duration
}

// SetReset sets the result of resets of a GPU. The PCI device's reset file in sysfs cannot imitate all results: it is
// missing if resets are not supported, opening it for writing blocks if resets hang, and otherwise a write resets the
// GPU. ServePCIReset makes writes block for a time or fail.
func (n *Node) SetReset(gpu int, f ResetFault) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	result := slices.Index(resetResults, f.Result)
	switch {
	case result < 0:
		return invalid("result of resets %q: want %s", f.Result, strings.Join(ResetResults(), ", "))
	case f.Tries < 0:
		return invalid("%d tries: want 0 or more", f.Tries)
	case f.Tries > 0 && (f.Result == ResetWorks || f.Result == ResetHangs):
		return invalid(
			"resets that %s have no number of tries",
			map[bool]string{true: "work", false: "hang"}[result == 0],
		)
	case f.Delay < 0 || f.Delay > time.Hour:
		return invalid("a reset of %v: want 0 to 1h", f.Delay)
	}
	values := map[string]*uint64{}
	for name, number := range map[string]uint64{
		"reset-result": uint64(result), "reset-tries": uint64(f.Tries), "reset-delay": uint64(f.Delay.Milliseconds()),
	} {
		values[name] = nil
		if number != 0 {
			values[name] = &number
		}
	}
	err := n.updateState(func(records []record) ([]record, error) { return setValues(records, gpu, values), nil })
	if err != nil {
		return err
	}
	return n.makeResetFile(&n.machine.GPUs[gpu], f.Result)
}

// makeResetFile replaces the reset file of a GPU's PCI device.
func (n *Node) makeResetFile(g *GPU, result ResetResult) error {
	path := filepath.Join(n.root, g.sysDir(), "reset")
	if _, err := os.Stat(filepath.Dir(path)); errors.Is(err, fs.ErrNotExist) {
		return nil // the GPU is unplugged
	}
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	switch {
	case err != nil || result == ResetNotSupported:
	case result == ResetHangs:
		err = unix.Mkfifo(path, 0o200)
	default:
		err = writeFile(path, nil, 0o200)
	}
	if err != nil {
		return fmt.Errorf("replace the reset file of GPU %d: %w", g.Index, err)
	}
	return nil
}
