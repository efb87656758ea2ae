package mps

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

const testGPU = "GPU-00000000-0000-0000-0000-000000000001"

// The daemon prints both limits of memory alike, in gigabytes.
var (
	half         = resource.MPSLimits{MemoryBytes: 1500 << 20, ThreadPercent: 50}
	lessThanHalf = resource.MPSLimits{MemoryBytes: 1100 << 20, ThreadPercent: 25}
)

var eventually = testenv.Eventually

// makeShortDir makes a directory with a short path: that of t.TempDir may be too long for sockets.
func makeShortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "mps") //nolint:usetesting // see above
	testenv.Must(t, err)
	t.Cleanup(func() { testenv.Must(t, os.RemoveAll(dir)) })
	return dir
}

// allowUnsafe allows what others can change: tests are below /tmp.
func allowUnsafe(check func(path string) error, path string) error {
	if err := check(path); !errors.Is(err, trust.ErrUnsafe) {
		return err
	}
	return nil
}

// checkStrictly allows nothing that others can change.
func checkStrictly(check func(path string) error, path string) error { return check(path) }

var discardLog = slog.New(slog.DiscardHandler)

func testLog(t *testing.T) *slog.Logger { return slog.New(slog.NewTextHandler(t.Output(), nil)) }

// ask asks the process of a daemon, or what stands for it, for the daemon's status.
func ask(t *testing.T, dir, uuid string, r request) (answer, error) {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", statusPath(dir, uuid))
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	return exchange(conn, r, time.Minute)
}

// start runs a function and returns one that ends it and returns its error.
func start(t *testing.T, run func(context.Context) error) (stop func() error, ended <-chan error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		result <- run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return func() error {
		cancel()
		return <-result
	}, result
}

// linkShm makes the machine's /dev/shm the one that all GPUs of a directory share.
func linkShm(t *testing.T, dir string) {
	t.Helper()
	testenv.Must(t, os.MkdirAll(dir, 0o755))
	testenv.Must(t, os.Symlink(devShm, filepath.Join(dir, shmName)))
}
