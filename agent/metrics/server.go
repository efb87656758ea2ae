package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"gpu-cdi-plugin/internal/promtext"
	"gpu-cdi-plugin/internal/wording"
)

// Checks are the checks behind /healthz and /readyz.
type Checks struct {
	// Healthy returns an error if the program hangs and must be restarted.
	Healthy func() error
	// Ready returns an error if the program cannot do its work at present.
	Ready func() error
	// Remarks returns lines for people that /readyz adds and /metrics counts; nil adds none.
	Remarks func() []string
}

// ErrListen means that the server for metrics and health cannot listen on its address.
var ErrListen = errors.New("metrics cannot be served")

// Server serves /metrics, /healthz and /readyz.
type Server struct {
	listener net.Listener
	http     *http.Server
}

// drainTime is how long running requests may take when Run ends.
const drainTime = 2 * time.Second

// Listen returns a server that listens on an address, HOST:PORT; call Run to serve. The error is ErrListen.
func (m *Metrics) Listen(ctx context.Context, address string, c Checks, log *slog.Logger) (*Server, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrListen, err)
	}
	return &Server{l, &http.Server{
		Handler:           m.handler(c),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}}, nil
}

// Address returns the address on which the server listens, HOST:PORT.
func (s *Server) Address() string { return s.listener.Addr().String() }

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
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

// handler handles the requests for metrics and health.
func (m *Metrics) handler(c Checks) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", m.scrapes(c.Remarks))
	mux.Handle("GET /healthz", report(c.Healthy, nil))
	mux.Handle("GET /readyz", report(c.Ready, c.Remarks))
	return mux
}

// maxScrapes is how many requests for metrics are answered at a time, since each holds a copy of the metrics.
const maxScrapes = 4

// scrapes answers requests for all metrics. Remarks may be nil.
func (m *Metrics) scrapes(remarks func() []string) http.Handler {
	answering := make(chan struct{}, maxScrapes)
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		select {
		case answering <- struct{}{}:
			defer func() { <-answering }()
		default:
			http.Error(w, "too many requests for metrics at a time", http.StatusServiceUnavailable)
			return
		}
		if remarks != nil {
			m.remarks.Set(float64(len(remarks())))
		}
		text, err := promtext.Text(prometheus.GathererFunc(m.gather))
		if err != nil {
			http.Error(w, "collect the metrics: "+err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", promtext.ContentType)
		_, _ = w.Write(text)
	})
}

// report responds with 200 and "ok", or with 503 and the error. The remarks follow in both cases.
func report(check func() error, remarks func() []string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		if err := check(); err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = fmt.Fprintln(w, wording.Visible(err.Error()))
		} else {
			_, _ = fmt.Fprintln(w, "ok")
		}
		if remarks != nil {
			for _, line := range remarks() {
				_, _ = fmt.Fprintln(w, wording.Visible(strings.ReplaceAll(line, "\n", "; ")))
			}
		}
	})
}
