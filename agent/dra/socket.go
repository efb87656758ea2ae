package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/unixsocket"
)

const (
	// checkInterval is how often the socket's file is checked.
	checkInterval = time.Second
	// drainTimeout is how long running calls may take when the driver stops.
	drainTimeout = 5 * time.Second
	// maxRequest bounds a request, in bytes. A claim has three short names.
	maxRequest = 1 << 20
)

// socket serves the kubelet on a socket in its directory plugins_registry, where the kubelet finds it. It is an actor.
type socket struct {
	beside  bool  // whether another instance may have the path
	cleared error // of the attempt to remove what another instance has left
	log     *slog.Logger
	changed func() // is called when currentReason has another result

	mu     sync.Mutex
	path   string // changes before the socket is made
	other  string // the path if another instance has that one
	reason string // why the driver is not registered, or empty
}

func newSocket(dir, driver string, beside bool, log *slog.Logger) *socket {
	return &socket{
		path: filepath.Join(dir, driver+"-reg.sock"), other: filepath.Join(dir, driver+"-reg-2.sock"), beside: beside,
		log: log, changed: func() {}, reason: "the kubelet has not found its socket yet",
	}
}

// setReason records why the driver is not registered, or that it is.
func (s *socket) setReason(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.reason
	if s.reason = ""; err != nil {
		s.reason = err.Error()
	}
	if s.reason != before {
		s.changed()
	}
	switch s.reason {
	case before:
	case "":
		s.log.Info("the DRA driver is registered with the kubelet")
	default:
		s.log.Warn("the DRA driver is not registered with the kubelet: " + s.reason)
	}
}

// otherServes reports whether another instance serves claims.
func (s *socket) otherServes() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	held, err := fileio.IsHeld(lockPath(s.other))
	return held && err == nil
}

func (s *socket) currentReason() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reason
}

// run serves until ctx ends. It makes the socket again if it was removed: a kubelet registers a driver only while the
// socket exists. It returns fileio.ErrHeld if another instance serves.
func (s *socket) run(ctx context.Context, register func(*grpc.Server)) (err error) {
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest))
	register(server)
	var lock *fileio.Lock
	var current *listener
	defer func() {
		current.remove()
		force := time.AfterFunc(drainTimeout, server.Stop)
		server.GracefulStop()
		force.Stop()
		current.wait()
		if lock != nil {
			_ = unixsocket.RemoveStale(s.other, lockPath(s.other), 0, s.log) // it is logged
			err = errors.Join(err, lock.Release())
		}
	}()
	check := time.NewTicker(checkInterval)
	defer check.Stop()
	for {
		lock, err = s.hold(lock)
		if err == nil && s.cleared == nil { // the kubelet would try to connect to it again and again
			s.cleared = unixsocket.RemoveStale(s.other, lockPath(s.other), checkInterval, s.log)
		}
		if err == nil && !current.inPlace() {
			var next *listener
			if next, err = s.listen(ctx, server); err == nil {
				current.close()
				current = next
			}
		}
		switch {
		case errors.Is(err, fileio.ErrHeld):
			return fmt.Errorf("serve claims: %w", err)
		case err != nil:
			s.setReason(err) // for example, the kubelet's directory does not exist yet
		}
		select {
		case <-ctx.Done():
			return nil
		case <-check.C:
		}
	}
}

// hold takes the lock of the socket, or restores its file.
func (s *socket) hold(lock *fileio.Lock) (*fileio.Lock, error) {
	if lock != nil {
		return lock, lock.Renew()
	}
	lock, err := fileio.AcquireLock(lockPath(s.path))
	if errors.Is(err, fileio.ErrHeld) && s.beside {
		s.mu.Lock()
		s.path, s.other, s.beside = s.other, s.path, false
		s.mu.Unlock()
		lock, err = fileio.AcquireLock(lockPath(s.path))
	}
	return lock, err
}

// lockPath returns the path of a socket's lock.
func lockPath(socket string) string {
	return filepath.Join(filepath.Dir(socket), "."+filepath.Base(socket)+".lock")
}

// listener is one file of the socket, and the goroutine that serves it. The methods accept nil.
type listener struct {
	*net.UnixListener
	path  string
	id    unixsocket.ID
	ended chan struct{}
}

// listen serves on a new socket, to which only root can connect. The holder of the lock may replace an existing one.
func (s *socket) listen(ctx context.Context, server *grpc.Server) (*listener, error) {
	l, err := unixsocket.Listen(ctx, s.path, unixsocket.OwnerOnly)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", s.path, err)
	}
	l.SetUnlinkOnClose(false)
	one := &listener{UnixListener: l, path: s.path, ended: make(chan struct{})}
	one.id, _ = unixsocket.Identify(s.path)
	go func() {
		defer close(one.ended)
		_ = server.Serve(l) // returns when the socket is closed, or after an error such as a lack of memory
	}()
	return one, nil
}

func (l *listener) inPlace() bool {
	if l == nil {
		return false
	}
	select {
	case <-l.ended:
		return false
	default:
	}
	id, err := unixsocket.Identify(l.path)
	return err == nil && id == l.id
}

func (l *listener) close() {
	if l != nil {
		_ = l.Close()
	}
}

func (l *listener) remove() {
	if l.inPlace() {
		_ = os.Remove(l.path)
	}
}

func (l *listener) wait() {
	if l != nil {
		<-l.ended
	}
}
