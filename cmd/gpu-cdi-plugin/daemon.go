package main

import (
	"cmp"
	"context"
	"errors"
	"os/signal"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/sdnotify"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/nvml"
	"gpu-cdi-plugin/resource"
)

// daemon is what the verbs that reconcile the node have in common. It reports its state to systemd and over HTTP.
type daemon struct {
	app     *app
	host    host.Host
	offer   atomic.Pointer[resource.Config] // which devices are offered; a reload replaces it
	offerOf func(*app) resource.Config      // what the verb offers with this configuration
	session *nvml.Session
	node    *node.Reconciler
	metrics *metrics.Metrics
	systemd *sdnotify.Notifier

	wake wake.Chan // something in the summary may have changed

	// What each verb sets.
	ready          func() error             // why it is not ready besides the node
	summary        func() []string          // what it reports besides the node
	admit          func(*app) error         // why a configuration cannot be used, at the start and at each reload
	stillResetting func() ([]string, error) // node.HealthOptions.StillResetting, where the health is recorded
	released       func() <-chan struct{}   // is closed at the end of device release; nil while there is none
}

// newDaemon joins the parts. What offerOf returns must be a copy: a reload changes the app's own configuration while a
// reconciliation reads the copy. publish gets each new state of the node.
func (a *app) newDaemon(
	specPath, descriptorDir, healthRecord string, offerOf func(*app) resource.Config, publish func(node.State),
) (*daemon, error) {
	h, err := a.host()
	if err != nil {
		return nil, err
	}
	search := driver.Begin(h)
	hook, err := a.hook()
	if err != nil {
		return nil, err
	}
	if err := cmp.Or(a.checkHook(), a.checkDriverRoot(h)); err != nil {
		return nil, err
	}
	b := cli.ThisBuild()
	d := &daemon{
		app:     a,
		host:    h,
		offerOf: offerOf,
		metrics: metrics.New(metrics.BuildInfo{Version: b.Version, Revision: b.Revision, GoVersion: b.Go}),
		systemd: sdnotify.New(a.Env),
		wake:    wake.New(),

		released: func() <-chan struct{} { return nil },
	}
	d.session = a.newSession(h, func() { d.node.Trigger() }, func(e gpu.Event) { d.node.Receive(e) })
	offer := offerOf(a)
	d.offer.Store(&offer)
	d.node = node.New(node.Options{
		Host: h, Source: d.session, Dirs: a.specDirs(h), Path: specPath, DescriptorDir: descriptorDir,
		Spec:    cdi.Options{Kind: a.CDIKind, HookPath: hook},
		ByIndex: a.plugin.DeviceIDStrategy == config.ByIndex, Extras: a.configuredExtras(), Search: search,
		AwaitDriver: !a.plugin.FailOnInitError,
		Interval:    min(node.PollInterval, nvml.SnapshotInterval(time.Duration(a.plugin.GPUTimeout))),
		Check:       func() error { return cmp.Or(a.checkHook(), a.checkDriverRoot(h)) },
		Build: func(s *gpu.Snapshot) ([]resource.Resource, []resource.Finding, error) {
			return resource.Build(s, *d.offer.Load())
		},
		Publish: publish, Log: a.Log, Observer: d.metrics,
		Health: node.HealthOptions{
			Prober: d.session, Rules: a.plugin.Health.Rules(), Path: healthRecord, Observer: d.metrics,
			StillResetting: func() ([]string, error) { return d.stillResetting() },
		},
	})
	return d, nil
}

// configuredExtras are what containers get besides GPUs.
func (a *app) configuredExtras() []node.Extra {
	var list []node.Extra
	for _, e := range a.plugin.Extras {
		list = append(list, node.Extra{Extra: driver.Extra(e)})
	}
	if x := a.plugin.IMEX; len(x.Channels) > 0 {
		list = append(list, node.Extra{Extra: driver.IMEX, Channels: x.Channels, Required: x.Required})
	}
	return list
}

// actor runs until its context ends or it cannot continue.
type actor = func(context.Context) error

// runAll runs actors until ctx ends or one of them returns an error, which it returns after all have ended.
func runAll(ctx context.Context, actors ...actor) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, run := range actors {
		g.Go(func() error { return run(ctx) })
	}
	return g.Wait()
}

// How much the heap may grow, in percent of what is in use, before garbage is collected: at the start, and later. A
// collection before the registration would delay it by 4 ms of 16; what is in use later is 2 MB, so that collecting
// often takes no noticeable time.
const (
	startGCPercent = 200
	gcPercent      = 25
)

// run reconciles the node, and runs the actors beside that, until a signal. Where the driver or the configuration was
// replaced it starts the program again.
func (d *daemon) run(cmd *cobra.Command, actors ...actor) error {
	defer signal.Stop(d.app.hangups)
	debug.SetGCPercent(startGCPercent)
	endOpening := openInBackground(cmd.Context(), d.session)
	err := d.admit(d.app)
	if err == nil {
		err = d.runActors(cmd, actors)
	}
	endOpening()
	if closing := d.session.Close(); closing != nil {
		d.app.Log.Debug("the driver's library could not be closed: " + closing.Error())
	}
	if errors.Is(err, errRestart) || errors.Is(err, node.ErrDriverChanged) {
		// A signal before the release means: end. After it, signals kill the process.
		if d.app.ReleaseSignals() || cmd.Context().Err() != nil {
			return nil
		}
		d.app.Log.Info("starting again, since " + err.Error())
		return restart(d.app.Env)
	}
	return err
}

func (d *daemon) runActors(cmd *cobra.Command, actors []actor) error {
	server, err := d.listen(cmd.Context())
	if err != nil {
		return err
	}
	defer server.Close() // which has no effect after its end
	return runAll(cmd.Context(), server.Run, func(ctx context.Context) error {
		waiting := d.app.logSlowCalls()
		err := d.app.Classify(d.node.Start(ctx))
		waiting.Stop()
		switch {
		case cli.CodeOf(err) == cli.NoDriver:
			return cli.With(cli.NoDriver, cli.HintOf(err)+"; --fail-on-init-error=false waits for a driver", err)
		case err != nil:
			return err
		}
		time.AfterFunc(time.Second, func() { debug.SetGCPercent(gcPercent) })
		return runAll(ctx, append(actors, d.node.Run, d.status, d.reload, d.watchdog)...)
	})
}

// listen returns the server of metrics and health; without --listen it is disabled.
func (d *daemon) listen(ctx context.Context) (*metrics.Server, error) {
	address := d.app.plugin.Listen
	if address == "" {
		return &metrics.Server{}, nil
	}
	checks := metrics.Checks{
		Healthy: d.node.Alive,
		Ready: func() error {
			state := d.node.State()
			return errors.Join(d.ready(), state.Ready())
		},
		Remarks: func() []string {
			state := d.node.State()
			return state.Remarks()
		},
	}
	server, err := d.metrics.Listen(ctx, address, checks, d.app.Log)
	if err == nil {
		d.app.Log.Info("metrics and health are served on "+server.Address(), "address", server.Address())
	}
	return server, err
}

func (d *daemon) watchdog(ctx context.Context) error {
	d.systemd.Watch(ctx, d.node.Alive, d.app.Log)
	return nil
}

// status reports the summary to systemd whenever it changes.
func (d *daemon) status(ctx context.Context) error {
	text := d.statusLine()
	d.app.reported(d.systemd.Ready(text))
	defer func() { d.app.reported(d.systemd.Stopping()) }()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.wake:
		}
		if next := d.statusLine(); next != text {
			text = next
			d.app.reported(d.systemd.Status(text))
		}
	}
}

// reported logs the error of a report to systemd.
func (a *app) reported(err error) {
	if err != nil {
		a.Log.Warn("the state cannot be reported to systemd: " + err.Error())
	}
}

// statusLine is the state in a line.
func (d *daemon) statusLine() string {
	state := d.node.State()
	return strings.Join(append(d.summary(), state.Remarks()...), "; ")
}
