// Package state keeps the placements of the device manager in a JSON file with a checksum, so that after a restart it
// is known which devices are held. A change is durable when its method returns. The previous file is kept beside the
// file, for people: it is never loaded.
//
// A file whose checksum does not match is set aside as a whole. The new file has no placements, but a Loss, until an
// administrator clears that (SetLoss, Import).
package state

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/manager/model"
)

var (
	// ErrLocked means that another process has the file open.
	ErrLocked = errors.New("another device manager has it open")
	// ErrNewer means that a newer version of this program has written the file. The file is left as it is.
	ErrNewer = errors.New("a newer version of the device manager has written it")
	// ErrClosed means that the store was closed before the change was written.
	ErrClosed = errors.New("the state is closed")
	// ErrBroken means that it is unknown whether an earlier change is on the disk. No change is written any more. When
	// the file is opened again, it shows which changes are there.
	ErrBroken = errors.New("the state cannot be written until the device manager is restarted")
)

// Loaded is what the file had when it was opened.
type Loaded struct {
	// Placements are in the order in which they were first put.
	Placements []model.Placement
	// Resources are the names that SetResources recorded.
	Resources []string
	// Loss is nil if all placements are known.
	Loss *Loss
}

// Loss means that placements were lost with a file. A device may still belong to a lost pod. So other pods must not
// get it, unless it is in Cleared.
type Loss struct {
	// Time is when the loss was found.
	Time time.Time `json:"time"`
	// Reason says why the placements could not be read.
	Reason string `json:"reason"`
	// File is the path of the file that has the lost placements.
	File string `json:"file"`
	// Cleared has, by resource, the IDs of the devices that an administrator has freed, since no container uses these.
	Cleared map[string][]string `json:"cleared,omitempty"`
}

// lockWait is how long to wait until an earlier process has ended.
const lockWait = 5 * time.Second

// Store is an open file. Its methods are safe for concurrent use.
//
// Each change is made completely or not at all. If there is an error, the change was not made, and later changes can
// succeed, for example when the disk has space again. Only after an error that wraps ErrBroken it is unknown whether
// the change was made.
type Store struct {
	lock    *fileio.Lock
	replace func(data []byte) error // replaces the file

	mu   sync.Mutex
	next *batch // the changes that wait until the running write has ended, or nil

	writing sync.Mutex // held during a write; guards the fields below
	content content    // of the file
	stopped error      // why nothing is written any more
}

// batch are changes that are written together.
type batch struct {
	changes []func(*content)
	written chan struct{}
	err     error // set before written is closed
}

// Open opens the file at path, and creates it if it is missing. Its directory must exist; the lock is a file beside
// it. If the checksum of the file does not match, the file is set aside, and log gets an error. The log gets an error
// too if there is only a file of an earlier version: OldName beside the path, or one of the paths in `earlier`.
//
// If another process has the file open for some seconds more, the error wraps ErrLocked. It wraps ErrNewer if a newer
// version has written the file, and trust.ErrUnsafe if other users can change it.
func Open(path string, log *slog.Logger, earlier ...string) (*Store, Loaded, error) {
	s, loaded, err := open(path, log, earlier)
	if err != nil {
		return nil, Loaded{}, fmt.Errorf("open the state %s: %w", path, err)
	}
	return s, loaded, nil
}

func open(path string, log *slog.Logger, earlier []string) (*Store, Loaded, error) {
	if err := trust.Dir(filepath.Dir(path)); err != nil {
		return nil, Loaded{}, err
	}
	held, err := acquire(path + ".lock")
	if err != nil {
		return nil, Loaded{}, err
	}
	c, loaded, err := load(path, log, earlier)
	if err != nil {
		return nil, Loaded{}, errors.Join(err, held.Release())
	}
	s := &Store{lock: held, content: c, replace: func(data []byte) error {
		keepPrevious(path)
		return fileio.WriteDurably(path, data, fileMode)
	}}
	return s, loaded, nil
}

func acquire(path string) (*fileio.Lock, error) {
	for end := time.Now().Add(lockWait); ; {
		held, err := fileio.AcquireLock(path)
		if !errors.Is(err, fileio.ErrHeld) {
			return held, err
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("%w: %w", ErrLocked, err)
		}
		time.Sleep(20 * time.Millisecond) // the kernel has no event for the end of a lock
	}
}

// Put adds a placement. If there is one with the same pod UID, Put replaces it and keeps its place in the order.
func (s *Store) Put(p model.Placement) error {
	r, err := newRecord(p)
	if err != nil {
		return fmt.Errorf("record the devices of the pod %s: %w", p.Pod.UID, err)
	}
	if err := s.change(func(c *content) { c.put(r) }); err != nil {
		return fmt.Errorf("record the devices of the pod %s: %w", p.Pod.UID, err)
	}
	return nil
}

// Import adds placements, replaces the names of the resources and ends a Loss. It does all of this or nothing.
func (s *Store) Import(placements []model.Placement, resources []string) error {
	var records []record
	for _, p := range placements {
		r, err := newRecord(p)
		if err != nil {
			return fmt.Errorf("record the devices of the pod %s: %w", p.Pod.UID, err)
		}
		records = append(records, r)
	}
	err := s.change(func(c *content) {
		for _, r := range records {
			c.put(r)
		}
		c.resources, c.loss = resources, nil
	})
	if err != nil {
		return fmt.Errorf("record the devices of %d pods: %w", len(placements), err)
	}
	return nil
}

// Delete removes the placement of a pod. If there is none, that is no error.
func (s *Store) Delete(uid string) error {
	if err := s.change(func(c *content) { c.remove(uid) }); err != nil {
		return fmt.Errorf("remove the record of the pod %s: %w", uid, err)
	}
	return nil
}

// SetResources replaces the names of the resources that plugins have registered.
func (s *Store) SetResources(names []string) error {
	if err := s.change(func(c *content) { c.resources = names }); err != nil {
		return fmt.Errorf("record the registered resources: %w", err)
	}
	return nil
}

// SetLoss records which placements were lost; nil ends the loss.
func (s *Store) SetLoss(l *Loss) error {
	if err := s.change(func(c *content) { c.loss = l }); err != nil {
		return fmt.Errorf("record that placements are lost: %w", err)
	}
	return nil
}

// Close waits for the changes that are being written, and unlocks the file. Later changes return ErrClosed.
func (s *Store) Close() error {
	s.writing.Lock()
	defer s.writing.Unlock()
	if errors.Is(s.stopped, ErrClosed) {
		return nil
	}
	s.stopped = ErrClosed
	if err := s.lock.Release(); err != nil {
		return fmt.Errorf("close the state: %w", err)
	}
	return nil
}

// change makes a change and returns when it is on the disk. Changes are written in batches. The caller of the first
// change of a batch waits until the running write has ended, and then writes the batch; the others only wait for that.
func (s *Store) change(f func(*content)) error {
	s.mu.Lock()
	b := s.next
	first := b == nil
	if first {
		b = &batch{written: make(chan struct{})}
		s.next = b
	}
	b.changes = append(b.changes, f)
	s.mu.Unlock()
	if first {
		s.write(b)
	}
	<-b.written
	return b.err
}

// write writes the next batch. The batch gets further changes until the write before it has ended.
func (s *Store) write(b *batch) {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.mu.Lock()
	s.next = nil
	s.mu.Unlock()
	b.err = s.commit(b.changes)
	close(b.written)
}

// commit writes the file with these changes.
func (s *Store) commit(changes []func(*content)) error {
	if s.stopped != nil {
		return s.stopped
	}
	next := s.content.clone()
	for _, f := range changes {
		f(&next)
	}
	data, err := next.format()
	if err != nil {
		return err
	}
	if len(data) > maxSize {
		return fmt.Errorf("the file would have %d bytes, the limit is %d", len(data), maxSize)
	}
	err = s.replace(data)
	if errors.Is(err, fileio.ErrNotDurable) {
		s.stopped = fmt.Errorf("%w: %w", ErrBroken, err)
		return s.stopped
	}
	if err != nil {
		return err
	}
	s.content = next
	return nil
}
