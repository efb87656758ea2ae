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
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/resource"
)

// endpoint is a resource's socket and its life with the kubelet. It is an actor.
type endpoint struct {
	name   string
	path   string
	opts   *Options
	log    *slog.Logger
	watch  *watch
	server *server
	wake   chan struct{}

	// What follows is of the goroutine of run alone.
	grpc     *grpc.Server
	lock     *lock.Lock
	socket   *socket
	fresh    bool // the socket was not announced yet
	serving  sync.WaitGroup
	life     life
	since    uint64        // the last stream before the last announcement
	attempt  *announcement // the announcement under way
	relisten time.Time     // when the socket, which could not be made, is tried again
	sockets  backoff

	mu     sync.Mutex
	public Status
	logged string
}

// announcement is a registration under way.
type announcement struct {
	cancel context.CancelFunc
	result chan outcome
}

func newEndpoint(r resource.Resource, o *Options, w *watch) (*endpoint, error) {
	server, err := newServer(r, o.Allocate, o.Log, o.Observer)
	if err != nil {
		return nil, err
	}
	e := &endpoint{
		name: r.Name, path: socketPath(o.dir(), r.Name), opts: o, watch: w, server: server,
		log:  o.Log.With("resource", r.Name),
		wake: make(chan struct{}, 1),
		life: life{grace: o.StreamGrace, finds: o.RegistryDir != ""},
	}
	server.streams.changed = func() { poke(e.wake) }
	w.listen(e.wake)
	return e, nil
}

// run serves until ctx ends. Then the calls under way end, and the socket and the lock are removed.
func (e *endpoint) run(ctx context.Context) (err error) {
	e.lock, err = lock.Acquire(filepath.Join(filepath.Dir(e.path), "."+filepath.Base(e.path)+".lock"))
	if err != nil && !errors.Is(err, lock.ErrHeld) {
		err = exit.With(exit.Failure, "run as root, with a directory of sockets that can be written to", err)
	}
	if err != nil {
		return fmt.Errorf("serve %s: %w", e.name, err)
	}
	defer func() { err = errors.Join(err, e.lock.Release()) }()
	e.grpc = grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest))
	v1beta1.RegisterDevicePluginServer(e.grpc, e.server)
	if e.life.finds {
		registration.RegisterRegistrationServer(e.grpc, &registry{endpoint: e})
	}
	defer e.stop()
	if err := e.listen(ctx); err != nil {
		return fmt.Errorf("serve %s: %w", e.name, err)
	}
	return e.live(ctx)
}

// maxRequest is the size in bytes of the largest request: a kubelet that asks for a preference sends all IDs of a list.
const maxRequest = 2 * resource.MaxList

// live follows the kubelet.
func (e *endpoint) live(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-e.wake:
		case <-timer.C:
		case o := <-e.attempt.ended():
			e.registered(o)
		}
		wake, err := e.step(ctx, time.Now())
		if err != nil {
			return err
		}
		reset(timer, wake)
	}
}

func reset(t *time.Timer, wake time.Time) {
	if wake.IsZero() {
		t.Stop()
		return
	}
	t.Reset(time.Until(wake))
}

// step does what is to be done now and returns when to look again.
func (e *endpoint) step(ctx context.Context, now time.Time) (wake time.Time, err error) {
	// In this order: a kubelet that starts removes our socket before it makes its own, so one that is seen has done so.
	kubelet, problem := e.watch.kubeletSocket()
	if wake, err = e.keepSocket(ctx, now); err != nil || !wake.IsZero() {
		return wake, err
	}
	do := e.life.look(seen{now: now, kubelet: kubelet, streaming: e.server.streams.openAfter(e.since)})
	switch {
	case do.gained:
		e.connected()
	case do.lost:
		e.disconnected(e.log.Warn, "the kubelet stopped reading the list")
	case do.silent:
		e.problem(errors.New("the kubelet did not ask for the list after its registration"))
	}
	if problem != nil {
		e.problem(problem)
	}
	if do.announce {
		e.announce(ctx)
	}
	return do.wake, nil
}

// keepSocket puts the lock's file and the socket back in their places. If the socket cannot be, wake is when to try
// again.
func (e *endpoint) keepSocket(ctx context.Context, now time.Time) (wake time.Time, err error) {
	if now.Before(e.relisten) {
		return e.relisten, nil
	}
	err = e.lock.Renew()
	switch {
	case err == nil && e.socket.inPlace():
		return time.Time{}, nil
	case err == nil:
		err = e.listen(ctx)
	}
	switch {
	case errors.Is(err, lock.ErrHeld):
		return time.Time{}, fmt.Errorf("serve %s: %w", e.name, err)
	case err != nil:
		e.problem(err)
		e.relisten = now.Add(e.sockets.pause())
		return e.relisten, nil
	}
	e.sockets.reset()
	e.log.Info("the socket " + e.path + " was removed, and is made again")
	return time.Time{}, nil
}

// listen serves on a new socket, beside the old one's connections.
func (e *endpoint) listen(ctx context.Context) error {
	s, err := listen(ctx, e.path)
	if err != nil {
		return err
	}
	old := e.socket
	e.socket, e.fresh = s, true
	e.serving.Go(func() {
		// It ends when the socket is closed, which is not an error, or the server is stopped.
		_ = e.grpc.Serve(s)
	})
	if old != nil {
		_ = old.Close()
	}
	return nil
}

// announce tells the kubelet about the socket: where it has one for that, with a call; where not, by a new socket.
func (e *endpoint) announce(ctx context.Context) {
	e.cancel()
	e.since = e.server.streams.last()
	ctx, cancel := context.WithTimeoutCause(ctx, e.opts.RegisterTimeout, errors.New("no answer in time"))
	a := &announcement{cancel: cancel, result: make(chan outcome, 1)}
	e.attempt = a
	if e.life.finds {
		a.result <- outcome{told: true, err: e.show(ctx)}
		return
	}
	kubelet := e.life.kubelet
	same := func() bool { now, _ := e.watch.kubeletSocket(); return now == kubelet }
	go func() { a.result <- register(ctx, e.watch.kubelet, e.path, e.name, same) }()
}

// show makes a socket that the kubelet has not seen.
func (e *endpoint) show(ctx context.Context) error {
	var err error
	if !e.fresh {
		err = e.listen(ctx)
	}
	e.fresh = false
	return err
}

// ended receives the announcement's result; if there is none under way, never.
func (a *announcement) ended() <-chan outcome {
	if a == nil {
		return nil
	}
	return a.result
}

// cancel ends the announcement under way, if any, and waits for its end.
func (e *endpoint) cancel() {
	if e.attempt != nil {
		e.attempt.cancel()
		<-e.attempt.result
		e.attempt = nil
	}
}

// stop ends what runs: first what calls, then what is called, at last by force. Nobody finds the socket any more.
func (e *endpoint) stop() {
	e.cancel()
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
	e.disconnected(e.log.Info, "the plugin stopped")
}
