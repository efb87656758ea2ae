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

	"golang.org/x/sys/unix"
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
	conn, err := reach(ctx, kubeletSocket)
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

// A kubelet that starts has its socket's file a moment before it listens, some 20 us; one that is not there after
// listenTime does not start.
const (
	listenTime  = 10 * time.Millisecond
	listenPause = 50 * time.Microsecond
)

// reach connects to the kubelet. It waits for one that just begins to listen.
func reach(ctx context.Context, socket string) (net.Conn, error) {
	var dialer net.Dialer
	late := time.Now().Add(listenTime)
	for {
		conn, err := dialer.DialContext(ctx, "unix", socket)
		if !errors.Is(err, syscall.ECONNREFUSED) || time.Now().After(late) {
			return conn, err
		}
		// Go's timers may come a millisecond late, which is long here.
		pause := unix.NsecToTimespec(listenPause.Nanoseconds())
		_ = unix.Nanosleep(&pause, nil)
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
