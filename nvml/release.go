package nvml

import (
	"context"
	"fmt"
	"time"
)

// releasePoll is how often Release tries to close the library while calls use it.
const releasePoll = 10 * time.Millisecond

// Release closes the library and keeps it closed until Reopen: as long as a process has the driver open, a GPU cannot
// be reset and the driver cannot be unloaded. Release waits for outstanding calls; if they do not return before ctx
// ends, the library is not released. While the library is released, Snapshot returns the previous snapshot, Probes
// returns none, and the other methods return [ErrReleased].
func (s *Session) Release(ctx context.Context) error {
	for {
		s.mu.Lock()
		s.released = true
		err := s.close() //nolint:contextcheck // has its own deadline
		if err != nil && ctx.Err() != nil {
			s.released = false
			s.watch() //nolint:contextcheck // events are received until the library is closed
		}
		s.mu.Unlock()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("release the NVIDIA driver: %w (%w)", err, context.Cause(ctx))
		}
		select {
		case <-time.After(releasePoll):
		case <-ctx.Done():
		}
	}
}

// Released reports whether the library is released.
func (s *Session) Released() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.released
}

// Reopen ends Release and opens the library. Events of the GPUs are received again.
func (s *Session) Reopen(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.released = false
	if err := s.open(ctx); err != nil {
		return err
	}
	s.watch() //nolint:contextcheck // events are received until the library is closed
	if s.changed != nil {
		s.changed()
	}
	return nil
}
