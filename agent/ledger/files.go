package ledger

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/kubelet"
)

// Files are the paths of what a ledger keeps over a restart. An empty path means that it is not kept.
type Files struct {
	// Parents has the UUID of the GPU of each MIG device, also of those that are gone and still held. It is in a directory
	// that a reboot empties.
	Parents string
	// Forgotten has the entries that an administrator has had forgotten.
	Forgotten string
	// Known has what the kubelet's files and the records of claims have said of pods that may still run: they can be lost.
	// It is in a directory that a reboot empties.
	Known string
}

// known is the content of the file Known, sorted.
type known struct {
	Devices []knownDevice
	Claims  []knownClaim
}

// knownDevice is an entry of the kubelet's checkpoint. Parent is the UUID of the device's GPU, or empty. Missing is
// since when the checkpoint lacks the entry, or zero.
type knownDevice struct {
	Pod, Container, Resource, ID, Parent string
	Missing                              time.Time
}

// knownClaim is the same for a claim in dra_manager_state.
type knownClaim struct {
	kubelet.Claim
	Missing time.Time
}

// maxFile bounds each file, in bytes.
const maxFile = 4 << 20

// read returns the content of the files. Files that do not exist are empty.
func (f *Files) read() (parents map[string]string, forgotten map[string]bool, before known, err error) {
	err = errors.Join(readJSON(f.Parents, &parents), readJSON(f.Forgotten, &forgotten), readJSON(f.Known, &before))
	return parents, forgotten, before, err
}

func (f *Files) writeParents(parents map[string]string) error {
	return writeJSON(f.Parents, parents, fileio.Replace)
}

// writeKnown writes what is known, or removes the file if that is nothing.
func (f *Files) writeKnown(k known) error {
	if len(k.Devices)+len(k.Claims) > 0 || f.Known == "" {
		return writeJSON(f.Known, k, fileio.Replace)
	}
	if err := os.Remove(f.Known); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (f *Files) writeForgotten(forgotten map[string]bool) error {
	return writeJSON(f.Forgotten, forgotten, fileio.WriteDurably)
}

func readJSON(path string, into any) error {
	if path == "" {
		return nil
	}
	data, err := fileio.ReadFile(path, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

func writeJSON(path string, value any, write func(string, []byte, fs.FileMode) error) error {
	if path == "" {
		return nil
	}
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return write(path, append(data, '\n'), 0o600)
}
