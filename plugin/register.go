package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/exit"
)

// register tells the kubelet about an endpoint, over a connection of its own: gRPC would make one that was refused wait
// for a second. Errors have the status exit.Unreachable and say what to do.
//
// The kubelet was told as soon as it may have taken the registration; an error then only means that its answer is not
// known, or that it refused. A kubelet of 1.37 also refuses what it took before.
//
// Between the dial and the call it asks whether the kubelet is still the same. If not, that one is told soon anyway; to
// tell it twice would have it drop the first connection when the second is there.
func register(ctx context.Context, kubeletSocket, endpoint, name string, same func() bool) outcome {
	conn, err := reach(ctx, func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", kubeletSocket)
	})
	if err != nil {
		return outcome{err: exit.With(exit.Unreachable, dialHint(err), fmt.Errorf("register %s: %w", name, err))}
	}
	defer func() { _ = conn.Close() }()
	if !same() {
		return outcome{err: fmt.Errorf("register %s: the kubelet has another socket now", name)}
	}
	client, err := grpc.NewClient("passthrough:///localhost",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(once(conn)))
	if err != nil {
		return outcome{err: fmt.Errorf("register %s: %w", name, err)}
	}
	defer func() { _ = client.Close() }()
	_, err = v1beta1.NewRegistrationClient(client).Register(ctx, &v1beta1.RegisterRequest{
		Version: v1beta1.Version, Endpoint: filepath.Base(endpoint), ResourceName: name, Options: options(),
	})
	if err != nil {
		// Unavailable is gRPC's own word for a connection that broke: that kubelet has ended, or its server has.
		told := status.Code(err) != codes.Unavailable
		hint, what := answerOf(ctx, err)
		err = fmt.Errorf("register %s: the kubelet at %s %w", name, kubeletSocket, what)
		return outcome{told, exit.With(exit.Unreachable, hint, err)}
	}
	return outcome{told: true}
}

// A kubelet that starts has its socket's file a moment before it listens, some 20 us; one that still refuses after
// listenTries does not start.
const (
	listenTries = 10
	listenPause = time.Millisecond
)

// reach connects to the kubelet. It waits for one that just begins to listen: so many tries, and not a time, since on a
// node with much to do a time may be over before the second.
func reach(ctx context.Context, dial func(context.Context) (net.Conn, error)) (net.Conn, error) {
	for try := 1; ; try++ {
		conn, err := dial(ctx)
		if !errors.Is(err, syscall.ECONNREFUSED) || try == listenTries {
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(listenPause):
		}
	}
}

// answerOf is what the kubelet does with a call that ends in an error, and what to do about it: it does not answer in
// time, or it refuses.
func answerOf(ctx context.Context, err error) (hint string, what error) {
	if ctx.Err() != nil {
		return "look at the kubelet's log: it hangs, or the node is overloaded", fmt.Errorf("does not answer: %w", context.Cause(ctx))
	}
	return "", fmt.Errorf("answers: %s", status.Convert(err).Message())
}

// once is a dialer that gives the connection away, and has no second one.
func once(conn net.Conn) func(context.Context, string) (net.Conn, error) {
	next := make(chan net.Conn, 1)
	next <- conn
	return func(context.Context, string) (net.Conn, error) {
		select {
		case c := <-next:
			return c, nil
		default:
			return nil, errors.New("the connection was closed")
		}
	}
}

func dialHint(err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "start the kubelet, or say where its device plugin directory is"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "start the kubelet: nobody listens on its socket"
	case errors.Is(err, fs.ErrPermission):
		return "run as root: the kubelet's socket is root's"
	}
	return ""
}
