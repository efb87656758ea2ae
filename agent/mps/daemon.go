package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/resource"
)

var (
	// ErrNotGPU means that a name is not a GPU's UUID.
	ErrNotGPU = errors.New("not the UUID of a GPU")
	// ErrNoLimits means that the driver is too old to limit the memory of clients.
	ErrNoLimits = errors.New("the driver's MPS cannot limit the memory of clients")
	// ErrShm means that this process and the clients of the daemon do not have the same /dev/shm.
	ErrShm = errors.New("the daemon would not share memory with its clients")
)

const (
	// startLimit is how long a daemon may take to start and accept its limits. askLimit is how long all its answers to
	// one request may take together. stopLimit is how long it may take to end before it is killed.
	startLimit = 20 * time.Second
	askLimit   = 4 * time.Second
	stopLimit  = 5 * time.Second
	// startInterval is the time between attempts to set the limits of a daemon that was just started.
	startInterval = 50 * time.Millisecond
	// shareInterval is how often a GPU's descriptor is read until MPS shares the GPU.
	shareInterval = time.Second
	// restartPause is the time before RunAll restarts a daemon that has ended.
	restartPause = 5 * time.Second
)

// Options are the parameters of Run and RunAll.
type Options struct {
	// Dir has a directory for each GPU; see dirs.go. Its path must be the same for the container runtime.
	Dir string
	// Descriptors is the directory in which the service writes the descriptors of devices.
	Descriptors string
	// Program finds the driver's control program.
	Program func() (Program, error)
	// Check checks that only root can change Dir and the programs that are run.
	Check TrustCheck
	// Interval is how often a daemon whose limits do not change is asked whether it answers; 0 means 10 minutes. Its end
	// is noticed at once.
	Interval time.Duration
	// Output gets what the daemon prints: some lines for each command that it is sent.
	Output io.Writer
	Log    *slog.Logger
}

// RunAll runs the daemons of all GPUs that MPS shares, until ctx ends. It restarts a daemon that has ended.
func RunAll(ctx context.Context, o Options) error {
	var daemons sync.WaitGroup
	defer daemons.Wait()
	known, problem := map[string]bool{}, ""
	for {
		uuids, err := sharedGPUs(o.Descriptors)
		if err != nil && err.Error() != problem {
			problem = err.Error()
			o.Log.Error(problem)
		}
		for _, uuid := range uuids {
			if !known[uuid] {
				known[uuid] = true
				daemons.Go(func() { runAlways(ctx, o, uuid) })
			}
		}
		if !sleep(ctx, shareInterval) {
			return nil
		}
	}
}

// runAlways runs a GPU's daemon, and restarts it whenever it ends.
func runAlways(ctx context.Context, o Options, uuid string) {
	for {
		if err := Run(ctx, o, uuid); err != nil {
			o.Log.Error(uuid + ": " + err.Error())
		}
		if !sleep(ctx, restartPause) {
			return
		}
	}
}

// sleep waits for a time. If ctx ends before that, it returns false.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// Run waits until MPS shares a GPU, and then runs the GPU's daemon. It returns nil when ctx ends, when the service
// requests the end, or when MPS no longer shares the GPU and the last client has ended. Errors wrap ErrNotGPU,
// ErrNoLimits, ErrShm, or fileio.ErrHeld if another process runs the GPU's daemon.
func Run(ctx context.Context, o Options, uuid string) error {
	if !isUUID(uuid) {
		return fmt.Errorf("%q is %w", uuid, ErrNotGPU)
	}
	o.Interval = cmp.Or(o.Interval, 10*time.Minute)
	limits, err := awaitLimits(ctx, o, uuid)
	if limits == nil {
		return err
	}
	if err := checkDir(o); err != nil {
		return err
	}
	daemonDir := filepath.Join(o.Dir, uuid, daemonName)
	if err := os.MkdirAll(daemonDir, 0o755); err != nil {
		return fmt.Errorf("make the MPS directory of %s: %w", uuid, err)
	}
	held, err := fileio.AcquireLock(filepath.Join(daemonDir, lockName))
	if err != nil {
		return fmt.Errorf("run the MPS control daemon of %s: %w", uuid, err)
	}
	defer func() { _ = held.Release() }()
	d, err := newDaemon(o, uuid)
	if err != nil {
		return err
	}
	return d.run(ctx, *limits)
}

// awaitLimits returns the limits of a GPU once MPS shares the GPU, or nil if ctx ends before that.
func awaitLimits(ctx context.Context, o Options, uuid string) (*resource.MPSLimits, error) {
	limits, err := readLimits(o.Descriptors, uuid)
	if limits == nil && err == nil {
		o.Log.Info(uuid + ": serve does not share the GPU by MPS yet; its MPS control daemon starts when it does")
	}
	for limits == nil && err == nil && sleep(ctx, shareInterval) {
		limits, err = readLimits(o.Descriptors, uuid)
	}
	return limits, err
}

// daemon is the daemon of one GPU.
type daemon struct {
	opts    Options
	uuid    string
	control control
	program os.FileInfo // the control program as it was when the daemon was started
	end     context.CancelFunc

	mu       sync.Mutex         // held during a request
	limits   resource.MPSLimits // of the daemon; zero until they are set
	answered time.Time          // when the daemon answered last; zero if it did not answer since
	ending   string             // why the daemon will end after its last client, or empty
}

func newDaemon(o Options, uuid string) (*daemon, error) {
	program, err := o.Program()
	if err != nil {
		return nil, err
	}
	if err := program.prepare(o.Check); err != nil {
		return nil, err
	}
	if err := makeDirs(o.Dir, uuid); err != nil {
		return nil, err
	}
	if err := checkShm(o.Dir, uuid); err != nil {
		return nil, err
	}
	env, err := program.environment(filepath.Join(o.Dir, uuid))
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(program.Path)
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", ControlProgram, err)
	}
	return &daemon{opts: o, uuid: uuid, control: control{path: program.Path, env: env}, program: info}, nil
}

// run starts the daemon, sets its limits, and answers the service until the daemon has ended.
func (d *daemon) run(ctx context.Context, limits resource.MPSLimits) error {
	ctx, d.end = context.WithCancel(ctx)
	defer d.end()
	runtime.LockOSThread() // see startDaemon
	defer runtime.UnlockOSThread()
	p, err := d.control.startDaemon(ctx, d.opts.Output)
	if err != nil {
		return err
	}
	defer d.stop(ctx, p)
	err = d.begin(ctx, p, limits)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	listener, err := d.listen(ctx)
	if err != nil {
		return err
	}
	var answering sync.WaitGroup
	defer answering.Wait()
	connected, disconnect := context.WithCancel(context.WithoutCancel(ctx))
	answering.Go(func() { d.accept(connected, listener) })
	defer disconnect()
	defer listener.Close()
	d.opts.Log.Info(d.uuid + ": the MPS control daemon is ready; each client may use " + describe(limits))
	select {
	case <-ctx.Done():
		d.stop(ctx, p) // before the connection is closed, since the service then takes the GPU as free
		return nil
	case <-p.ended:
		return d.howEnded(p)
	}
}

// begin sets a daemon's limits as soon as it answers.
func (d *daemon) begin(ctx context.Context, p *process, limits resource.MPSLimits) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		err := d.control.limit(ctx, limits)
		if err == nil {
			d.limits, d.answered = limits, time.Now()
			return nil
		}
		if errors.Is(err, ErrNoLimits) {
			return err
		}
		select {
		case <-p.ended:
			return d.howEnded(p)
		case <-ctx.Done():
			return fmt.Errorf("limit the MPS control daemon: %w", err)
		case <-time.After(startInterval):
		}
	}
}

// howEnded returns an error unless the daemon was signalled to end.
func (d *daemon) howEnded(p *process) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ending != "" {
		d.opts.Log.Info(d.uuid + ": the MPS control daemon has ended, since " + d.ending)
		return nil
	}
	return fmt.Errorf("%s ended (%w): see its output for the reason", ControlProgram, p.err)
}

// stop ends the daemon, if it runs, and its servers, which have the GPU open even if there are no clients. It also
// works after ctx has ended.
func (d *daemon) stop(ctx context.Context, p *process) {
	select {
	case <-p.ended:
		return
	default:
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
	defer cancel()
	if _, err := d.control.ask(ctx, "quit -t 1"); err != nil {
		p.kill()
	}
	select {
	case <-p.ended:
	case <-ctx.Done():
		p.kill()
		<-p.ended
	}
}
