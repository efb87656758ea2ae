// Package sdnotify notifies systemd of a service's state by the protocol of sd_notify(3), and takes the socket that
// systemd passes to a service by that of sd_listen_fds(3).
package sdnotify

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/wake"
)

// Notifier notifies systemd. The zero value does nothing, and so does a notifier if systemd did not start the process.
type Notifier struct {
	socket   string
	watchdog time.Duration
}

// New returns a notifier that is configured by the environment (NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID). If the
// watchdog is for another process or its time is invalid, it is not used.
func New(env []string) *Notifier {
	v := map[string]string{}
	for _, kv := range env {
		if name, value, ok := strings.Cut(kv, "="); ok {
			v[name] = value
		}
	}
	n := &Notifier{socket: v["NOTIFY_SOCKET"]}
	if pid, ok := v["WATCHDOG_PID"]; ok && pid != strconv.Itoa(os.Getpid()) {
		return n
	}
	if usec, err := strconv.ParseInt(v["WATCHDOG_USEC"], 10, 64); err == nil && usec > 0 && usec < 1<<50 {
		n.watchdog = time.Duration(usec) * time.Microsecond
	}
	return n
}

// Ready reports that the service is ready or has finished a reload. `status` is a line for people.
func (n *Notifier) Ready(status string) error { return n.send("READY=1", "STATUS="+oneLine(status)) }

// Status replaces the status line.
func (n *Notifier) Status(status string) error { return n.send("STATUS=" + oneLine(status)) }

// Reloading reports that a reload of the configuration begins. Ready ends it.
func (n *Notifier) Reloading() error {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return n.send("RELOADING=1", "MONOTONIC_USEC="+strconv.FormatInt(now.Nano()/1000, 10))
}

// Stopping reports that the service stops.
func (n *Notifier) Stopping() error { return n.send("STOPPING=1") }

// Watch notifies systemd's watchdog until ctx ends, twice per timeout, as long as `alive` returns no error. If there
// is no watchdog, Watch does nothing.
func (n *Notifier) Watch(ctx context.Context, alive func() error, log *slog.Logger) {
	if n.watchdog == 0 {
		return
	}
	failing := false
	for {
		problem := "the service hangs, so that systemd's watchdog will restart it: "
		err := alive()
		if err == nil {
			problem = "systemd's watchdog cannot be fed and will restart the service: "
			err = n.send("WATCHDOG=1")
		}
		switch {
		case err != nil && !failing:
			log.Error(problem + err.Error())
		case err == nil && failing:
			log.Info("systemd's watchdog is fed again")
		}
		failing = err != nil
		select {
		case <-ctx.Done():
			return
		case <-time.After(wake.Next(n.watchdog / 2)):
		}
	}
}

func oneLine(s string) string { return strings.ReplaceAll(s, "\n", "; ") }

func (n *Notifier) send(lines ...string) error {
	if n.socket == "" {
		return nil
	}
	if !strings.HasPrefix(n.socket, "/") && !strings.HasPrefix(n.socket, "@") {
		return fmt.Errorf("notify systemd: NOTIFY_SOCKET=%s is neither a path nor an abstract name", n.socket)
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: n.socket, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := conn.Write([]byte(strings.Join(lines, "\n"))); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return nil
}
