// Package state stores the placements of the device manager in a JSON file with a checksum, so that the manager knows
// after a restart which devices are held. A change is durable when its method returns. The previous version of the file
// is kept beside it for administrators; the program never loads it.
//
// A damaged file is set aside as a whole. The new file has no placements, and a Loss until an administrator clears it
// (SetLoss, Import).
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
	// ErrNewer means that a newer version of this program has written the file, which stays unchanged.
	ErrNewer = errors.New("a newer version has written it")
	// ErrClosed means that the store was closed before the change was written.
	ErrClosed = errors.New("the state is closed")
	// ErrBroken means that it is unknown whether an earlier change is on the disk. No more changes are written; opening
	// the file again shows what is there.
	ErrBroken = errors.New("the state cannot be written until the device manager is restarted")
)

// Loaded is the content of a file when it was opened.
type Loaded struct {
	// Placements are in the order of their first Put.
	Placements []model.Placement
	// Resources are the names stored with SetResources.
	Resources []string
	// Loss is nil if all placements are known.
	Loss *Loss
}

// Loss means that a file with placements could not be read. Any device may belong to a lost pod, so devices must not be
// allocated unless they are in Cleared.
type Loss struct {
	// Time is when the loss was found.
	Time time.Time `json:"time"`
	// Reason says why the placements could not be read.
	Reason string `json:"reason"`
	// File is the path of the file with the lost placements.
	File string `json:"file"`
	// Cleared has, by resource, the IDs of devices that no container uses according to an administrator.
	Cleared map[string][]string `json:"cleared,omitempty"`
}

// lockWait is how long to wait for an earlier process that holds the lock.
const lockWait = 5 * time.Second

// Store is an open file. Its methods are safe for concurrent use.
//
// Each change is made completely or not at all. After an error it was not made, and the next change can succeed, for
// example when the disk has space again. Only after an error that wraps ErrBroken it is unknown whether the change was
// made.
type Store struct {
	lock    *fileio.Lock
	replace func(data []byte) error // replaces the file

	mu   sync.Mutex
	next *batch // the changes that wait for the running write to end, or nil

	writing sync.Mutex // is held during a write; guards the fields below
	content content    // what the file has
	stopped error      // why no more changes are written
}

// batch are changes that are written together.
type batch struct {
	changes []func(*content)
	written chan struct{}
	err     error // set before written is closed
}

// Open opens the file at path, and creates it if it is missing. Its directory must exist; the lock file is beside it. A
// damaged file is set aside and reported to log, and so is the case that only OldName, the file of earlier versions,
// exists.
//
// The error wraps ErrLocked if another process has the file open for more than some seconds, ErrNewer if a newer
// version has written it, and trust.ErrUnsafe if other users can change it.
func Open(path string, log *slog.Logger) (*Store, Loaded, error) {
	s, loaded, err := open(path, log)
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

// Put adds a placement. It replaces a placement of the same pod UID in its position.
func (s *Store) Put(p model.Placement) error {
	r, err := newRecord(p)
	if err == nil {
		err = s.change(func(c *content) { c.put(r) })
	}
	if err != nil {
		return fmt.Errorf("record the devices of the pod %s: %w", p.Pod.UID, err)
	}
	return nil
}

// Import adds placements, replaces the names of the resources and ends a Loss, all or nothing.
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

// Delete removes the placement of a pod. A missing placement is not an error.
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

// SetLoss replaces the loss; nil ends it.
func (s *Store) SetLoss(l *Loss) error {
	if err := s.change(func(c *content) { c.loss = l }); err != nil {
		return fmt.Errorf("record that placements are lost: %w", err)
	}
	return nil
}

// Close waits until pending changes are written, and releases the file. Later changes return ErrClosed.
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

// change makes a change and returns when it is on the disk. The first change of a batch waits until the running write
// has ended, and writes the batch; the others wait for that write.
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

// write writes a batch, which collects changes until the write before it has ended.
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
