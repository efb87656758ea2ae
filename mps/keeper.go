package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/resource"
)

// ComputeModes sets how many processes a GPU lets use it.
type ComputeModes interface {
	// SetExclusive lets one process at a time use the GPU, or any number.
	SetExclusive(ctx context.Context, uuid string, exclusive bool) error
}

// Options are what a Keeper works with. Dir, Helper, Program and Modes are needed.
type Options struct {
	// Dir has a directory for each GPU; see DirsOf. Its path is the same on the host and here, and nobody but root can
	// write to it or to what it is in.
	Dir string
	// Insecure uses Dir even if others than root can change it.
	Insecure bool
	// Helper is this program, about to become the control program.
	Helper Helper
	// Program finds the driver's control program. It is asked again when what it found is no longer there. The program runs
	// as root: what others than root can change must be an error.
	Program func(context.Context) (Program, error)
	// Modes makes GPUs exclusive while they have a daemon, so that no process gets round it.
	Modes ComputeModes
	// Changed is called when Judge may say something else than before. It must not call the Keeper's Run.
	Changed func()
	// Interval is how often a daemon is asked whether it is there; 0 is 10 seconds. Its end is noticed at once.
	Interval time.Duration
	// Deadline is how long it may take to answer all that is asked at once; 0 is 5 seconds.
	Deadline time.Duration
	// Log gets what happens; nil is the default logger.
	Log *slog.Logger
}

// Keeper keeps the control daemons. It is an actor: Run it once. Its other methods may be called at any time.
type Keeper struct {
	opts Options
	wake chan struct{}

	linking sync.Mutex

	holding sync.Mutex
	lock    *lock.Lock // of Options.Dir, or nil

	mu      sync.Mutex
	want    map[string]Want // nil before the first
	minders map[string]*minder
	waiting []*minder // those that Run has not started
	program Program   // the last one that was found
}

// New makes a keeper. It touches nothing.
func New(o Options) *Keeper {
	o.Interval = cmp.Or(o.Interval, 10*time.Second)
	o.Deadline = cmp.Or(o.Deadline, 5*time.Second)
	o.Log = cmp.Or(o.Log, slog.Default())
	if o.Changed == nil {
		o.Changed = func() {}
	}
	return &Keeper{opts: o, wake: make(chan struct{}, 1), minders: map[string]*minder{}}
}

// Want replaces the daemons that there should be. It does not wait for them.
func (k *Keeper) Want(list []Want) {
	k.mu.Lock()
	defer k.mu.Unlock()
	before := k.want
	if before == nil {
		for _, uuid := range k.left() {
			k.add(uuid)
		}
	}
	k.want = map[string]Want{}
	for _, w := range list {
		k.want[w.UUID] = w
		k.add(w.UUID)
	}
	for uuid, m := range k.minders {
		if k.want[uuid] != before[uuid] {
			poke(m.kick)
		}
	}
	poke(k.wake)
}

// add makes the minder of a GPU if there is none.
func (k *Keeper) add(uuid string) {
	if k.minders[uuid] == nil {
		m := newMinder(k, uuid)
		k.minders[uuid] = m
		k.waiting = append(k.waiting, m)
	}
}

// poke wakes the reader of c; one that is not reading wakes when it does.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Problem says why a container cannot be given a part of a GPU with these limits, or nothing if it can.
func (k *Keeper) Problem(uuid string, limits resource.MPSLimits) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := k.minders[uuid]
	switch {
	case m == nil:
		return notYet
	case m.reason == "" && m.ready != limits:
		return "its MPS control daemon is being given other limits"
	}
	return m.reason
}

// Occupied says why a GPU cannot be used without MPS, or nothing if it can: it is exclusive for a daemon that nobody wants
// any more and that has clients.
func (k *Keeper) Occupied(uuid string) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if m := k.minders[uuid]; m != nil && m.occupied {
		return "its GPU is still shared by MPS, until the last client has ended"
	}
	return ""
}

// Run keeps the daemons until ctx ends. They go on after that. The error is nil, or that another instance keeps daemons in
// the same directory, lock.ErrHeld.
func (k *Keeper) Run(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	var minders sync.WaitGroup
	defer func() {
		cancel()
		minders.Wait()
		err = errors.Join(err, k.release())
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-k.wake:
		}
		waiting, err := k.takeWaiting()
		if err != nil {
			return err
		}
		for _, m := range waiting {
			minders.Go(func() { m.run(ctx) })
		}
	}
}

// takeWaiting are the minders to start. Where another instance keeps the daemons they are its own; it is an error only if
// one is wanted here too.
func (k *Keeper) takeWaiting() ([]*minder, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	w := k.waiting
	k.waiting = nil
	if len(w) == 0 {
		return nil, nil
	}
	err := k.hold()
	if !errors.Is(err, lock.ErrHeld) {
		return w, nil // what else is wrong a minder finds out, and says so as long as it lasts
	}
	if len(k.want) > 0 {
		return nil, fmt.Errorf("keep the MPS control daemons: %w", err)
	}
	for _, m := range w {
		delete(k.minders, m.uuid)
	}
	return nil, nil
}

// Claim makes sure that no other instance keeps daemons in the directory, as Run does for the first that is wanted, until
// Run ends. The error is lock.ErrHeld: what else is wrong is told with the daemons.
func (k *Keeper) Claim() error {
	if err := k.hold(); errors.Is(err, lock.ErrHeld) {
		return fmt.Errorf("keep the MPS control daemons: %w", err)
	}
	return nil
}

// hold makes sure that nobody else keeps daemons in the directory.
func (k *Keeper) hold() error {
	k.holding.Lock()
	defer k.holding.Unlock()
	if k.lock != nil {
		return nil
	}
	err := trust.Dir(k.opts.Dir)
	if err != nil && (!k.opts.Insecure || !errors.Is(err, trust.ErrUnsafe)) {
		return fmt.Errorf("%s is not used for MPS, set another runtime-dir: %w", k.opts.Dir, err)
	}
	if err := os.MkdirAll(k.opts.Dir, 0o755); err != nil {
		return fmt.Errorf("make the directory of MPS: %w", err)
	}
	if k.lock, err = lock.Acquire(filepath.Join(k.opts.Dir, lockName)); err != nil {
		return fmt.Errorf("share GPUs by MPS: %w", err)
	}
	return nil
}

func (k *Keeper) release() error {
	k.holding.Lock()
	defer k.holding.Unlock()
	if k.lock == nil {
		return nil
	}
	return k.lock.Release()
}

// left are the GPUs for which an earlier plugin has left something.
func (k *Keeper) left() []string {
	entries, err := os.ReadDir(k.opts.Dir)
	if err != nil {
		return nil // there is nothing
	}
	var uuids []string
	for _, e := range entries {
		if uuidForm().MatchString(e.Name()) && prepared(filepath.Join(k.opts.Dir, e.Name())) {
			uuids = append(uuids, e.Name())
		}
	}
	return uuids
}

// wanted is the daemon that a GPU should have, or nil.
func (k *Keeper) wanted(uuid string) *Want {
	k.mu.Lock()
	defer k.mu.Unlock()
	if w, ok := k.want[uuid]; ok {
		return &w
	}
	return nil
}

// control is how a GPU's daemon is asked, with the program as it is now.
func (k *Keeper) control(ctx context.Context, own string) (*control, error) {
	k.mu.Lock()
	p := k.program
	k.mu.Unlock()
	if _, err := os.Stat(p.Path); err != nil {
		if p, err = k.opts.Program(ctx); err != nil {
			return nil, err
		}
		k.mu.Lock()
		k.program = p
		k.mu.Unlock()
	}
	return &control{helper: k.opts.Helper, own: own, program: p}, nil
}

// linkLibraries is linkLibraries for one minder at a time.
func (k *Keeper) linkLibraries(libraries map[string]string) error {
	k.linking.Lock()
	defer k.linking.Unlock()
	return linkLibraries(k.opts.Dir, libraries)
}
