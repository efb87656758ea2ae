// Package state keeps the placements of the device manager in a file, so that a restart finds again which devices are
// held. A change is durable when its method returns. The file is a bbolt database that its owner alone can read.
//
// A damaged file never loses a placement silently: it is set aside under another name, what is readable is kept, and
// the new file says until an administrator clears it (SetLoss) that placements may be missing.
package state

import (
	"errors"
	"log/slog"
	"time"

	"gpu-cdi-plugin/manager/model"
)

var (
	// ErrLocked means that another process has the file open.
	ErrLocked = errors.New("another device manager has it open")
	// ErrNewer means that a newer version of this program has written the file. It is left as it is.
	ErrNewer = errors.New("a newer version has written it")
	// ErrClosed means that the store was closed before the change was written.
	ErrClosed = errors.New("the state is closed")
	// ErrBroken means that it is unknown whether an earlier change is on the disk. No change is written any more;
	// opening the file anew shows which ones are there.
	ErrBroken = errors.New("the state cannot be written until the device manager is restarted")
)

// Options are how a file is opened.
type Options struct {
	// Log gets damage as errors.
	Log *slog.Logger
	// ForgetDamaged drops a damaged file and starts empty, as the kubelet does: dialect.Dialect.ForgetsDamagedState.
	ForgetDamaged bool
}

// Loaded is what a file had when it was opened.
type Loaded struct {
	// Placements are in the order of their first Put.
	Placements []model.Placement
	// Resources are the names of SetResources.
	Resources []string
	// Loss is nil if all placements are known.
	Loss *Loss
}

// Loss means that the file was damaged: placements may be missing, and some may be there that had ended. A device that
// no placement holds may belong to a pod that is missing: unless it is in Cleared, it must not be given to another.
type Loss struct {
	// Time is when the damage was found.
	Time time.Time `json:"time"`
	// Reason says what was damaged.
	Reason string `json:"reason"`
	// File is the path of the damaged file.
	File string `json:"file"`
	// Cleared are the IDs of devices by resource of which an administrator has said that no container uses them.
	Cleared map[string][]string `json:"known,omitempty"` // as the field was called at first
}
