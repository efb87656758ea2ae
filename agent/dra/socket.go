package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"gpu-cdi-plugin/agent/pluginsocket"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/wake"
)

const (
	// checkInterval is how often the socket's file is checked.
	checkInterval = wake.Tick
	// drainTimeout is how long running calls may take when the driver stops.
	drainTimeout = 5 * time.Second
	// retireLimit is how long an instance answers at most after another one has taken over. A kubelet 1.37 finds out once
	// a second which sockets are gone.
	retireLimit = 10 * time.Second
	// maxRequest bounds a request, in bytes. A claim has three short names.
	maxRequest = 1 << 20
)

// socket serves the kubelet on a socket in its directory plugins_registry, where the kubelet finds it. It is an actor.
type socket struct {
	*pluginsocket.Socket

	server  *grpc.Server
	conns   *pluginsocket.Connections
	log     *slog.Logger
	changed func()        // is called when currentReason has another result
	busy    func() bool   // whether a call works on a claim
	limit   time.Duration // retireLimit, or less in tests
	retired atomic.Bool   // whether another instance has taken over

	mu     sync.Mutex
	reason string // why the driver is not registered, or empty
}

func newSocket(dir, driver string, beside bool, log *slog.Logger) *socket {
	conns := &pluginsocket.Connections{}
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest), grpc.StatsHandler(conns))
	return &socket{
		Socket: pluginsocket.New(pluginsocket.Options{
			Path: filepath.Join(dir, driver+"-reg.sock"), Second: filepath.Join(dir, driver+"-reg-2.sock"),
			Beside: beside, Server: server, Log: log,
		}),
		server: server, conns: conns, log: log, changed: func() {}, busy: func() bool { return false },
		limit: retireLimit, reason: "the kubelet has not found its socket yet",
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

func (s *socket) currentReason() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reason
}

// run serves until ctx ends. It makes the socket again if it was removed: a kubelet registers a driver only while the
// socket exists. It returns fileio.ErrHeld if another instance serves.
func (s *socket) run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, s.end(context.WithoutCancel(ctx))) }()
	for {
		err := s.Maintain(ctx)
		switch {
		case errors.Is(err, fileio.ErrHeld):
			return fmt.Errorf("serve claims: %w", err)
		case err != nil:
			s.setReason(err) // for example, the kubelet's directory does not exist yet
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wake.Next(checkInterval)):
		case <-s.Ended:
		}
	}
}

// end ends the service. If another instance has taken over, the kubelet sends new calls to that one, but a call may be
// on its way to this one. If it found no server, or the kubelet closed the connection during a call, a pod would wait
// until the kubelet repeats the call: a minute by default. So the calls that run end first. Then the socket is removed,
// and calls are answered until the kubelet has closed its connections. GOAWAY would make it dial again.
func (s *socket) end(ctx context.Context) error {
	if !s.retired.Load() {
		return s.Close(drainTimeout)
	}
	ctx, cancel := context.WithTimeout(ctx, s.limit)
	defer cancel()
	poll(ctx, s.limit, func() bool { return !s.busy() })
	s.Remove()
	poll(ctx, s.limit, func() bool { return !s.conns.Open() })
	return s.Close(0)
}
