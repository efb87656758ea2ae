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
	"gpu-cdi-plugin/internal/wake"
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
	// Dir has a directory for each GPU; see dirsOf. Its path must be the same on the host, and only root may write to
	// it and to the directories above.
	Dir string
	// Insecure allows a Dir that other users can change.
	Insecure bool
	// KubeletSocket is the kubelet's socket for device plugins; see checkPIDNamespace.
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
	kick wake.Chan // there may be workers to start

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
	return &Supervisor{opts: o, kick: wake.New(), workers: map[string]*worker{}}
}

// Set replaces the desired daemons. It does not wait for them.
func (s *Supervisor) Set(daemons []Daemon) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.desired
	var uuids []string
	if before == nil {
		uuids = s.leftovers()
	}
	s.desired = map[string]Daemon{}
	for _, d := range daemons {
		s.desired[d.UUID] = d
		uuids = append(uuids, d.UUID)
	}
	for _, uuid := range uuids {
		if s.workers[uuid] == nil {
			s.workers[uuid] = newWorker(s, uuid)
		}
	}
	for uuid, w := range s.workers {
		if s.desired[uuid] != before[uuid] {
			w.kick.Wake()
		}
	}
	s.kick.Wake()
}

// Problem returns why MPS keeps a device from being allocated, or "". The daemon of a shared GPU must be ready with the
// device's limits. A GPU that is no longer shared remains exclusive until the daemon's last client has ended.
func (s *Supervisor) Problem(d *resource.Device) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.MPS == nil {
		if w := s.workers[d.Parent]; w != nil && w.occupied {
			return "its GPU is still shared by MPS until the last client has ended"
		}
		return ""
	}
	w := s.workers[d.UUID]
	switch {
	case w == nil:
		return starting
	case w.reason == "" && w.ready != *d.MPS:
		return "the limits of its MPS control daemon are being changed"
	}
	return w.reason
}

// Run runs the daemons until ctx ends. They continue after that.
func (s *Supervisor) Run(ctx context.Context) error {
	var workers sync.WaitGroup
	for {
		for _, w := range s.unstarted() {
			workers.Go(func() { w.run(ctx) })
		}
		select {
		case <-s.kick:
		case <-ctx.Done():
			workers.Wait()
			return s.unlock()
		}
	}
}

// unstarted returns the workers that Run has not started, and marks them as started.
func (s *Supervisor) unstarted() []*worker {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []*worker
	for _, w := range s.workers {
		if !w.started {
			w.started = true
			list = append(list, w)
		}
	}
	return list
}

// Claim checks that MPS can be used here and reserves the directory until Run ends. The error is ErrPIDNamespace, or
// lock.ErrHeld if another instance uses the directory. Problems of the directory itself are reported for each GPU.
func (s *Supervisor) Claim() error {
	if err := checkPIDNamespace(s.opts.KubeletSocket); err != nil {
		return err
	}
	if err := s.acquire(); errors.Is(err, lock.ErrHeld) {
		return err
	}
	return nil
}

// acquire reserves the directory for this instance.
func (s *Supervisor) acquire() error {
	s.files.Lock()
	defer s.files.Unlock()
	if s.lock != nil {
		return nil
	}
	err := trust.Dir(s.opts.Dir)
	if err != nil && (!s.opts.Insecure || !errors.Is(err, trust.ErrUnsafe)) {
		return fmt.Errorf("%s is not used for MPS, set another runtime-dir: %w", s.opts.Dir, err)
	}
	// Not atomicfile.MakeDirs: that follows no link of another user, which Insecure allows.
	if err := os.MkdirAll(s.opts.Dir, 0o755); err != nil {
		return fmt.Errorf("make the directory of MPS: %w", err)
	}
	if s.lock, err = lock.Acquire(filepath.Join(s.opts.Dir, lockName)); err != nil {
		return fmt.Errorf("share GPUs by MPS: %w", err)
	}
	return nil
}

func (s *Supervisor) unlock() error {
	s.files.Lock()
	defer s.files.Unlock()
	if s.lock == nil {
		return nil
	}
	return s.lock.Release()
}

// leftovers are the GPUs that an earlier plugin prepared.
func (s *Supervisor) leftovers() []string {
	entries, err := os.ReadDir(s.opts.Dir)
	if err != nil {
		return nil // MPS was never used
	}
	var uuids []string
	for _, e := range entries {
		if uuidForm.MatchString(e.Name()) && prepared(filepath.Join(s.opts.Dir, e.Name())) {
			uuids = append(uuids, e.Name())
		}
	}
	return uuids
}

// desiredFor returns the desired daemon of a GPU, or nil.
func (s *Supervisor) desiredFor(uuid string) *Daemon {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d, ok := s.desired[uuid]; ok {
		return &d
	}
	return nil
}

// control returns the control program, as it is installed now, for a GPU's daemon.
func (s *Supervisor) control(ctx context.Context, dir string) (*control, error) {
	s.mu.Lock()
	p := s.program
	s.mu.Unlock()
	if _, err := os.Stat(p.Path); err != nil {
		if p, err = s.opts.Program(ctx); err != nil {
			return nil, err
		}
		s.mu.Lock()
		s.program = p
		s.mu.Unlock()
	}
	return &control{helper: s.opts.Helper, dir: dir, program: p}, nil
}

// linkLibraries updates the links to the driver's libraries for one worker at a time.
func (s *Supervisor) linkLibraries(libraries map[string]string) error {
	s.files.Lock()
	defer s.files.Unlock()
	return linkLibraries(s.opts.Dir, libraries)
}
