package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/resource"
)

// Daemon is the desired control daemon of a GPU.
type Daemon struct {
	// UUID is the GPU's.
	UUID string
	// Limits are those of each client.
	Limits resource.MPSLimits
	// Hold leaves the daemon as it is, running or not, while the GPU is unhealthy.
	Hold bool
}

// Daemons returns the daemons that resources need, sorted by UUID.
func Daemons(resources []resource.Resource) []Daemon {
	byUUID := map[string]Daemon{}
	for i := range resources {
		for j := range resources[i].Devices {
			if d := &resources[i].Devices[j]; d.MPS != nil {
				byUUID[d.UUID] = Daemon{UUID: d.UUID, Limits: *d.MPS, Hold: !d.Healthy}
			}
		}
	}
	return slices.SortedFunc(maps.Values(byUUID), func(a, b Daemon) int { return strings.Compare(a.UUID, b.UUID) })
}

// ComputeModes sets the compute modes of GPUs.
type ComputeModes interface {
	// SetExclusive sets a GPU's compute mode to EXCLUSIVE_PROCESS, or to DEFAULT.
	SetExclusive(ctx context.Context, uuid string, exclusive bool) error
}

// Options are the parameters of a Supervisor. Dir, Helper, Program and Modes are required.
type Options struct {
	// Dir has a directory for each GPU; see DirsOf. Its path must be the same on the host, and only root may write to
	// it and to the directories above.
	Dir string
	// Insecure allows a Dir that other users can change.
	Insecure bool
	// KubeletSocket is the kubelet's socket for device plugins; see CheckPIDNamespace.
	KubeletSocket string
	// Helper runs this program so that it becomes the control program.
	Helper Helper
	// Program finds the driver's control program. It is called again when that file is gone. The program runs as root,
	// so one that other users can change must be an error.
	Program func(context.Context) (Program, error)
	// Modes makes a GPU exclusive while it has a daemon, so that no process uses it without MPS.
	Modes ComputeModes
	// Changed is called when the result of Problem may have changed.
	Changed func()
	// Interval is how often a daemon is checked; 0 is 10 seconds. Its end is noticed at once.
	Interval time.Duration
	// Deadline is for all requests of one check together; 0 is 5 seconds.
	Deadline time.Duration
	// Log is the logger; nil is the default one.
	Log *slog.Logger
}

// Supervisor runs the control daemons. Call Run once; the other methods may be called at any time.
type Supervisor struct {
	opts Options
	kick chan struct{} // there may be workers to start

	mu      sync.Mutex
	desired map[string]Daemon // by UUID; nil before the first Set
	workers map[string]*worker
	program Program // the last one found

	files sync.Mutex // guards lock and the directory of libraries
	lock  *lock.Lock // of Options.Dir, or nil
}

// New returns a supervisor. It changes nothing.
func New(o Options) *Supervisor {
	o.Interval = cmp.Or(o.Interval, 10*time.Second)
	o.Deadline = cmp.Or(o.Deadline, 5*time.Second)
	o.Log = cmp.Or(o.Log, slog.Default())
	if o.Changed == nil {
		o.Changed = func() {}
	}
	return &Supervisor{opts: o, kick: make(chan struct{}, 1), workers: map[string]*worker{}}
}

// Set replaces the desired daemons. It does not wait for them.
func (k *Supervisor) Set(daemons []Daemon) {
	k.mu.Lock()
	defer k.mu.Unlock()
	before := k.desired
	var uuids []string
	if before == nil {
		uuids = k.leftovers()
	}
	k.desired = map[string]Daemon{}
	for _, d := range daemons {
		k.desired[d.UUID] = d
		uuids = append(uuids, d.UUID)
	}
	for _, uuid := range uuids {
		if k.workers[uuid] == nil {
			k.workers[uuid] = newWorker(k, uuid)
		}
	}
	for uuid, w := range k.workers {
		if k.desired[uuid] != before[uuid] {
			notify(w.kick)
		}
	}
	notify(k.kick)
}

// notify wakes the receiver of a channel with room for one; a notification that is pending already is enough.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Problem returns why MPS keeps a device from being allocated, or "". The daemon of a shared GPU must be ready with the
// device's limits. A GPU that is no longer shared remains exclusive until the daemon's last client has ended.
func (k *Supervisor) Problem(d *resource.Device) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d.MPS == nil {
		if w := k.workers[d.Parent]; w != nil && w.occupied {
			return "its GPU is still shared by MPS until the last client has ended"
		}
		return ""
	}
	w := k.workers[d.UUID]
	switch {
	case w == nil:
		return starting
	case w.reason == "" && w.ready != *d.MPS:
		return "the limits of its MPS control daemon are being changed"
	}
	return w.reason
}

// Run runs the daemons until ctx ends. They continue after that.
func (k *Supervisor) Run(ctx context.Context) error {
	var workers sync.WaitGroup
	for {
		for _, w := range k.unstarted() {
			workers.Go(func() { w.run(ctx) })
		}
		select {
		case <-k.kick:
		case <-ctx.Done():
			workers.Wait()
			return k.unlock()
		}
	}
}

// unstarted returns the workers that Run has not started, and marks them as started.
func (k *Supervisor) unstarted() []*worker {
	k.mu.Lock()
	defer k.mu.Unlock()
	var list []*worker
	for _, w := range k.workers {
		if !w.started {
			w.started = true
			list = append(list, w)
		}
	}
	return list
}

// Claim checks that MPS can be used here and reserves the directory until Run ends. The error is ErrPIDNamespace, or
// lock.ErrHeld if another instance uses the directory. Problems of the directory itself are reported for each GPU.
func (k *Supervisor) Claim() error {
	if err := CheckPIDNamespace(k.opts.KubeletSocket); err != nil {
		return err
	}
	if err := k.acquire(); errors.Is(err, lock.ErrHeld) {
		return err
	}
	return nil
}

// acquire reserves the directory for this instance.
func (k *Supervisor) acquire() error {
	k.files.Lock()
	defer k.files.Unlock()
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

func (k *Supervisor) unlock() error {
	k.files.Lock()
	defer k.files.Unlock()
	if k.lock == nil {
		return nil
	}
	return k.lock.Release()
}

// leftovers are the GPUs that an earlier plugin prepared.
func (k *Supervisor) leftovers() []string {
	entries, err := os.ReadDir(k.opts.Dir)
	if err != nil {
		return nil // MPS was never used
	}
	var uuids []string
	for _, e := range entries {
		if uuidForm.MatchString(e.Name()) && prepared(filepath.Join(k.opts.Dir, e.Name())) {
			uuids = append(uuids, e.Name())
		}
	}
	return uuids
}

// desiredFor returns the desired daemon of a GPU, or nil.
func (k *Supervisor) desiredFor(uuid string) *Daemon {
	k.mu.Lock()
	defer k.mu.Unlock()
	if d, ok := k.desired[uuid]; ok {
		return &d
	}
	return nil
}

// control returns the control program, as it is installed now, for a GPU's daemon.
func (k *Supervisor) control(ctx context.Context, dir string) (*control, error) {
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
	return &control{helper: k.opts.Helper, dir: dir, program: p}, nil
}

// linkLibraries updates the links to the driver's libraries for one worker at a time.
func (k *Supervisor) linkLibraries(libraries map[string]string) error {
	k.files.Lock()
	defer k.files.Unlock()
	return linkLibraries(k.opts.Dir, libraries)
}
