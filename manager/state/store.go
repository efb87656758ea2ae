package state

import (
	"context"

	"gpu-cdi-plugin/manager/model"
)

// Store is an open file. Its methods are safe for concurrent use; changes of concurrent callers are written together.
//
// Each change is there completely or not at all. On an error it was not made, and the next one can succeed, for example
// when the disk has space again; only after an error that wraps ErrBroken it is unknown whether it was made. A context
// ends the wait for earlier changes; a change that is being written is awaited, since only then the answer is true.
type Store struct{}

// Open opens the file at path, and creates it if it is missing. Its directory must exist. If another process has it
// open for some seconds more, the error wraps ErrLocked. It wraps ErrNewer for a file of a newer version, and
// trust.ErrUnsafe for one that other users can change.
func Open(path string, o Options) (*Store, Loaded, error) { return nil, Loaded{}, nil }

// Put adds a placement, or replaces that of the same pod UID and keeps its place in the order.
func (s *Store) Put(ctx context.Context, p model.Placement) error { return nil }

// Delete removes the placement of a pod. It is no error if there is none.
func (s *Store) Delete(ctx context.Context, uid string) error { return nil }

// SetResources replaces the names of the resources that plugins have registered.
func (s *Store) SetResources(ctx context.Context, names []string) error { return nil }

// SetLoss replaces what is said of missing placements; nil means that none are missing any more.
func (s *Store) SetLoss(ctx context.Context, l *Loss) error { return nil }

// Close ends the changes that are being written, and closes the file. Later changes return ErrClosed.
func (s *Store) Close() error { return nil }
