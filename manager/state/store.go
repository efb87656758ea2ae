package state

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync"

	"go.etcd.io/bbolt"

	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/manager/model"
)

// maxBatch is how many changes are written together. It bounds what one error of the disk affects.
const maxBatch = 256

// Store is an open file. Its methods are safe for concurrent use; changes of concurrent callers are written together.
//
// Each change is there completely or not at all. On an error it was not made, and the next one can succeed, for example
// when the disk has space again; only after an error that wraps ErrBroken it is unknown whether it was made. A context
// ends the wait for earlier changes; a change that is being written is awaited, since only then the answer is true.
type Store struct {
	lock    *lock.Lock
	changes chan *change
	closing chan struct{} // closed by Close
	stopped chan struct{} // closed when run has ended
	once    sync.Once
	closed  error // of run, once it has stopped

	// These belong to run.
	db     *bbolt.DB
	file   *os.File          // bbolt's
	index  map[string]stored // by identity
	total  total
	last   uint64 // the last placement's place
	broken error
}

// change are the updates of one caller, which are made together or not at all.
type change struct {
	updates []update
	done    chan error
}

// update is a record that is to be written, or to be removed if it has no payload.
type update struct {
	identity string
	payload  []byte
}

// Put adds a placement, or replaces that of the same pod UID and keeps its place in the order.
func (s *Store) Put(ctx context.Context, p model.Placement) error {
	payload, err := encode(&p)
	if err == nil {
		err = s.write(ctx, update{podPrefix + p.Pod.UID, payload})
	}
	if err != nil {
		return fmt.Errorf("record the devices of the pod %s: %w", p.Pod.UID, err)
	}
	return nil
}

// Import adds placements and replaces the names of the resources, all of it or nothing.
func (s *Store) Import(ctx context.Context, placements []model.Placement, resources []string) error {
	names, err := json.Marshal(resources)
	updates := []update{{keyResources, names}}
	for i := 0; err == nil && i < len(placements); i++ {
		var payload []byte
		payload, err = encode(&placements[i])
		updates = append(updates, update{podPrefix + placements[i].Pod.UID, payload})
	}
	if err == nil {
		err = s.write(ctx, updates...)
	}
	if err != nil {
		return fmt.Errorf("record the devices of %d pods: %w", len(placements), err)
	}
	return nil
}

// Delete removes the placement of a pod. It is no error if there is none.
func (s *Store) Delete(ctx context.Context, uid string) error {
	if err := s.write(ctx, update{podPrefix + uid, nil}); err != nil {
		return fmt.Errorf("remove the record of the pod %s: %w", uid, err)
	}
	return nil
}

// SetResources replaces the names of the resources that plugins have registered.
func (s *Store) SetResources(ctx context.Context, names []string) error {
	payload, err := json.Marshal(names)
	if err == nil {
		err = s.write(ctx, update{keyResources, payload})
	}
	if err != nil {
		return fmt.Errorf("record the registered resources: %w", err)
	}
	return nil
}

// SetLoss replaces what is said of missing placements; nil means that none are missing any more.
func (s *Store) SetLoss(ctx context.Context, l *Loss) error {
	var payload []byte
	var err error
	if l != nil {
		payload, err = json.Marshal(l)
	}
	if err == nil {
		err = s.write(ctx, update{keyLoss, payload})
	}
	if err != nil {
		return fmt.Errorf("record that placements may be missing: %w", err)
	}
	return nil
}

func (s *Store) write(ctx context.Context, updates ...update) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	c := &change{updates: updates, done: make(chan error, 1)}
	select {
	case s.changes <- c:
		return <-c.done
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.closing:
		return ErrClosed
	}
}

// Close ends the changes that are being written, and closes the file. Later changes return ErrClosed.
func (s *Store) Close() error {
	s.once.Do(func() { close(s.closing) })
	<-s.stopped
	return s.closed
}

// run writes changes until the store is closed. While it writes some, others gather, and are written together next.
func (s *Store) run() {
	defer close(s.stopped)
	// A file that becomes shorter under bbolt's memory map, or a disk that cannot read, is then a panic and not the
	// process' end.
	debug.SetPanicOnFault(true)
	for {
		select {
		case c := <-s.changes:
			batch := s.gather(c)
			err := s.commit(batch)
			for _, c := range batch {
				c.done <- err
			}
		case <-s.closing:
			s.closed = s.close()
			return
		}
	}
}

// gather returns a change with those of the callers that wait.
func (s *Store) gather(first *change) []*change {
	batch := []*change{first}
	for len(batch) < maxBatch {
		select {
		case c := <-s.changes:
			batch = append(batch, c)
		default:
			return batch
		}
	}
	return batch
}

// commit writes changes in one transaction.
func (s *Store) commit(batch []*change) error {
	if s.broken != nil {
		return s.broken
	}
	d := &draft{base: s.index, changed: map[string]*stored{}, total: s.total, last: s.last}
	err := guard(func() error { return s.transact(d, batch) })
	if err == nil {
		s.accept(d)
		return nil
	}
	if errors.Is(err, ErrBroken) || !s.isUnchanged() {
		s.broken = fmt.Errorf("%w: %w", ErrBroken, err)
		return s.broken
	}
	return err
}

// transact is bbolt's Update, but leaves the transaction as it is after a panic: to roll it back, bbolt would read the
// file in a goroutine of its own, where another panic ends the process.
func (s *Store) transact(d *draft, batch []*change) error {
	tx, err := s.db.Begin(true)
	if err != nil {
		return err
	}
	if err := d.apply(tx.Bucket(bucket), batch); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

// accept makes a draft that was written the present state.
func (s *Store) accept(d *draft) {
	s.total, s.last = d.total, d.last
	for identity, r := range d.changed {
		if r == nil {
			delete(s.index, identity)
		} else {
			s.index[identity] = *r
		}
	}
}

// isUnchanged reports whether the database still is as before a change that failed. It is not if the last step, the
// sync of the meta page, has failed: then both could be on the disk.
func (s *Store) isUnchanged() bool {
	want, _ := seal([]byte(keyTotal), s.total.payload())
	err := guard(func() error {
		return s.db.View(func(tx *bbolt.Tx) error {
			if b := tx.Bucket(bucket); b == nil || !bytes.Equal(b.Get([]byte(keyTotal)), want) {
				return ErrBroken
			}
			return nil
		})
	})
	return err == nil
}

func (s *Store) close() error {
	var err error
	if s.broken == nil {
		err = s.db.Close()
	} else {
		err = s.file.Close() // bbolt may hold its locks for ever
	}
	if err = errors.Join(err, s.lock.Release()); err != nil {
		return fmt.Errorf("close the state: %w", err)
	}
	return nil
}

// guard turns a panic of bbolt into an error.
func guard(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: bbolt: %v", ErrBroken, r)
		}
	}()
	return f()
}
