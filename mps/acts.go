package mps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/resource"
)

// This file is what a minder does about a daemon. Each act returns when to look again.

// start prepares the GPU and starts a daemon.
func (m *minder) start(ctx context.Context, want *Want) time.Duration {
	if err := m.tryStart(ctx, want); err != nil {
		pause := m.pauses.after(0)
		m.due = time.Now().Add(pause)
		if ctx.Err() == nil {
			m.trouble("its MPS control daemon cannot be started", err)
		}
		return pause
	}
	m.since = time.Now()
	return firstLook
}

func (m *minder) tryStart(ctx context.Context, want *Want) error {
	if err := m.keeper.hold(); err != nil {
		return err
	}
	if m.adopt() == nil { // an earlier plugin ended while it started one, which then wrote its record
		return nil
	}
	c, err := m.keeper.control(ctx, m.own)
	if err != nil {
		return err
	}
	plain, err := prepare(m.keeper.opts.Dir, m.uuid, want.Limits.SharedMemoryBytes)
	if err != nil {
		return err
	}
	if plain != "" && plain != m.plain {
		m.log.Warn(m.uuid + ": its containers can fill the file system of runtime-dir, and see what earlier ones left in /dev/shm: " + plain)
	}
	m.plain = plain
	if err := m.keeper.linkLibraries(c.program.Libraries); err != nil {
		return err
	}
	if err := m.makeExclusive(ctx); err != nil {
		return err
	}
	m.proc, err = c.helper.startDaemon(m.own, c.program)
	m.driver, m.unconfined = c.program.Driver, false
	return err
}

func (m *minder) makeExclusive(ctx context.Context) error {
	if err := m.keeper.opts.Modes.SetExclusive(ctx, m.uuid, true); err != nil {
		return err
	}
	m.occupy(true)
	return nil
}

// occupy notes whether the GPU can be used without MPS.
func (m *minder) occupy(yes bool) {
	m.exclusive = yes
	m.keeper.mu.Lock()
	same := m.occupied == yes
	m.occupied = yes
	m.keeper.mu.Unlock()
	if !same {
		m.keeper.opts.Changed()
	}
}

// limit gives the daemon what is wanted.
func (m *minder) limit(ctx context.Context, want *Want) time.Duration {
	asking, cancel := m.asking(ctx)
	defer cancel()
	c, err := m.keeper.control(asking, m.own)
	if err == nil {
		err = c.limit(asking, want.Limits)
	}
	if err == nil {
		err = resizeShared(m.own, want.Limits.SharedMemoryBytes)
	}
	switch {
	case err == nil && m.given == want.Limits: // somebody changed them, and may go on to
		return lastLook
	case err == nil:
		m.given = want.Limits
		return 0
	}
	if ctx.Err() == nil && m.proc.runs() {
		m.trouble("its MPS control daemon cannot be limited", err)
	}
	return lastLook
}

// quit tells the daemon to end, and waits for it.
func (m *minder) quit(ctx context.Context) time.Duration {
	asking, cancel := m.asking(ctx)
	defer cancel()
	c, err := m.keeper.control(asking, m.own)
	if err == nil {
		m.ending = true
		err = c.quit(asking)
	}
	if err != nil && m.proc.runs() && ctx.Err() == nil {
		m.trouble("its MPS control daemon does not end", err)
	}
	return m.await(ctx)
}

// end ends a daemon that does not listen.
func (m *minder) end(ctx context.Context) time.Duration {
	m.log.Warn(m.uuid+": its MPS control daemon does not answer and has no server; it is ended", "pid", m.proc.pid)
	m.ending = true
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
		if err := m.proc.signal(sig); err != nil && !errors.Is(err, unix.ESRCH) {
			m.trouble("its MPS control daemon cannot be ended", err)
			return m.keeper.opts.Interval
		}
		if m.await(ctx) == 0 {
			break
		}
	}
	return 0
}

// await waits for the daemon's end as long as for an answer. It returns when to look again.
func (m *minder) await(ctx context.Context) time.Duration {
	late := time.NewTimer(m.keeper.opts.Deadline)
	defer late.Stop()
	select {
	case <-m.proc.end():
		return 0
	case <-ctx.Done():
	case <-late.C:
	}
	return m.keeper.opts.Interval
}

// forget gives the GPU back to processes without MPS. Its directories stay: containers may still see them, and have what
// was mounted there.
func (m *minder) forget(ctx context.Context) time.Duration {
	err := m.keeper.opts.Modes.SetExclusive(ctx, m.uuid, false)
	if err == nil {
		err = dropVolumes(m.own)
	}
	if err == nil {
		err = m.erase()
	}
	if err != nil {
		if ctx.Err() == nil {
			m.trouble("the GPU cannot be given back to processes without MPS", err)
		}
		return m.keeper.opts.Interval
	}
	m.occupy(false)
	m.log.Info(m.uuid + ": the GPU is not shared by MPS any more")
	m.say(notYet, resource.MPSLimits{})
	return m.keeper.opts.Interval
}

func (m *minder) erase() error {
	for _, name := range []string{outputName, lockName, recordName} {
		if err := os.Remove(filepath.Join(m.own, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the record of a daemon: %w", err)
		}
	}
	return nil
}
