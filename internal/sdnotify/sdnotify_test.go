package sdnotify

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"
)

// listen opens systemd's end of the socket.
func listen(t *testing.T, name string) *net.UnixConn {
	t.Helper()
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	testenv.Must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func receive(t *testing.T, c *net.UnixConn) string {
	t.Helper()
	testenv.Must(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
	b := make([]byte, 4096)
	n, err := c.Read(b)
	testenv.Must(t, err)
	return string(b[:n])
}

func TestMessages(t *testing.T) {
	for _, name := range []string{filepath.Join(t.TempDir(), "notify"), fmt.Sprintf("@sdnotify-test-%d", os.Getpid())} {
		systemd := listen(t, name)
		n := New([]string{"NOTIFY_SOCKET=" + name})
		cases := map[string]struct {
			send func() error
			want string
		}{
			"ready":     {func() error { return n.Ready("8 devices") }, "READY=1\nSTATUS=8 devices"},
			"status":    {func() error { return n.Status("two\nlines") }, "STATUS=two; lines"},
			"stopping":  {n.Stopping, "STOPPING=1"},
			"reloading": {n.Reloading, "RELOADING=1\nMONOTONIC_USEC="},
		}
		for what, c := range cases {
			testenv.Must(t, c.send())
			got := receive(t, systemd)
			if what == "reloading" {
				got, _, _ = strings.Cut(got, "USEC=")
				got += "USEC="
			}
			if got != c.want {
				t.Errorf("%s: systemd gets %q, want %q", what, got, c.want)
			}
		}
	}
}

func TestWithoutASocketNothingIsSent(t *testing.T) {
	if err := New(nil).Ready("up"); err != nil {
		t.Error(err)
	}
	if err := New([]string{"NOTIFY_SOCKET=vsock:2:1"}).Ready("up"); err == nil {
		t.Error("a socket of another kind is not refused")
	}
	if err := New([]string{"NOTIFY_SOCKET=/nonexistent"}).Ready("up"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}

func TestWatchdog(t *testing.T) {
	const second = "WATCHDOG_USEC=1000000"
	cases := map[string]struct {
		env  []string
		want time.Duration
	}{
		"for any process":               {[]string{second}, time.Second},
		"of this process":               {[]string{second, fmt.Sprintf("WATCHDOG_PID=%d", os.Getpid())}, time.Second},
		"of another process":            {[]string{second, "WATCHDOG_PID=1"}, 0},
		"none":                          {nil, 0},
		"with a time that is no number": {[]string{"WATCHDOG_USEC=soon"}, 0},
		"with a negative time":          {[]string{"WATCHDOG_USEC=-1"}, 0},
	}
	for name, c := range cases {
		if got := New(c.env).watchdog; got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestTheWatchdogIsFedOnlyWhileTheServiceIsAlive(t *testing.T) {
	name := filepath.Join(t.TempDir(), "notify")
	systemd := listen(t, name)
	n := New([]string{"NOTIFY_SOCKET=" + name, "WATCHDOG_USEC=20000"})
	ctx, cancel := context.WithCancel(t.Context())
	var calls atomic.Int32
	var log strings.Builder
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.Watch(ctx, func() error {
			if n := calls.Add(1); n > 3 && n < 8 {
				return fmt.Errorf("stuck for %d s", n)
			}
			return nil
		}, slog.New(slog.NewTextHandler(&log, nil)))
	}()
	for range 3 {
		if got := receive(t, systemd); got != "WATCHDOG=1" {
			t.Errorf("systemd gets %q", got)
		}
	}
	for calls.Load() < 7 {
		time.Sleep(time.Millisecond)
	}
	_ = systemd.SetReadDeadline(time.Now().Add(time.Millisecond))
	if n, _ := systemd.Read(make([]byte, 100)); n > 0 && calls.Load() < 8 {
		t.Error("the watchdog was fed although the service was stuck")
	}
	for calls.Load() < 9 {
		time.Sleep(time.Millisecond)
	}
	cancel()
	<-done
	for _, line := range []string{
		"the service hangs, so that systemd's watchdog will restart it: stuck for 4 s",
		"systemd's watchdog is fed again",
	} {
		if n := strings.Count(log.String(), line); n != 1 {
			t.Errorf("%q is logged %d times:\n%s", line, n, &log)
		}
	}
}
