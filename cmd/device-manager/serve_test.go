package main

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestTheWatchdogIsFedWhilePluginsCanRegister(t *testing.T) {
	t.Parallel()
	socket, until := testenv.Systemd(t)
	a := newApp()
	a.Log = slog.New(slog.DiscardHandler)
	a.Env = []string{"NOTIFY_SOCKET=" + socket, "WATCHDOG_USEC=20000"}
	var checks atomic.Int64
	check := func() error {
		if checks.Add(1) < 3 {
			return errors.New("no device plugins can register")
		}
		return nil
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.notify(ctx, check) }()
	until("READY=1")
	until("WATCHDOG=1")
	if n := checks.Load(); n < 3 {
		t.Errorf("the watchdog was fed after %d checks", n)
	}
	stop()
	until("STOPPING=1")
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
