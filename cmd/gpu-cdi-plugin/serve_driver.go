package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/mps"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/nvml"
)

// nodeDriver is the driver of a host that is kept open between questions. A look at the GPUs waits for the one before, and
// for nobody else.
type nodeDriver struct {
	host     host.Host
	explicit string // --nvml-library
	check    func(library string) error
	// timeout is how long a GPU may not answer before it is unhealthy, and answered is called when one does again.
	timeout  time.Duration
	answered func()
	log      *slog.Logger

	mu    sync.Mutex
	lib   *nvml.Library
	users map[*user]struct{} // of lib, beside the one who has the lock
	// present are the GPUs that the kernel's module knew when the library was opened, and mute those that could not be
	// read when it was last opened because of that, both as text that is only compared.
	present, mute string
	// refused is the error of begin, for who asks first, and giveUp ends it.
	refused error
	giveUp  context.CancelFunc
	// last is the last snapshot, or nil, and links are of the last time that they were read.
	last  *gpu.Snapshot
	links nodeLinks
}

var (
	_ node.Source      = (*nodeDriver)(nil)
	_ mps.ComputeModes = (*nodeDriver)(nil)
)

// Shares of the time for which a GPU may not answer. The GPUs are read each third of it, and a call may be under way
// for a quarter of it. So the second look after a GPU stops answering reports it, after two thirds of the time at most.
// The rest is slack for a busy machine.
const (
	asksIn      = 3
	toleratedOf = 4
)

// libraryOption is --nvml-library as a path; without a slash the loader would look in its own directories.
func libraryOption(library string) string {
	if library != "" && !strings.Contains(library, "/") {
		return "./" + library
	}
	return library
}

// Library is the path of the library that would be loaded now.
func (d *nodeDriver) Library() string {
	path, err := nvml.Find(d.host, d.explicit)
	if err != nil {
		return ""
	}
	return path
}

// Snapshot reads the GPUs and their links. A host without a GPU has an empty snapshot. It waits for a second at most for
// GPUs that do not answer, and once more for their links.
//
// NVML counts the GPUs when it is initialised, and never again: one that is gone is then a lost one, one that is new is
// not there. So the driver is opened anew when the kernel's module knows other GPUs, when other GPUs than before cannot
// be read, when there was none, and after an error of the driver as a whole, since its module may have been reloaded.
// That takes place when no call hangs any more, since until then the driver cannot be closed.
func (d *nodeDriver) Snapshot(ctx context.Context) (*gpu.Snapshot, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lib != nil && !d.lib.Hangs() && (d.present != knownGPUs(d.host) || d.last != nil && len(d.last.Devices) == 0) {
		_ = d.close() //nolint:contextcheck // it has a deadline of its own
	}
	s, err := d.read(ctx)
	if err == nil && !d.lib.Hangs() && d.changed(s) {
		_ = d.close() //nolint:contextcheck // it has a deadline of its own
		s, err = d.read(ctx)
	}
	switch {
	case errors.Is(err, nvml.ErrNoAnswer):
		return nil, fmt.Errorf("%w: %w", gpu.ErrNotAnswering, err)
	case err != nil:
		_ = d.close() //nolint:contextcheck // it is given back after an interrupt too
		return nil, err
	}
	s.Links = d.readLinks(ctx, s)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	d.last = s
	return s, nil
}

func (d *nodeDriver) read(ctx context.Context) (*gpu.Snapshot, error) {
	if err := d.open(ctx); err != nil {
		return nil, err
	}
	s, err := d.lib.Devices(ctx, d.host)
	if errors.Is(err, nvml.ErrNoDevices) {
		return s, nil
	}
	return s, err
}

// SetExclusive lets one process at a time use a GPU, or any number.
func (d *nodeDriver) SetExclusive(ctx context.Context, uuid string, exclusive bool) error {
	return d.use(ctx, func(ctx context.Context, lib *nvml.Library) error { return lib.SetExclusive(ctx, uuid, exclusive) })
}

// user is somebody who asks the driver without the lock.
type user struct {
	dismiss context.CancelCauseFunc
	gone    chan struct{}
}

// errReopened is why a question has no answer that was asked while the driver was opened anew.
var errReopened = errors.New("the driver is opened anew")

// use asks the driver, however long that takes, and keeps no look at the GPUs waiting. When the driver is closed
// meanwhile, ask's context ends with errReopened.
func (d *nodeDriver) use(ctx context.Context, ask func(context.Context, *nvml.Library) error) error {
	ctx, dismiss := context.WithCancelCause(ctx)
	defer dismiss(nil)
	u := &user{dismiss, make(chan struct{})}
	lib, err := d.enter(ctx, u)
	if err != nil {
		return err
	}
	defer d.leave(u)
	return ask(ctx, lib)
}

func (d *nodeDriver) enter(ctx context.Context, u *user) (*nvml.Library, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.open(ctx); err != nil {
		return nil, err
	}
	if d.users == nil {
		d.users = map[*user]struct{}{}
	}
	d.users[u] = struct{}{}
	return d.lib, nil
}

func (d *nodeDriver) leave(u *user) {
	close(u.gone) // before the lock: who has it may be waiting in close
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.users, u)
}

// changed reports whether other GPUs cannot be read than when that was last the reason to open the driver anew.
func (d *nodeDriver) changed(s *gpu.Snapshot) bool {
	var mute []string
	for i := range s.Devices {
		if g := &s.Devices[i]; !g.Usable() {
			mute = append(mute, g.PCIBusID+" "+strconv.Itoa(g.Index))
		}
	}
	before := d.mute
	d.mute = strings.Join(mute, ",")
	return d.mute != "" && d.mute != before
}

// knownGPUs lists the GPUs that the kernel's module has.
func knownGPUs(h host.Host) string {
	entries, err := os.ReadDir(h.Proc("driver", "nvidia", "gpus"))
	if err != nil {
		return ""
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, ",")
}

// begin begins to open the driver beside what else there is to do. It is called before anything else.
func (d *nodeDriver) begin(ctx context.Context) {
	ctx, d.giveUp = context.WithCancel(ctx)
	d.mu.Lock() // here, so that nobody comes before
	go func() {
		defer d.mu.Unlock()
		d.refused = d.open(ctx)
	}()
}

func (d *nodeDriver) open(ctx context.Context) error {
	if d.lib != nil {
		return nil
	}
	if err := d.refused; err != nil {
		d.refused = nil
		return err
	}
	d.present = knownGPUs(d.host)
	path, err := nvml.Find(d.host, d.explicit)
	if err != nil {
		return err
	}
	if err := d.check(path); err != nil {
		return err
	}
	timeout := nvml.DefaultTimeout
	if d.last != nil { // others wait for this look
		timeout = d.timeout / asksIn
	}
	d.lib, err = nvml.OpenContext(ctx, path, nvml.WithHost(d.host), nvml.WithTimeout(timeout),
		nvml.WithTolerance(d.timeout/toleratedOf, d.answered))
	return err
}

// Close gives the driver back. It does not wait for begin.
func (d *nodeDriver) Close() error {
	if d.giveUp != nil {
		d.giveUp()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.close()
}

func (d *nodeDriver) close() error {
	if d.lib == nil {
		return nil
	}
	for u := range d.users {
		u.dismiss(errReopened)
		<-u.gone
	}
	lib := d.lib
	d.lib = nil
	return lib.Close()
}
