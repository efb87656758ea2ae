package cli

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// graceTime is how long further SIGINT or SIGTERM are ignored after the first one, since one Ctrl-C can arrive several
// times. A signal after that time ends the process at once.
const graceTime = time.Second

// errSignal is the cause of a context that a signal ended.
var errSignal = errors.New("ended by a signal")

// endAtSignal calls `end` at the first SIGINT or SIGTERM. The function release restores the default effect of the
// signals, which ends the process at once, and reports whether a signal has arrived before. No signal is lost between
// the two: signal.Stop returns after all earlier signals have been sent to the channel.
func endAtSignal(end context.CancelCauseFunc) (release func() bool) {
	signals, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM)
	signalled := false
	go func() {
		defer close(done)
		if _, signalled = <-signals; signalled {
			end(errSignal)
			time.AfterFunc(graceTime, func() { signal.Stop(signals) })
		}
	}()
	return sync.OnceValue(func() bool {
		signal.Stop(signals)
		close(signals)
		<-done
		return signalled
	})
}
