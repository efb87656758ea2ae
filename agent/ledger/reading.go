package ledger

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wake"
)

// The books are read at intervals and for calls, and refreshed when an entry may be that of a pod that is not active.

const (
	// interval is the time between two reads, retryInterval that after a read that failed, and waitInterval that while a
	// call waits for the end of a holder.
	interval      = 2 * wake.Tick
	retryInterval = time.Second
	waitInterval  = 200 * time.Millisecond
	// readLimit is how long a read may take.
	readLimit = 2 * time.Second
	// refreshInterval is the least time between two refreshes.
	refreshInterval = 5 * time.Second
	// writeLimit is how long the kubelet may take to write its checkpoint, and writePoll how often it is looked for.
	writeLimit = time.Second
	writePoll  = 2 * time.Millisecond
)

// Wake makes Run read the books again, and refresh them if that is due.
func (l *Ledger) Wake() { l.next.Wake() }

// Run reads the books until ctx ends. When it returns, no call waits any more: another process may be about to answer
// for this one.
func (l *Ledger) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			l.endWaits(context.Cause(ctx))
			return nil
		case <-timer.C:
		case <-l.next:
		}
		err := l.readOrRefresh(ctx)
		l.mu.Lock()
		pause := wake.Next(interval)
		switch {
		case l.waiting > 0:
			pause = waitInterval
		case err != nil:
			pause = retryInterval
		case l.watched && l.wantsRefresh(time.Now()):
			pause = max(waitInterval, refreshInterval-time.Since(l.refreshed))
		}
		l.mu.Unlock()
		timer.Reset(pause)
	}
}

func (l *Ledger) readOrRefresh(ctx context.Context) error {
	l.mu.Lock()
	due := l.wantsRefresh(time.Now()) && time.Since(l.refreshed) >= refreshInterval
	l.mu.Unlock()
	if due {
		return l.refresh(ctx)
	}
	_, err := l.Read(ctx)
	return err
}

// wantsRefresh reports whether the books must be refreshed: until two refreshes after the start, for a checkpoint
// that cannot be read, for what Allocate gave and no book shows, for entries that only some versions have, for pods
// that PodResources does not list any more, and for pods that it has not listed and that have no processes, where the
// kubelet does not account for what they hold.
func (l *Ledger) wantsRefresh(now time.Time) bool {
	b := l.books
	if b.damaged && b.isKubelet() { // it writes a new one, and does not read this one
		return true
	}
	if !b.alive() {
		return false
	}
	if b.refreshes < agreeing {
		return true
	}
	for _, g := range b.given {
		if now.Sub(g.at) > settled {
			return true
		}
	}
	listed := b.listedPods()
	for k, e := range b.entries {
		_, named := b.names[k.pod]
		switch {
		case e.missing >= agreeing:
		case !e.since.IsZero(): // an older version may have overwritten a newer one
			return true
		case listed[k.pod]: // it is active
		case b.advertised[k.name]:
			if named { // it was listed before
				return true
			}
		case !b.podRuns(k, e, now):
			return true
		}
	}
	return false
}

// refresh has the kubelet drop pods that are not active and write its checkpoint, and reads the books.
func (l *Ledger) refresh(ctx context.Context) error {
	before, sent := l.ask(ctx)
	if !sent {
		_, err := l.Read(ctx)
		return err
	}
	after := before
	for end := time.Now().Add(writeLimit); after == before && time.Now().Before(end) && ctx.Err() == nil; {
		time.Sleep(writePoll)
		_, after, _ = l.opts.Kubelet.Checkpoint()
	}
	_, err := l.Read(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.asked { // no version was written since, or it was not read
		l.asked = false
		if err == nil && after == before {
			l.books.silent++
		}
		if before == (podresources.Version{}) {
			l.refreshed = time.Time{} // a kubelet writes the file at the first message
		}
	}
	return err
}

// ask does what makes the kubelet write a refreshed version. It returns the version before that, and false if the
// kubelet does not watch the plugin.
func (l *Ledger) ask(ctx context.Context) (before podresources.Version, sent bool) {
	l.reading.Lock()
	defer l.reading.Unlock()
	begun := time.Now()
	if answer, err := l.list(ctx); err != nil || !answer.Runs {
		return before, false
	}
	_, before, _ = l.opts.Kubelet.Checkpoint()
	l.mu.Lock()
	l.asked, l.before = true, before
	l.mu.Unlock()
	sent = l.opts.Resend()
	l.mu.Lock()
	defer l.mu.Unlock()
	if sent {
		l.refreshed = begun
	}
	l.asked, l.watched = sent, sent
	return before, sent
}

func (l *Ledger) list(ctx context.Context) (podresources.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	return l.opts.Kubelet.List(ctx)
}

// Read reads the books, and returns the containers that PodResources lists. An error means that holders are unknown;
// the ledger then keeps those that it knew. Calls that come while another one reads have one read together.
func (l *Ledger) Read(ctx context.Context) ([]podresources.Holder, error) {
	arrived := l.begun.Load()
	l.reading.Lock()
	defer l.reading.Unlock()
	if l.completed > arrived { // another call began to read after this one had arrived
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.books.listed, l.err
	}
	return l.read(ctx)
}

func (l *Ledger) read(ctx context.Context) ([]podresources.Holder, error) {
	begun := time.Now()
	number := l.begun.Add(1)
	answer, err := l.list(ctx)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	l.completed = number
	checkpoint, version, checkpointErr := l.opts.Kubelet.Checkpoint()
	claims, claimsErr := l.opts.Kubelet.Claims()
	l.mu.Lock()
	l.books.damaged = checkpointErr != nil
	if checkpointErr == nil {
		if version != l.version && checkpoint != nil {
			refreshed, at := l.asked && version != l.before, begun
			if refreshed {
				at, l.asked = l.refreshed, false
			}
			l.books.setCheckpoint(checkpoint, refreshed, at)
		}
		l.version = version
	}
	if claimsErr == nil {
		l.books.setClaims(claims, begun)
	}
	if err == nil {
		l.books.setListed(answer, begun)
	}
	err = errors.Join(err, checkpointErr, claimsErr)
	look := l.books.needsProcesses()
	l.mu.Unlock()
	// The processes come last: a pod that the kubelet has dropped starts none any more.
	var pods proc.Pods
	visible := true
	if look {
		pods, visible = l.opts.Pods()
	}
	listed, write := l.finish(look, pods, visible, err)
	if err := write(); err != nil {
		if !errors.Is(err, fs.ErrNotExist) { // the directory is made a moment later
			l.opts.Log.Warn(err.Error())
		}
		l.mu.Lock()
		l.books.changed = true // to write it again
		l.mu.Unlock()
	}
	return listed, err
}

// finish takes over the processes, if they were looked for, and the error of a read. It returns what PodResources
// lists, and a function that writes what is kept over a restart and has changed.
func (l *Ledger) finish(
	looked bool, pods proc.Pods, visible bool, err error,
) (listed []podresources.Holder, write func() error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.setError(err)
	if looked {
		l.books.setProcesses(pods, visible, time.Now())
	}
	var writes []func() error
	if l.books.dropEnded(time.Now()) {
		forgotten := maps.Clone(l.books.forgotten)
		writes = append(writes, func() error { return l.opts.Files.writeForgotten(forgotten) })
	}
	if l.books.changed && !l.books.beside { // the other instance writes what it knows until its end
		list := l.books.known()
		writes = append(writes, func() error { return l.opts.Files.writeKnown(list) })
		l.books.changed = false
	}
	l.update()
	close(l.round)
	l.round = make(chan struct{})
	return l.books.listed, func() (err error) {
		for _, write := range writes {
			err = errors.Join(err, write())
		}
		return err
	}
}

// setError records the error of a read, or nil.
func (l *Ledger) setError(err error) {
	if (err == nil) != (l.err == nil) {
		l.opts.Changed.Wake()
	}
	l.err = err
}
