package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/agent/pluginsocket"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/resource"
)

// endpoint serves a resource on a socket and keeps it registered with the kubelet. It is an actor.
type endpoint struct {
	name    string // of the resource
	planned string // the path of the socket, unless another instance has it
	opts    *Options
	log     *slog.Logger
	server  *server
	conns   pluginsocket.Connections
	socket  *pluginsocket.Socket

	mu     sync.Mutex
	status Status // without the numbers of devices
}

func newEndpoint(name, path string, s *server, o *Options) *endpoint {
	e := &endpoint{
		name: name, planned: path, opts: o, server: s, conns: pluginsocket.Connections{Closed: s.wake},
		log:    o.Log.With("resource", name),
		status: Status{Resource: name, Reason: "it is not registered yet"},
	}
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest), grpc.StatsHandler(&e.conns))
	v1beta1.RegisterDevicePluginServer(server, s)
	if o.RegistryDir != "" {
		pluginregistration.RegisterRegistrationServer(server, &discovery{endpoint: e})
	}
	e.socket = pluginsocket.New(pluginsocket.Options{
		Path: path, Second: besidePath(path, name), Beside: o.Beside, Server: server, Log: e.log,
	})
	return e
}

// stopped is the reason of an endpoint that has stopped.
const stopped = "the plugin stopped"

// maxRequest bounds a request, in bytes. For GetPreferredAllocation the kubelet sends the IDs of all devices.
const maxRequest = 2 * resource.MaxList

// run serves until ctx ends. Then it ends the running calls, and removes the socket and the lock.
func (e *endpoint) run(ctx context.Context) (err error) {
	defer func() {
		close(e.server.stopped)
		err = errors.Join(err, e.socket.Close(e.opts.drainTimeout))
		e.mu.Lock()
		e.status.Reason = stopped // in place of an earlier reason
		e.mu.Unlock()
	}()
	follow := e.stayRegistered
	if e.opts.RegistryDir != "" {
		follow = e.stayDiscovered
	}
	err = e.socket.Maintain(ctx)
	if err == nil {
		err = follow(ctx)
	}
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("serve %s: %w", e.name, err)
}

// forever means that there is no time limit.
const forever time.Duration = math.MaxInt64

// maintainUntil restores the socket and the lock until `done` returns true or the limit is over. When it returns nil,
// both are in place. It returns an error if ctx ends or another instance holds the lock.
func (e *endpoint) maintainUntil(ctx context.Context, limit time.Duration, done func() bool) error {
	timeout, over := time.After(limit), false
	for {
		var retry <-chan time.Time
		err := e.socket.Maintain(ctx)
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
		case <-e.socket.Ended:
		}
	}
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
