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

// TrustCheck applies trusted, a check of internal/trust, to a path. It may allow what trusted refuses.
type TrustCheck func(trusted func(path string) error, path string) error

// Options are the parameters of a Supervisor. All are required but Interval and Deadline.
type Options struct {
	// Dir has a directory for each GPU; see dirs.go. Its path must be the same on the host.
	Dir string
	// KubeletSocket is the kubelet's socket for device plugins; see checkPIDNamespace.
	KubeletSocket string
	// Helper is the command line with which this program calls Enter. Enter's argument is appended.
	Helper []string
	// Program finds the driver's control program. It is called again when that file is gone.
	Program func() (Program, error)
	// Check is applied to Dir and to the programs that are run: only root may change them.
	Check TrustCheck
	// Modes makes a GPU exclusive while it has a daemon, so that no process uses it without MPS.
	Modes ComputeModes
	// Changed is called when the result of Reason may have changed.
	Changed func()
	// Interval is how often a daemon is checked; 0 is 10 seconds. Its end is noticed at once.
	Interval time.Duration
	// Deadline is for all requests of one check together; 0 is 5 seconds.
	Deadline time.Duration
	Log      *slog.Logger
}

// Supervisor runs the control daemons. Call Run once; the other methods may be called at any time.
type Supervisor struct {
	opts Options
	wake wake.Chan // there may be workers to start

	mu      sync.Mutex
	desired map[string]Daemon // by UUID
	workers map[string]*worker

	setup   sync.Mutex // guards what follows
	lock    *lock.Lock // of Options.Dir, or nil
	program Program    // the last one found
}

// New returns a supervisor, which knows the GPUs that an earlier plugin prepared. It changes nothing.
func New(o Options) *Supervisor {
	o.Interval = cmp.Or(o.Interval, 10*time.Second)
	o.Deadline = cmp.Or(o.Deadline, 5*time.Second)
	s := &Supervisor{opts: o, wake: wake.New(), workers: map[string]*worker{}}
	entries, _ := os.ReadDir(o.Dir) // without the directory MPS was never used
	for _, e := range entries {
		if uuid := e.Name(); isUUID(uuid) && prepared(filepath.Join(o.Dir, uuid)) {
			s.workers[uuid] = newWorker(s, uuid)
		}
	}
	return s
}

// Set replaces the desired daemons. It does not wait for them.
func (s *Supervisor) Set(daemons []Daemon) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.desired
	s.desired = map[string]Daemon{}
	for _, d := range daemons {
		s.desired[d.UUID] = d
		if s.workers[d.UUID] == nil {
			s.workers[d.UUID] = newWorker(s, d.UUID)
		}
	}
	for uuid, w := range s.workers {
		if s.desired[uuid] != before[uuid] {
			w.wake.Wake()
		}
	}
	s.wake.Wake()
}

// Reason returns why MPS keeps a device from being allocated, or "". The daemon of a shared GPU must be ready with the
// device's limits. A GPU that is no longer shared remains exclusive until the daemon's last client has ended.
func (s *Supervisor) Reason(d *resource.Device) string {
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

// Run runs the daemons from the first Set until ctx ends. They continue after that.
func (s *Supervisor) Run(ctx context.Context) error {
	var workers sync.WaitGroup
	running := map[string]bool{}
	for {
		select {
		case <-s.wake:
		case <-ctx.Done():
			workers.Wait()
			return s.unlock()
		}
		s.mu.Lock()
		for uuid, w := range s.workers {
			if !running[uuid] {
				running[uuid] = true
				workers.Go(func() { w.run(ctx) })
			}
		}
		s.mu.Unlock()
	}
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
	s.setup.Lock()
	defer s.setup.Unlock()
	if s.lock != nil {
		return nil
	}
	if err := s.opts.Check(trust.Dir, s.opts.Dir); err != nil {
		return fmt.Errorf("%s is not used for MPS, set another runtime-dir: %w", s.opts.Dir, err)
	}
	// Not atomicfile.MakeDirs: that follows no link of another user, which Check may allow.
	err := os.MkdirAll(s.opts.Dir, 0o755)
	if err != nil {
		return fmt.Errorf("make the directory of MPS: %w", err)
	}
	if s.lock, err = lock.Acquire(filepath.Join(s.opts.Dir, lockName)); err != nil {
		return fmt.Errorf("share GPUs by MPS: %w", err)
	}
	return nil
}

func (s *Supervisor) unlock() error {
	s.setup.Lock()
	defer s.setup.Unlock()
	if s.lock == nil {
		return nil
	}
	return s.lock.Release()
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
func (s *Supervisor) control(gpuDir string) (*control, error) {
	s.setup.Lock()
	defer s.setup.Unlock()
	if _, err := os.Stat(s.program.Path); err != nil {
		p, err := s.opts.Program()
		if err != nil {
			return nil, err
		}
		if err := p.prepare(s.opts.Check); err != nil {
			return nil, err
		}
		s.program = p
	}
	return &control{helper: s.opts.Helper, dir: gpuDir, program: s.program}, nil
}
