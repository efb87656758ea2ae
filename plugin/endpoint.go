package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

// endpoint serves a resource on a socket and registers it with the kubelet whenever that is needed. It is an actor.
type endpoint struct {
	name   string // the resource's
	path   string // the socket's
	opts   *Options
	log    *slog.Logger
	server *server
	wake   wake.Chan

	// Only the goroutine of run uses these.
	grpc           *grpc.Server
	serving        sync.WaitGroup // has a goroutine for each socket
	lock           *lock.Lock
	socket         *socket
	registration   registration
	lastStream     uint64       // the last ListAndWatch stream before the last Register call
	result         chan outcome // of the Register call that is under way, or nil
	cancelRegister context.CancelFunc

	mu     sync.Mutex
	status Status // without the devices
	warned string // the problem that was last logged as a warning
}

func newEndpoint(r resource.Resource, o *Options, w *dirWatch) (*endpoint, error) {
	server, err := newServer(r, o.Allocate, o.Log, o.Observer)
	if err != nil {
		return nil, err
	}
	e := &endpoint{
		name: r.Name, path: socketPath(o.dir(), r.Name), opts: o, server: server,
		log:    o.Log.With("resource", r.Name),
		wake:   wake.New(),
		status: Status{Resource: r.Name, Problem: "it is not registered yet"},
	}
	server.streams.changed = e.wake.Wake
	w.subscribe(e.wake)
	return e, nil
}

// maxRequest is the size of the largest request, in bytes. A kubelet that asks for a preferred allocation sends the IDs
// of all devices.
const maxRequest = 2 * resource.MaxList

// run serves until ctx ends. Then it ends the calls under way and removes the socket and the lock.
func (e *endpoint) run(ctx context.Context) (err error) {
	e.lock, err = lock.Acquire(filepath.Join(filepath.Dir(e.path), "."+filepath.Base(e.path)+".lock"))
	if err != nil {
		return fmt.Errorf("serve %s: %w", e.name, err)
	}
	defer func() { err = errors.Join(err, e.lock.Release()) }()
	e.grpc = grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest))
	v1beta1.RegisterDevicePluginServer(e.grpc, e.server)
	discovered := e.opts.RegistryDir != ""
	if discovered {
		pluginregistration.RegisterRegistrationServer(e.grpc, &discovery{endpoint: e})
	}
	defer e.stop()
	if err := e.serve(ctx); err != nil {
		return fmt.Errorf("serve %s: %w", e.name, err)
	}
	e.registration = newRegistration(time.Now(), e.opts.StreamGrace, discovered)
	for {
		next, err := e.reconcile(ctx, time.Now())
		if err != nil {
			return fmt.Errorf("serve %s: %w", e.name, err)
		}
		var due <-chan time.Time
		if !next.IsZero() {
			due = time.After(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-e.wake:
		case <-due:
		case o := <-e.result:
			e.finishRegister(o)
		}
	}
}

// socketRetry is the pause after the socket could not be made.
const socketRetry = time.Second

// reconcile restores the socket and the lock, follows the kubelet, and returns when to do so again. An error means that
// another instance holds the lock.
func (e *endpoint) reconcile(ctx context.Context, now time.Time) (next time.Time, err error) {
	// The kubelet's socket first: a kubelet that starts removes ours before it makes its own. So once its socket is
	// seen, the check of ours finds that it was removed.
	kubelet, missing := e.opts.findKubelet()
	switch err := e.restoreSocket(ctx); {
	case errors.Is(err, lock.ErrHeld):
		return time.Time{}, err
	case err != nil:
		e.setProblem(err)
		return now.Add(socketRetry), nil
	}
	streaming := e.server.streams.openAfter(e.lastStream)
	do := e.registration.observe(observation{now: now, kubelet: kubelet, streaming: streaming})
	switch {
	case do.watchBegan:
		e.watchBegan()
	case do.watchEnded:
		e.watchEnded(e.log.Warn, "the ListAndWatch stream ended")
	case do.notWatched:
		e.setProblem(errors.New("the kubelet did not call ListAndWatch after the registration"))
	}
	if missing != nil && e.registration.state != watched { // a watch may outlast the kubelet's socket
		e.setProblem(missing)
	}
	if do.register {
		e.beginRegister(ctx)
	}
	return do.next, nil
}

// findKubelet returns the ID of the kubelet's socket. The error is why there is none.
func (o *Options) findKubelet() (socketID, error) {
	if o.RegistryDir != "" {
		return anyKubelet, nil
	}
	id, err := identify(o.kubeletSocket())
	if err != nil {
		return socketID{}, fmt.Errorf("find the kubelet's socket: %w", explainMissing(err))
	}
	return id, nil
}

// restoreSocket makes the lock's file and the socket again after they were removed.
func (e *endpoint) restoreSocket(ctx context.Context) error {
	if err := e.lock.Renew(); err != nil {
		return err
	}
	if e.socket.inPlace() {
		return nil
	}
	if err := e.serve(ctx); err != nil {
		return err
	}
	e.log.Info("the socket " + e.path + " was removed and is restored")
	return nil
}

// serve serves on a new socket. Connections to the old one stay open.
func (e *endpoint) serve(ctx context.Context) error {
	s, err := listen(ctx, e.path)
	if err != nil {
		return err
	}
	old := e.socket
	e.socket = s
	e.serving.Go(func() {
		// It returns when the socket is closed, which is no error, or the server is stopped.
		_ = e.grpc.Serve(s)
	})
	if old != nil {
		_ = old.Close()
	}
	return nil
}

// beginRegister begins a registration: a Register call, or a new socket where the kubelet discovers sockets.
func (e *endpoint) beginRegister(ctx context.Context) {
	e.stopRegister()
	e.lastStream = e.server.streams.last()
	e.result = make(chan outcome, 1)
	ctx, e.cancelRegister = context.WithTimeoutCause(ctx, e.opts.RegisterTimeout, errors.New("no answer in time"))
	if e.registration.discovered {
		e.result <- outcome{delivered: true, err: e.serve(ctx)}
		return
	}
	kubelet, result := e.registration.kubelet, e.result
	unchanged := func() bool { now, _ := e.opts.findKubelet(); return now == kubelet }
	go func() { result <- callRegister(ctx, e.opts.kubeletSocket(), e.path, e.name, unchanged) }()
}

// stopRegister cancels the Register call that is under way and waits for its end.
func (e *endpoint) stopRegister() {
	if e.result != nil {
		e.cancelRegister()
		<-e.result
		e.result = nil
	}
}

func (e *endpoint) finishRegister(o outcome) {
	e.cancelRegister()
	e.result = nil
	e.registration.finished(time.Now(), o)
	switch {
	case o.err != nil:
		e.refused(o.err)
	case !e.registration.discovered:
		e.accepted()
	}
}

// stop ends the Register call and the streams, and waits for the other calls as long as DrainTimeout. It removes the
// socket first, so that no new calls come.
func (e *endpoint) stop() {
	e.stopRegister()
	if e.socket != nil {
		if err := e.socket.remove(); err != nil {
			e.log.Warn("the socket " + e.path + " could not be removed: " + err.Error())
		}
	}
	e.server.drain()
	force := time.AfterFunc(e.opts.DrainTimeout, e.grpc.Stop)
	e.grpc.GracefulStop()
	force.Stop()
	e.serving.Wait()
	e.watchEnded(e.log.Info, "the plugin stopped")
}

// accepted records that the kubelet accepted the registration.
func (e *endpoint) accepted() {
	e.opts.Observer.Registered(e.name, nil)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.status.Registrations++
	if !e.status.Watched {
		e.status.Problem = "it is registered, and the kubelet has not called ListAndWatch yet"
	}
	log := e.log.Info
	if e.warned != "" { // a kubelet that does not watch accepts every attempt
		log = e.log.Debug
	}
	log(e.name+" is registered with the kubelet", "registrations", e.status.Registrations)
}

// refused records that a registration failed.
func (e *endpoint) refused(err error) {
	e.opts.Observer.Registered(e.name, err)
	e.setProblem(err)
}

func (e *endpoint) watchBegan() {
	e.mu.Lock()
	e.status.Watched, e.status.Problem, e.warned = true, "", ""
	e.mu.Unlock()
	e.opts.Observer.Watched(e.name, true)
	l := e.server.list.Load()
	e.log.Info("the kubelet watches "+e.name, "devices", len(l.devices), "healthy", l.healthy)
}

func (e *endpoint) watchEnded(log func(string, ...any), why string) {
	e.mu.Lock()
	was := e.status.Watched
	e.status.Watched, e.status.Problem = false, why
	e.mu.Unlock()
	if was {
		e.opts.Observer.Watched(e.name, false)
		log("the kubelet no longer watches " + e.name + ": " + why)
	}
}

// setProblem records why the resource is not registered. The same problem is logged as a warning once.
func (e *endpoint) setProblem(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.status.Problem = err.Error()
	log := e.log.Warn
	if e.warned == e.status.Problem {
		log = e.log.Debug
	}
	e.warned = e.status.Problem
	log(e.name + " is not registered with the kubelet: " + e.status.Problem)
}

// currentStatus returns the status with the devices that are advertised now.
func (e *endpoint) currentStatus() Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, l := e.status, e.server.list.Load()
	s.Devices, s.Healthy = len(l.devices), l.healthy
	return s
}
