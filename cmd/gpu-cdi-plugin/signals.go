package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"
)

// afterFirst is when a second signal ends the process at once. Not before: one Ctrl-C can arrive more than once.
const afterFirst = time.Second

// errSignal is why a context ended that a signal ended.
var errSignal = errors.New("told to end by a signal")

// ending is what the process does about SIGINT and SIGTERM: the first one ends its context.
type ending struct {
	first chan os.Signal // ends the context
	kept  chan os.Signal // nobody reads it before letGo
	end   context.CancelCauseFunc
}

func untilSignal(parent context.Context) (context.Context, *ending) {
	ctx, end := context.WithCancelCause(parent)
	e := &ending{first: make(chan os.Signal, 1), kept: make(chan os.Signal, 1), end: end}
	for _, c := range []chan os.Signal{e.kept, e.first} {
		signal.Notify(c, unix.SIGINT, unix.SIGTERM)
	}
	go func() {
		select {
		case <-e.first:
			end(errSignal)
			time.AfterFunc(afterFirst, func() { e.letGo() })
		case <-ctx.Done():
		}
	}()
	return ctx, e
}

// close lets go of the signals and of the context.
func (e *ending) close() {
	e.letGo()
	e.end(nil)
}

// letGo gives the signals their usual effect, to end the process at once, and reports whether one came before. None is
// lost between the two: signal.Stop returns when what came before has been given to the channel.
func (e *ending) letGo() (told bool) {
	signal.Stop(e.first)
	signal.Stop(e.kept)
	return len(e.kept) > 0
}
