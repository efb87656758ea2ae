// Package kubeapi reports the health of a node's devices to the Kubernetes API server: in Events about the Node, and
// in a condition of the Node.
//
// It uses the credentials that the kubelet gives a pod. Nothing waits for the API server: [Reporter.Publish] only
// queues a report.
package kubeapi

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"gpu-cdi-plugin/agent/apiserver"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
)

// Options are the parameters of a Reporter.
type Options struct {
	// Events and Condition select what is reported.
	Events, Condition bool
	// Credentials is the directory with the token and the ca.crt of a service account.
	Credentials string
	// Env has the variables KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, which the kubelet sets, and NODE_NAME.
	Env []string
	Log *slog.Logger

	timing timing // for tests
}

// timing has the intervals and time limits of requests.
type timing struct {
	request time.Duration // limit of a request, including its connection
	// firstPause is the pause after the first failure, and longestPause that after many failures. The real pause is up
	// to half shorter or longer, at random.
	firstPause, longestPause time.Duration
	// heartbeat is the longest time between two reports of the condition, and `between` the shortest.
	heartbeat, between time.Duration
	distance           time.Duration // between two requests for Events after a burst
	last               time.Duration // limit of the last reports, after Run's context has ended
}

var defaultTiming = timing{
	request:    10 * time.Second,
	firstPause: time.Second, longestPause: 20 * time.Second,
	heartbeat: 5 * time.Minute, between: 5 * time.Second,
	distance: 10 * time.Second,
	last:     5 * time.Second,
}

// request sends an object to the API server, and returns nil if the server accepted it. Outside of tests it is
// apiserver.Client.Send.
type request func(ctx context.Context, method, path, contentType string, object any) error

// Reporter reports published states to the API server.
type Reporter struct {
	log        *slog.Logger
	timing     timing
	events     *events     // nil if Events are not reported
	conditions *conditions // nil if the condition is not reported
	reported   lastReported
}

// New returns a Reporter. If there are no credentials, it logs a warning and returns a Reporter that reports nothing:
// containers get devices all the same.
func New(o Options) *Reporter {
	r := &Reporter{log: o.Log, timing: cmp.Or(o.timing, defaultTiming), reported: lastReported{}}
	if !o.Events && !o.Condition {
		return r
	}
	c, err := apiserver.New(apiserver.Options{Credentials: o.Credentials, Env: o.Env, Timeout: r.timing.request})
	if err != nil {
		o.Log.Warn("the health of the GPUs is not reported to the API server, since this program was started without " +
			"the credentials of a service account: " + err.Error())
		return r
	}
	if o.Events {
		r.events = &events{do: c.Send, node: c.Node, timing: r.timing, log: o.Log, wake: wake.New()}
	}
	if o.Condition {
		r.conditions = &conditions{do: c.Send, node: c.Node, timing: r.timing, wake: wake.New()}
	}
	return r
}

// Publish queues a state of the node for reporting and returns at once. Calls must not overlap.
func (r *Reporter) Publish(s node.State) {
	if r.events == nil && r.conditions == nil {
		return
	}
	now := time.Now()
	devices := devicesOf(&s)
	if r.events != nil {
		for _, e := range r.reported.events(devices) {
			r.events.add(e, now)
		}
	}
	if r.conditions != nil {
		r.conditions.set(conditionOf(devices, s.Err, offersAny(s.Resources)), now)
	}
}

// WasReset reports that a GPU was reset. `name` is a name for people, such as "GPU 3".
func (r *Reporter) WasReset(name string) {
	if r.events != nil {
		r.events.add(event{normal, "GPUReset", name + " was reset"}, time.Now())
	}
}

// Run sends the queued reports until ctx ends, and then those that are left: otherwise the Node would keep an earlier
// condition until the next start, for example that a GPU is recovering.
func (r *Reporter) Run(ctx context.Context) error {
	var running sync.WaitGroup
	if r.events != nil {
		running.Go(func() { r.sendLoop(ctx, "an Event", r.events.wake, r.events.send) })
	}
	if r.conditions != nil {
		running.Go(func() { r.sendLoop(ctx, "the node condition "+ConditionType, r.conditions.wake, r.conditions.send) })
	}
	running.Wait()
	r.sendLast(ctx)
	return nil
}

// sendLast sends, after the end of ctx, the reports that are left.
func (r *Reporter) sendLast(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.timing.last)
	defer cancel()
	var sending sync.WaitGroup
	send := func(what string, err error) {
		if err != nil {
			r.log.Warn(what + " was not reported to the API server at the end: " + wording.Shorten(err.Error(), maxMessage))
		}
	}
	if r.events != nil {
		sending.Go(func() {
			_, err := r.events.send(ctx)
			send("an Event", err)
		})
	}
	if r.conditions != nil {
		sending.Go(func() { send("the last condition", r.conditions.sendLast(ctx)) })
	}
	sending.Wait()
}

// sendLoop calls send when it is woken and when the time that send returned is over, until ctx ends. After an error it
// waits, twice as long each time.
func (r *Reporter) sendLoop(
	ctx context.Context, what string, woken wake.Chan, send func(context.Context) (time.Duration, error),
) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	listen, pause, logged := woken, r.timing.firstPause, ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-listen:
		case <-timer.C:
		}
		next, err := send(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			if logged != "" {
				r.log.Info("no longer the case: " + what + " cannot be reported to the API server")
			}
			listen, pause, logged = woken, r.timing.firstPause, ""
		default:
			if text := wording.Shorten(err.Error(), maxMessage); logged != text {
				logged = text
				r.log.Warn(what + " cannot be reported to the API server; retrying: " + logged)
			}
			// The pause is random: otherwise all nodes that lost the API server at the same time would call it again
			// at the same time.
			next = pause/2 + rand.N(pause)
			listen, pause = nil, min(2*pause, r.timing.longestPause)
		}
		timer.Reset(next)
	}
}
