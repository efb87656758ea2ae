// Package pluginsocket serves gRPC to the kubelet on a socket in one of its directories, which anybody may empty: a
// kubelet that starts removes all files there.
//
// Beside each socket is the file of a lock, so that only one instance serves there. An instance that begins while
// another one is about to end has a second path. The package does not register the socket with the kubelet: the doors
// agent/plugin and agent/dra do.
package pluginsocket

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/internal/wake"
)

// Options are the parameters of a Socket. All are required.
type Options struct {
	// Path is the path of the socket, and Second that of an instance that finds the first one taken.
	Path, Second string
	// Beside says that another instance may still have the path and is about to end.
	Beside bool
	// Server serves the socket. Close stops it.
	Server *grpc.Server
	Log    *slog.Logger
}

// Socket is a socket to which only root can connect, and its lock. Only Path and OtherServes may be called concurrently
// with other methods.
type Socket struct {
	// Ended is woken when a server has ended, and so Maintain should be called.
	Ended wake.Chan

	opts    Options
	second  atomic.Bool // whether it has the second path
	lock    *fileio.Lock
	current *listener
	serving sync.WaitGroup // the goroutines that serve sockets
	cleared error          // of the attempt to remove what another instance has left
}

// listener is one of the sockets that were at the path one after the other.
type listener struct {
	*net.UnixListener

	id    unixsocket.ID // zero if another program removed the socket at once
	ended atomic.Bool   // whether the server has returned
}

// New returns a Socket that is made by the first call of Maintain. Call Close at the end.
func New(o Options) *Socket { return &Socket{Ended: wake.New(), opts: o} }

// Path returns the path of the socket. It may change until Maintain has succeeded once.
func (s *Socket) Path() string {
	if s.second.Load() {
		return s.opts.Second
	}
	return s.opts.Path
}

// other returns the path that another instance may have.
func (s *Socket) other() string {
	if s.second.Load() {
		return s.opts.Path
	}
	return s.opts.Second
}

// lockPath returns the path of a socket's lock.
func lockPath(socket string) string {
	return filepath.Join(filepath.Dir(socket), "."+filepath.Base(socket)+".lock")
}

// OtherServes reports whether another instance holds the lock of the other path.
func (s *Socket) OtherServes() bool {
	held, err := fileio.IsHeld(lockPath(s.other()))
	return held && err == nil
}

// Maintain makes the socket and the lock if they do not exist: at first, after they were removed, and after the server
// has ended. Connections to an old socket stay open. If another instance holds the lock, the error wraps
// fileio.ErrHeld; after another error a later call may succeed.
func (s *Socket) Maintain(ctx context.Context) error {
	if err := s.hold(); err != nil {
		return err
	}
	s.clear(settled)
	if s.inPlace() && !s.current.ended.Load() {
		return nil
	}
	restored := s.current != nil
	if err := s.Renew(ctx); err != nil {
		return err
	}
	if restored {
		s.opts.Log.Info("the socket " + s.Path() + " is restored: it was removed or closed")
	}
	return nil
}

// hold takes the lock, or restores its file.
func (s *Socket) hold() (err error) {
	if s.lock != nil {
		return s.lock.Renew()
	}
	s.lock, err = fileio.AcquireLock(lockPath(s.Path()))
	if errors.Is(err, fileio.ErrHeld) && s.opts.Beside && !s.second.Swap(true) {
		s.lock, err = fileio.AcquireLock(lockPath(s.Path()))
	}
	return err
}

// Renew serves on a new socket in place of the present one. The holder of the lock may replace any socket that is
// there; if the file is not a socket, that is an error. Call it only after Maintain has succeeded.
func (s *Socket) Renew(ctx context.Context) error {
	unix, err := unixsocket.Listen(ctx, s.Path(), unixsocket.OwnerOnly)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", s.Path(), err)
	}
	unix.SetUnlinkOnClose(false)
	l := &listener{UnixListener: unix}
	l.id, _ = unixsocket.Identify(s.Path())
	if s.current != nil {
		_ = s.current.Close()
	}
	s.current = l
	s.serving.Go(func() {
		_ = s.opts.Server.Serve(l) // returns when the socket is closed, or after an error such as a lack of memory
		l.ended.Store(true)
		s.Ended.Wake()
	})
	return nil
}

// inPlace reports whether the socket's file is still at its path.
func (s *Socket) inPlace() bool {
	if s.current == nil {
		return false
	}
	id, err := unixsocket.Identify(s.Path())
	return err == nil && id == s.current.id
}

// Remove removes the socket, so that no new connections arrive. Calls on open connections are answered. A kubelet
// closes its connections to a socket in plugins_registry that is gone.
func (s *Socket) Remove() {
	if !s.inPlace() {
		return
	}
	if err := os.Remove(s.Path()); err != nil {
		s.opts.Log.Warn("the socket " + s.Path() + " could not be removed: " + err.Error())
	}
}

// Close removes the socket, and tells clients with open connections to send no more calls. Then it waits until the
// running calls have ended, at most for the limit, and releases the lock.
func (s *Socket) Close(limit time.Duration) error {
	s.Remove()
	force := time.AfterFunc(limit, s.opts.Server.Stop)
	s.opts.Server.GracefulStop()
	force.Stop()
	s.serving.Wait()
	if s.lock == nil {
		return nil
	}
	s.clear(0)
	return s.lock.Release()
}
