package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"time"

	"gpu-cdi-plugin/internal/unixsocket"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	// There is a pause before each registration with a kubelet, except with one that runs when the plugin starts. The
	// first pause is short, but long enough for a kubelet that is starting, whose socket file exists some 20 microseconds
	// before it listens, and for one before 1.37 that has just lost this plugin with another one of the resource: if the
	// plugin registers before the kubelet has forgotten the lost one, the kubelet loses it again. Each pause is twice as
	// long as the one before.
	firstPause = 5 * time.Millisecond
	lastPause  = 5 * time.Second
	// steady is how long a watch must last before the next pause is firstPause again. So if a kubelet ends every watch
	// at once, the pauses become longer.
	steady = 10 * time.Second
)

var errNotWatched = errors.New("the kubelet did not call ListAndWatch after the registration")

// stayRegistered registers with each kubelet that starts.
func (e *endpoint) stayRegistered(ctx context.Context) error {
	socket := e.opts.kubeletSocket()
	first, _ := unixsocket.Identify(socket)
	for {
		kubelet, err := e.awaitKubelet(ctx, socket)
		if err != nil {
			return err
		}
		pause := firstPause
		if kubelet == first {
			pause = 0
		}
		if err := e.stayRegisteredWith(ctx, socket, kubelet, pause); err != nil {
			return err
		}
	}
}

// awaitKubelet waits until the kubelet's socket exists.
func (e *endpoint) awaitKubelet(ctx context.Context, socket string) (unixsocket.ID, error) {
	for {
		kubelet, missing := unixsocket.Identify(socket)
		if missing == nil {
			return kubelet, nil
		}
		if errors.Is(missing, fs.ErrNotExist) {
			e.setReason(noKubelet("socket", socket))
		} else {
			e.setReason(fmt.Errorf("find the kubelet: %w", missing))
		}
		changed := func() bool {
			_, err := unixsocket.Identify(socket)
			return err == nil || err.Error() != missing.Error()
		}
		if err := e.maintainUntil(ctx, forever, changed); err != nil {
			return unixsocket.ID{}, err
		}
	}
}

// stayRegisteredWith registers with a kubelet, and registers again if the kubelet does not watch or its watch has
// ended. It returns when the kubelet's socket is gone or belongs to another kubelet. A watch may last longer than the
// socket.
func (e *endpoint) stayRegisteredWith(
	ctx context.Context, socket string, kubelet unixsocket.ID, pause time.Duration,
) error {
	reached := false // whether a Register call may have reached this kubelet
	replaced := func() bool { now, err := unixsocket.Identify(socket); return err == nil && now != kubelet }
	// If a stream opens before a Register call has reached this kubelet, it is the stream of an earlier kubelet.
	watching := func() bool { return reached && e.server.watched() }
	decided := func() bool { return replaced() || watching() }
	for {
		// This also restores our socket: a kubelet that starts removes it before it makes its own.
		if err := e.maintainUntil(ctx, pause, decided); err != nil {
			return err
		}
		pause = min(max(2*pause, firstPause), lastPause)
		if now, _ := unixsocket.Identify(socket); now != kubelet {
			return nil
		}
		if !watching() {
			if e.opts.retired.Load() {
				return e.maintainUntil(ctx, forever, func() bool { return false })
			}
			e.server.watchers.Store(newWatchers())
			e.conns.Forget()
			answer, err := e.register(ctx, replaced)
			if err != nil {
				return err
			}
			reached = answer.reached
			e.registered(answer.err)
			if answer.err != nil {
				continue
			}
			// A kubelet before 1.37 may lose the plugin before it has called ListAndWatch.
			if err := e.maintainUntil(ctx, e.opts.streamGrace, func() bool { return decided() || e.conns.Lost() }); err != nil {
				return err
			}
		}
		switch {
		case replaced():
		case watching():
			began := time.Now()
			if err := e.watch(ctx, func() bool { return replaced() || !watching() }); err != nil {
				return err
			}
			if time.Since(began) >= steady {
				pause = firstPause
			}
		default:
			e.setReason(errNotWatched)
		}
	}
}

// noKubelet returns the reason of an endpoint that does not find the kubelet's directory, or its socket there.
func noKubelet(what, path string) error {
	return fmt.Errorf("there is no %s %s; is the kubelet running, and is this its directory?", what, path)
}

// watch records that the kubelet watches the devices, until `over` returns true.
func (e *endpoint) watch(ctx context.Context, over func() bool) error {
	l := e.server.list.Load()
	e.log.Info("the kubelet watches "+e.name, "devices", len(l.devices), "healthy", l.healthy)
	e.setWatched(true, "")
	err := e.maintainUntil(ctx, forever, over)
	log, why := e.log.Warn, "the ListAndWatch stream ended"
	if err != nil {
		log, why = e.log.Info, stopped
	}
	e.setWatched(false, why)
	log("the kubelet no longer watches " + e.name + ": " + why)
	return err
}

// answer is the result of a Register call.
type answer struct {
	// reached says that the kubelet may have accepted the registration, although there is an error: its answer came
	// too late, or it refused a registration that it had accepted before, as a kubelet 1.37 does.
	reached bool
	err     error
}

// register calls the kubelet's Register. Meanwhile it maintains the socket and the lock, since the kubelet connects to
// the socket before it answers. If another kubelet replaces this one, it cancels the call. The error is that of
// maintainUntil.
func (e *endpoint) register(ctx context.Context, replaced func() bool) (answer, error) {
	calling, cancel := context.WithCancelCause(ctx)
	answers := make(chan answer, 1)
	go func() {
		answers <- e.callRegister(calling)
		e.server.wake.Wake()
	}()
	err := e.maintainUntil(ctx, forever, func() bool { return len(answers) > 0 || replaced() })
	cancel(errors.New("another kubelet replaced it"))
	return <-answers, err
}

// callRegister calls the kubelet's Register.
func (e *endpoint) callRegister(ctx context.Context) answer {
	ctx, cancel := context.WithTimeoutCause(ctx, e.opts.registerTimeout, errors.New("no answer in time"))
	defer cancel()
	kubelet := e.opts.kubeletSocket()
	client, err := grpc.NewClient("passthrough:///localhost",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", kubelet)
		}))
	if err != nil {
		return answer{err: err}
	}
	defer func() { _ = client.Close() }()
	_, err = v1beta1.NewRegistrationClient(client).Register(ctx, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: filepath.Base(e.socket.Path()), ResourceName: e.name,
		Options: e.server.options.calls(),
	})
	switch {
	case err == nil:
		return answer{reached: true}
	case status.Code(err) == codes.Unavailable: // gRPC itself returns it: there is no connection, or it broke
		return answer{err: fmt.Errorf("the kubelet at %s cannot be reached: %s; is it running?",
			kubelet, status.Convert(err).Message())}
	case ctx.Err() != nil:
		return answer{true, fmt.Errorf("the kubelet at %s does not answer; its log may say why: %w",
			kubelet, context.Cause(ctx))}
	}
	return answer{true, fmt.Errorf("the kubelet at %s refused the registration: %s",
		kubelet, status.Convert(err).Message())}
}
