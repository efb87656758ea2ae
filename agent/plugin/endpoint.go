package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/resource"
)

// endpoint serves a resource on a socket and keeps it registered with the kubelet. It is an actor.
type endpoint struct {
	name    string // of the resource
	planned string // the path of the socket, unless another instance has it
	opts    *Options
	log     *slog.Logger
	server  *server
	conns   connections

	// Only the goroutine of run uses these.
	path    string // of the socket
	grpc    *grpc.Server
	serving sync.WaitGroup // the goroutines that serve sockets
	lock    *fileio.Lock
	socket  *socket
	cleared error // of the attempt to remove what another instance has left

	mu     sync.Mutex
	status Status // without the numbers of devices
}

func newEndpoint(name, path string, s *server, o *Options) *endpoint {
	return &endpoint{
		name: name, planned: path, opts: o, server: s, conns: connections{wake: s.wake}, log: o.Log.With("resource", name),
		status: Status{Resource: name, Reason: "it is not registered yet"},
	}
}

// stopped is the reason of an endpoint that has stopped.
const stopped = "the plugin stopped"

// maxRequest bounds a request, in bytes. For GetPreferredAllocation the kubelet sends the IDs of all devices.
const maxRequest = 2 * resource.MaxList

// run serves until ctx ends. Then it ends the running calls, and removes the socket and the lock.
func (e *endpoint) run(ctx context.Context) (err error) {
	defer func() {
		e.mu.Lock()
		e.status.Reason = stopped // in place of an earlier reason
		e.mu.Unlock()
	}()
	e.path = e.planned
	e.lock, err = fileio.AcquireLock(lockPath(e.path))
	if errors.Is(err, fileio.ErrHeld) && e.opts.Beside {
		e.path = besidePath(e.planned, e.name)
		e.lock, err = fileio.AcquireLock(lockPath(e.path))
	}
	if err != nil {
		return fmt.Errorf("serve %s: %w", e.name, err)
	}
	defer func() { err = errors.Join(err, e.lock.Release()) }()
	e.grpc = grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest))
	v1beta1.RegisterDevicePluginServer(e.grpc, e.server)
	follow := e.stayRegistered
	if e.opts.RegistryDir != "" {
		pluginregistration.RegisterRegistrationServer(e.grpc, &discovery{endpoint: e})
		follow = e.stayDiscovered
	}
	if err := e.listen(ctx); err != nil {
		return fmt.Errorf("serve %s: %w", e.name, err)
	}
	defer e.stop()
	if err := follow(ctx); ctx.Err() == nil {
		return fmt.Errorf("serve %s: %w", e.name, err)
	}
	return nil
}

// forever means that there is no time limit.
const forever time.Duration = math.MaxInt64

// maintainUntil restores the socket and the lock until `done` returns true or the limit is over. When it returns nil,
// both are in place. It returns an error if ctx ends or another instance holds the lock.
func (e *endpoint) maintainUntil(ctx context.Context, limit time.Duration, done func() bool) error {
	timeout, over := time.After(limit), false
	for {
		var retry <-chan time.Time
		err := e.restore(ctx)
		switch {
		case errors.Is(err, fileio.ErrHeld):
			return err
		case err != nil:
			e.setReason(err)
			retry = time.After(time.Second) // no event shows when there are file descriptors or disk space again
		case done() || over:
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timeout:
			over = true
		case <-retry:
		case <-e.server.wake:
		}
	}
}

// restore restores the lock's file and the socket if they were removed. It also makes a new socket if the server of
// the socket has ended.
func (e *endpoint) restore(ctx context.Context) error {
	if err := e.lock.Renew(); err != nil {
		return err
	}
	e.clear(settled)
	if e.socket.inPlace() && !e.socket.ended.Load() {
		return nil
	}
	if err := e.listen(ctx); err != nil {
		return err
	}
	e.log.Info("the socket " + e.path + " is restored: it was removed or closed")
	return nil
}

// clear removes what an instance that was killed has left at the endpoint's other path: a kubelet that finds a socket
// in its registry directory connects to it again and again. What is younger than this is left.
func (e *endpoint) clear(age time.Duration) {
	if e.cleared != nil { // another attempt would change the directory, and so wake the endpoint for the next one
		return
	}
	other := besidePath(e.planned, e.name)
	if e.path == other {
		other = e.planned
	}
	e.cleared = unixsocket.RemoveStale(other, lockPath(other), age, e.log)
}

// settled is the age from which a lock that nobody holds is that of an instance that was killed, and not of one that
// begins.
const settled = time.Second

// listen serves on a new socket. Connections to the old socket stay open.
func (e *endpoint) listen(ctx context.Context) error {
	s, err := listen(ctx, e.path, &e.conns)
	if err != nil {
		return err
	}
	if e.socket != nil {
		_ = e.socket.Close()
	}
	e.socket = s
	e.serving.Go(func() {
		_ = e.grpc.Serve(s) // returns when the socket is closed, or after an error such as a lack of memory
		s.ended.Store(true)
		e.server.wake.Wake()
	})
	return nil
}

// stop ends the streams, and waits up to drainTimeout until the other calls have ended. It removes the socket before
// that, so that no new calls arrive.
func (e *endpoint) stop() {
	if e.socket.inPlace() {
		if err := os.Remove(e.path); err != nil {
			e.log.Warn("the socket " + e.path + " could not be removed: " + err.Error())
		}
	}
	close(e.server.stopped)
	force := time.AfterFunc(e.opts.drainTimeout, e.grpc.Stop)
	e.grpc.GracefulStop()
	force.Stop()
	e.serving.Wait()
	e.clear(0)
}

// registered records the result of a registration.
func (e *endpoint) registered(err error) {
	e.opts.Observer.Registered(e.name, err)
	if err != nil {
		e.setReason(err)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	// A kubelet that does not watch is called again and again, but this is reported once.
	if e.status.Watched || e.status.Reason == errNotWatched.Error() {
		return
	}
	e.status.Reason = "registered, but the kubelet has not called ListAndWatch yet"
	e.log.Info(e.name + " is registered with the kubelet")
}

// setReason records why the resource is not registered. It logs the same reason only once.
func (e *endpoint) setReason(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if reason := err.Error(); reason != e.status.Reason {
		e.status.Reason = reason
		e.log.Warn(e.name + " is not registered with the kubelet: " + reason)
	}
}

// setWatched records whether the kubelet watches the devices, and if not, why.
func (e *endpoint) setWatched(watched bool, reason string) {
	e.mu.Lock()
	e.status.Watched, e.status.Reason = watched, reason
	e.mu.Unlock()
	e.opts.Observer.Watched(e.name, watched)
}

func (e *endpoint) currentStatus() Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.status
}
