package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Checks say how the program is. Nil is well.
type Checks struct {
	// Healthy is whether it works at all, so that starting it again would not help.
	Healthy func() error
	// Ready is whether it can do what it is for.
	Ready func() error
	// Remarks are what people should know of although it is ready, in a line each; nil has none.
	Remarks func() []string
}

// ErrListen is that the address cannot be listened on.
var ErrListen = errors.New("metrics cannot be served")

// Server answers /metrics, /healthz and /readyz. The zero value answers nobody.
type Server struct {
	listener net.Listener
	http     *http.Server
}

// drainTime is how long requests under way may take at the end.
const drainTime = 2 * time.Second

// Listen makes the server; from then on connections wait for Run. Address is HOST:PORT.
func (m *Metrics) Listen(ctx context.Context, address string, c Checks, log *slog.Logger) (*Server, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrListen, err)
	}
	return &Server{l, &http.Server{
		Handler:           m.Handler(c),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}}, nil
}

// Address is where the server listens.
func (s *Server) Address() string { return s.listener.Addr().String() }

// Close ends a server that Run was not called for.
func (s *Server) Close() {
	if s.listener != nil {
		_ = s.listener.Close()
	}
}

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	if s.listener == nil {
		<-ctx.Done()
		return nil
	}
	done := make(chan error, 1)
	go func() { done <- s.http.Serve(s.listener) }()
	select {
	case err := <-done:
		return fmt.Errorf("serve metrics: %w", err)
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	if err := s.http.Shutdown(drain); err != nil {
		_ = s.http.Close()
	}
	if err := <-done; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}

// Handler answers requests for metrics and health.
func (m *Metrics) Handler(c Checks) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	mux.Handle("GET /healthz", answer(c.Healthy, nil))
	mux.Handle("GET /readyz", answer(c.Ready, c.Remarks))
	return mux
}

// answer is 200 with the remarks after "ok", or 503 with the reason.
func answer(check func() error, remarks func() []string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		if err := check(); err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = fmt.Fprintln(w, err)
			return
		}
		_, _ = fmt.Fprintln(w, "ok")
		if remarks != nil {
			for _, line := range remarks() {
				_, _ = fmt.Fprintln(w, line)
			}
		}
	})
}
