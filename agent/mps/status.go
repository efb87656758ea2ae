package mps

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/resource"
)

// The service and the process that runs a daemon exchange one request and one answer per connection, as JSON. The
// process leaves the connection open until the service closes it. If the connection is closed earlier, the service
// knows that the daemon has ended.

// request is a request of the service to the process that runs a daemon.
type request struct {
	// End requests the end of the daemon and its servers, instead of its status.
	End bool `json:"end,omitempty"`
}

// answer is the status of a daemon.
type answer struct {
	// Limits are the limits that the daemon gives its clients, if Error is empty.
	Limits resource.MPSLimits `json:"limits"`
	// Error says why containers cannot use the daemon.
	Error string `json:"error,omitempty"`
}

// maxMessage bounds a request or an answer, in bytes.
const maxMessage = 64 << 10

// statusPath returns the path of the socket of the process that runs a GPU's daemon.
func statusPath(dir, uuid string) string { return filepath.Join(dir, uuid, daemonName, statusName) }

// exchange sends a request and receives the answer within a time limit.
func exchange(conn net.Conn, r request, limit time.Duration) (answer, error) {
	var a answer
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		return a, err
	}
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return a, err
	}
	if err := receive(conn, &a); err != nil {
		return a, fmt.Errorf("no answer within %v: %w", limit, err)
	}
	return a, nil
}

func receive(conn net.Conn, into any) error {
	return json.NewDecoder(io.LimitReader(conn, maxMessage)).Decode(into)
}

// listen listens for the service. This process holds the GPU's lock, so no other process listens on the socket.
func (d *daemon) listen(ctx context.Context) (*net.UnixListener, error) {
	l, err := unixsocket.Listen(ctx, statusPath(d.opts.Dir, d.uuid), unixsocket.OwnerOnly)
	if err != nil {
		return nil, fmt.Errorf("listen on the status socket: %w", err)
	}
	return l, nil
}

// accept answers connections until the listener is closed, and returns when all have been answered.
func (d *daemon) accept(ctx context.Context, l *net.UnixListener) {
	var connections sync.WaitGroup
	defer connections.Wait()
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		connections.Go(func() { d.converse(ctx, conn) })
	}
}

// converse answers one request, and leaves the connection open until the service closes it.
func (d *daemon) converse(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	var r request
	if err := receive(conn, &r); err != nil {
		return
	}
	if r.End {
		d.opts.Log.Info(d.uuid + ": serve requested the end of the MPS control daemon")
		d.end()
	} else if err := json.NewEncoder(conn).Encode(d.status(ctx)); err != nil {
		return
	}
	_, _ = conn.Read(make([]byte, 1))
}

// status gives the daemon the limits in the descriptor if they have changed, and returns the limits that the daemon
// has.
func (d *daemon) status(ctx context.Context) answer {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.update(ctx); err != nil {
		return answer{Error: err.Error()}
	}
	return answer{Limits: d.limits}
}

func (d *daemon) update(ctx context.Context) error {
	limits, err := readLimits(d.opts.Descriptors, d.uuid)
	if err != nil {
		return err
	}
	if err := checkShm(d.opts.Dir, d.uuid); err != nil {
		return err
	}
	installed, err := os.Stat(d.control.path)
	switch {
	case limits == nil:
		return d.drain(ctx, "MPS no longer shares the GPU")
	case err != nil, !os.SameFile(installed, d.program):
		return d.drain(ctx, "the driver was replaced")
	case d.ending != "":
		return d.drain(ctx, d.ending)
	case *limits != d.limits:
		if err := d.control.limit(ctx, *limits); err != nil {
			return fmt.Errorf("its MPS control daemon cannot be limited: %w", err)
		}
		d.limits, d.answered = *limits, time.Now()
		d.opts.Log.Info(d.uuid + ": each client of the MPS control daemon may use " + describe(*limits) + " now")
		return nil
	}
	if time.Since(d.answered) < d.opts.Interval {
		return nil
	}
	if err := d.control.answers(ctx); err != nil {
		d.answered = time.Time{} // ask again with the next request
		return fmt.Errorf("its MPS control daemon does not answer: %w", err)
	}
	d.answered = time.Now()
	return nil
}

// drain makes the daemon end after its last client. Until then it accepts no new clients.
func (d *daemon) drain(ctx context.Context, why string) error {
	if d.ending == "" {
		d.ending = why
		d.opts.Log.Info(d.uuid + ": the MPS control daemon ends when its last client has ended, since " + why)
		go func() { _, _ = d.control.ask(context.WithoutCancel(ctx), "quit") }() // returns when the daemon ends
	}
	return fmt.Errorf("its MPS control daemon ends when its last client has ended, since %s", why)
}
