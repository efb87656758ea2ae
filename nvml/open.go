package nvml

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/internal/host"
)

// DefaultTimeout is how long the driver may take unless [WithTimeout] says otherwise. It is long because a driver
// without persistence mode wakes its GPUs one after the other when they are first asked for, seconds for each.
const DefaultTimeout = 30 * time.Second

// Option changes how a library is opened.
type Option func(*options)

type options struct {
	timeout   time.Duration
	tolerance time.Duration
	answered  func()
	host      host.Host
}

// WithTimeout sets how long nvmlInit may take and then, in each snapshot, the driver as a whole, the GPUs, and their links.
func WithTimeout(d time.Duration) Option { return func(o *options) { o.timeout = d } }

// patience is how long a snapshot waits for the GPUs, and then for their links, with [WithTolerance].
const patience = time.Second

// WithTolerance is for a program that reads the GPUs again and again and has other things to do. The first answer about
// the driver as a whole may take the whole timeout, but no snapshot waits for the GPUs, or for their links, for more than
// a second, or the tolerance if that is less. A GPU that has not answered by then is in the snapshot as it was last read,
// and with an error when its call has been under way for the tolerance, or when it was never read. Calls that returned
// late are followed by answered.
func WithTolerance(d time.Duration, answered func()) Option {
	return func(o *options) { o.tolerance, o.answered = d, answered }
}

// WithHost tells where /proc and /sys are. They are read only to say which kernel module is loaded when it does not
// fit the library.
func WithHost(h host.Host) Option { return func(o *options) { o.host = h } }

// Library is an initialised NVML. Its methods may be called by several goroutines at once.
type Library struct {
	driver    *driver
	timeout   time.Duration
	tolerance time.Duration // 0 if each snapshot waits for the whole timeout
	answered  func()
	closed    atomic.Bool
}

// Open loads the library and initialises it. Path is a file or, without a slash, a name for the dynamic loader; empty
// is the loader's libnvidia-ml.so.1. See [Find].
//
// An error wraps one of this package's, has exit status 10, and carries a hint.
func Open(path string, opts ...Option) (*Library, error) {
	return OpenContext(context.Background(), path, opts...)
}

// OpenContext is [Open] that also gives up when ctx ends.
func OpenContext(ctx context.Context, path string, opts ...Option) (*Library, error) {
	h, err := host.New("", "", "")
	if err != nil {
		return nil, err
	}
	o := options{timeout: DefaultTimeout, host: h}
	for _, set := range opts {
		set(&o)
	}
	if path == "" {
		path = libraryName
	}
	d, err := processDriver(path)
	if err != nil {
		return nil, err
	}
	return open(ctx, d, o)
}

func open(ctx context.Context, d *driver, o options) (*Library, error) {
	waiting, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	err := d.initialize(waiting)
	switch {
	case err == nil:
		return &Library{driver: d, timeout: o.timeout, tolerance: o.tolerance, answered: o.answered}, nil
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	default:
		err = d.initError(waiting, err, o.host)
	}
	return nil, fmt.Errorf("initialise the NVIDIA driver library: %w", err)
}

// initError classes an error of nvmlInit.
func (d *driver) initError(ctx context.Context, err error, h host.Host) error {
	if !hasCode(err, nvml.ERROR_LIB_RM_VERSION_MISMATCH) {
		return systemError(err)
	}
	versions := fmt.Sprintf("the library is %s, the kernel module %s", d.libraryVersion(ctx), kernelVersion(h))
	return noDriver(hintMismatch, fmt.Errorf("%w: %s: %w", ErrVersionMismatch, versions, err))
}

// libraryVersion is the driver version that the library belongs to. NVML says it without being initialised, with the
// CUDA version in front: "13.580.126.09".
func (d *driver) libraryVersion(ctx context.Context) string {
	const function = "nvmlSystemGetNVMLVersion"
	v, err := askSystem(ctx, d, function, d.api.SystemGetNVMLVersion)
	if err != nil {
		return "of an unknown version"
	}
	if _, version, ok := strings.Cut(v, "."); ok && strings.Count(version, ".") > 0 {
		return version
	}
	return v
}

// Path is the file of the library, or empty if the dynamic loader does not know it.
func (l *Library) Path() string { return l.driver.path }

// Hangs reports whether calls that a snapshot no longer waited for have not returned. The driver is then not shut down.
func (l *Library) Hangs() bool { return len(l.driver.tasks.abandoned()) > 0 }

// patience is how long a snapshot waits for GPUs or their links.
func (l *Library) patience() time.Duration {
	if l.tolerance > 0 {
		return min(patience, l.tolerance, l.timeout)
	}
	return l.timeout
}

// settling is how old an abandoned call must be for Close not to wait for it: those of a driver that does not hang end at
// once.
const settling = time.Second

// Close gives the driver back; then it can be opened again. No other method may be under way. While abandoned calls have
// not returned the driver is not shut down, since they may use what that would free, and the error says so.
func (l *Library) Close() error {
	if l.closed.Swap(true) {
		return nil
	}
	if n := l.driver.tasks.settle(settling); n > 0 {
		l.driver.owed.Add(1)
		return fmt.Errorf("shut down the NVIDIA driver library: %d earlier calls: %w", n, ErrNoAnswer)
	}
	ctx, cancel := context.WithTimeout(context.Background(), l.timeout)
	defer cancel()
	if err := l.driver.shutdown(ctx); err != nil {
		return fmt.Errorf("shut down the NVIDIA driver library: %w", err)
	}
	return nil
}

var errClosed = errors.New("the NVIDIA driver library is closed")
