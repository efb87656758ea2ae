package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/config"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/memory"
	"gpu-cdi-plugin/internal/sdnotify"
	"gpu-cdi-plugin/metrics"
	"gpu-cdi-plugin/mps"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/plugin"
	"gpu-cdi-plugin/resource"
)

func (a *app) serveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve this host's GPUs to the kubelet",
		Long: `Runs the device plugin: it tells the kubelet what GPUs there are and answers which one a container gets. It writes the
CDI spec of these GPUs to --cdi-dir and keeps it true: what the kubelet is told is in the spec before.

It goes on until SIGTERM or SIGINT, then ends the calls under way and removes its sockets; the spec stays. SIGHUP reads
the configuration again; a wrong one is reported and the old one holds. When the kubelet starts again it registers
again. When the driver was replaced it starts itself again with the new one. Under systemd it reports readiness, its
state and the watchdog (Type=notify).

With --mps, GPUs can be shared by CUDA's multi-process service (sharing.mps, experimental): for each of them
nvidia-cuda-mps-control of the driver runs, and the GPU is in exclusive mode. These daemons outlive this one, since
containers go on: the next one takes them over, and ends those that are neither configured any more nor in use. For
that, systemd must have KillMode=process.

What a container gets besides GPUs, where it is configured (extras, imex) and the host has it, is in a spec of its own
kind beside that of the GPUs. When it is configured no longer the spec goes, as soon as no pod has it; one that was
written by hand stays.

A container reads what it was given in /run/gpu/allocation.json. One with devices of several resources finds there what
it has of one of them, and in /run/gpu/allocations a file for each: nvidia.com_gpu.json is for nvidia.com/gpu.

The hook, the driver's library and the directories that it writes to must be root's alone, with all above them: it does
not start where others could change them, unless --insecure-paths allows it.

Another spec file that defines names of --cdi-kind costs what engines no longer take from this one: a device whose UUID
is taken is unhealthy, with the file in the reason, in the log and in /readyz; a taken index, or "all", is a warning. A
name that a file of the same directory defines is left out of the spec, so that the other file keeps it. Where other
files take all devices, as the vendor's own spec does, serve does not start.

A GPU that does not answer is unhealthy after --gpu-timeout, and costs the others nothing. Without a driver at the start
it exits, or waits for one with --fail-on-init-error=false, ready and with no device.

With --listen it answers /metrics, /healthz, and /readyz: every resource is registered and its list is read, and devices
can be given to containers unless the GPUs themselves stand against it.`,
		Example: `  gpu-cdi-plugin serve
  gpu-cdi-plugin serve --config /etc/gpu-cdi-plugin/config.yaml --listen 127.0.0.1:9400
  gpu-cdi-plugin serve --mig-strategy mixed --strategy cdi-cri,device-specs`,
		Annotations: cli.Statuses(exit.OK, exit.Failure, exit.Usage, exit.NoDriver, exit.Locked, exit.Unreachable,
			exit.Interrupted),
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			a.hangups = listenForHangups()
			return a.start(cmd)
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return a.serve(cmd) },
	}
	a.addPluginFlags(cmd)
	return cmd
}

// service is the running device plugin: the actors, and what joins them.
type service struct {
	app     *app
	rules   atomic.Pointer[resource.Config] // what is offered; a reload changes it
	driver  *nodeDriver
	inv     *node.Inventory
	plugin  *plugin.Plugin
	metrics *metrics.Metrics
	systemd *sdnotify.Notifier
	keeper  *mps.Keeper
	news    chan struct{} // something that people may want to know of
	looked  chan struct{} // a look at the node has ended
	told    []resource.Finding
	node    atomic.Pointer[allocator.Node] // the GPUs of the last snapshot and their links

	publishing sync.Mutex
	offered    node.State // what the node has, and the devices whose MPS daemon may not answer
	refused    string     // why some resources keep their old list, if they do
}

func (a *app) serve(cmd *cobra.Command) error {
	defer a.hangups.stop()
	mps.ReapLeft()
	h, err := a.host()
	if err != nil {
		return err
	}
	s, err := a.newService(h, cdi.Begin(h))
	if err != nil {
		return err
	}
	s.driver.begin(cmd.Context())
	err = s.run(cmd.Context(), func(ctx context.Context) error { return s.reloads(ctx, cmd, a.hangups.c) })
	if closing := s.driver.Close(); closing != nil {
		a.log.Debug("the driver's library could not be closed: " + closing.Error())
	}
	if errors.Is(err, errRestart) || errors.Is(err, node.ErrDriverChanged) {
		if a.ending.letGo() || cmd.Context().Err() != nil {
			return nil // it was told to end meanwhile, and the next one would not know
		}
		a.log.Info("starting again, since " + err.Error())
		return restart(a.env)
	}
	return err
}

// newService joins the actors. The search for the driver's files is for the first look at the node.
func (a *app) newService(h host.Host, begun *cdi.Search) (*service, error) {
	hook, err := a.hook()
	if err != nil {
		return nil, err
	}
	if err := cmp.Or(a.checkHook(), a.checkDriverRoot(h)); err != nil {
		return nil, err
	}
	b := thisBuild()
	s := &service{
		app:     a,
		metrics: metrics.New(metrics.BuildInfo{Version: b.Version, Revision: b.Revision, GoVersion: b.Go}),
		systemd: sdnotify.New(a.env),
		news:    make(chan struct{}, 1),
		looked:  make(chan struct{}, 1),
	}
	s.driver = &nodeDriver{
		host: h, explicit: libraryOption(a.NVMLLibrary), check: a.checkLibrary,
		timeout: time.Duration(a.plugin.GPUTimeout), log: a.log, answered: func() { s.inv.Kick() },
	}
	rules := a.plugin.Config // of its own, since a reload changes the app's while a look at the node may read these
	s.rules.Store(&rules)
	s.keeper = s.newKeeper(h)
	s.inv = node.New(node.Options{
		Host: h, Source: s.driver, Dirs: a.specDirs(h), Path: a.servedSpec(),
		Spec:    cdi.Options{Kind: a.CDIKind, HookPath: hook},
		ByIndex: a.plugin.DeviceIDStrategy == config.ByIndex, Extras: a.servedExtras(), Begun: begun,
		AwaitDriver: !a.plugin.FailOnInitError,
		Interval:    min(reconcileInterval, time.Duration(a.plugin.GPUTimeout)/asksIn),
		Given:       func(kind string) (bool, error) { return plugin.Given(a.plugin.DevicePluginDir, kind) },
		Build:       s.build, Publish: s.publish, Log: a.log, Observer: observer{s.metrics, s},
	})
	s.plugin, err = plugin.New(s.pluginOptions())
	return s, err
}

// servedSpec is the spec file, or empty where no container is told a CDI name.
func (a *app) servedSpec() string {
	uses := slices.Contains[[]config.Strategy]
	if uses(a.plugin.Strategy, config.CDICRI) || uses(a.plugin.Strategy, config.CDIAnnotations) {
		return a.ownSpec()
	}
	return ""
}

// servedExtras are what containers get besides GPUs.
func (a *app) servedExtras() []node.Extra {
	var list []node.Extra
	for _, e := range a.plugin.Extras {
		list = append(list, node.Extra{Extra: cdi.Extra(e)})
	}
	if x := a.plugin.IMEX; len(x.Channels) > 0 {
		list = append(list, node.Extra{Extra: cdi.IMEX, Channels: x.Channels, Required: x.Required})
	}
	return list
}

func (s *service) pluginOptions() plugin.Options {
	p := &s.app.plugin
	o := plugin.Options{
		Dir: p.DevicePluginDir,
		Answers: plugin.Answers{
			Kind:             s.app.CDIKind,
			ByIndex:          p.DeviceIDStrategy == config.ByIndex,
			AnnotationPrefix: p.CDIAnnotationPrefix,
			Specs:            s.inv,
			Spec:             func() *specs.Spec { return s.inv.State().Spec },
			Extras:           func() []*specs.Spec { return s.inv.State().Extras },
			Preference:       plugin.Preference{Node: s.node.Load, Policy: p.Allocation.Policy, SharedPolicy: p.Allocation.SharedPolicy},
			AllocationDir:    s.app.allocationDir(),
			MPSDir:           s.app.mpsDir(),
		},
		Log:      s.app.log,
		Observer: observer{s.metrics, s},
	}
	for _, name := range p.Strategy {
		o.Answers.Strategies = append(o.Answers.Strategies, plugin.Strategy(name))
	}
	if p.Registration == config.RegisterWatcher {
		o.RegistryDir = p.PluginsRegistryDir
	}
	return o
}

// build makes the resources by the rules of now, and logs each finding when it begins and when it ends.
func (s *service) build(snapshot *gpu.Snapshot) ([]resource.Resource, error) {
	resources, findings, err := resource.Build(snapshot, *s.rules.Load())
	for _, f := range findings {
		switch {
		case slices.Contains(s.told, f):
		case f.Problem:
			s.app.log.Warn(f.String())
		default:
			s.app.log.Info(f.String())
		}
	}
	for _, f := range s.told {
		if !slices.Contains(findings, f) {
			s.app.log.Info("no longer: " + f.String())
		}
	}
	s.told = findings
	return resources, err
}

// run starts the actors and ends with the first of them.
func (s *service) run(ctx context.Context, reloads actor) error {
	if err := s.plugin.Check(); err != nil { // before there is a spec that nobody serves
		return exit.With(exit.CodeOf(err), s.app.hintKubelet(), err)
	}
	if err := s.app.checkDirs(s.app.log); err != nil {
		return err
	}
	server, err := s.listen(ctx)
	if err != nil {
		return err
	}
	defer server.Close() // which has no effect after its end
	return runAll(ctx, server.Run, func(ctx context.Context) error {
		waiting := s.app.sayWhatHangs()
		err := s.inv.Start(ctx)
		waiting.Stop()
		switch {
		case exit.CodeOf(err) == exit.NoDriver:
			return exit.With(exit.NoDriver, exit.HintOf(err)+"; --fail-on-init-error=false waits for a driver", err)
		case err != nil:
			return err
		}
		return runAll(ctx, s.inv.Run, s.plugin.Run, s.keeper.Run, s.status, reloads, s.watchdog)
	})
}

// hintKubelet is what to do where there is no kubelet.
func (a *app) hintKubelet() string {
	option := "--device-plugin-dir"
	if a.plugin.Registration == config.RegisterWatcher {
		option = "--plugins-registry-dir"
	}
	return "start the kubelet, which makes the directory, or name its own with " + option
}

// reconcileInterval is how often the node is reconciled if nothing happens, unless GPUs must be asked more often.
const reconcileInterval = 30 * time.Second

// listen makes the server of metrics and health; without --listen it is one that nobody can ask.
func (s *service) listen(ctx context.Context) (*metrics.Server, error) {
	address := s.app.plugin.Listen
	if address == "" {
		return &metrics.Server{}, nil
	}
	checks := metrics.Checks{
		Healthy: s.inv.Alive,
		Ready: func() error {
			state := s.inv.State()
			return errors.Join(s.plugin.Ready(), state.Ready())
		},
		Remarks: func() []string {
			state := s.inv.State()
			return state.Remarks()
		},
	}
	server, err := s.metrics.Listen(ctx, address, checks, s.app.log)
	if err == nil {
		s.app.log.Info("metrics and health are served on "+server.Address(), "address", server.Address())
	}
	return server, err
}

func (s *service) watchdog(ctx context.Context) error {
	s.systemd.Watch(ctx, s.inv.Alive, s.app.log)
	return nil
}

func (s *service) tell() { wake(s.news) }

// wake wakes who waits on the channel, which has room for one.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // it is woken already
	}
}

// settling is how long after a look at the node nothing may happen before its memory is given back.
const settling = time.Second

// status tells systemd, and so people, how the service stands.
func (s *service) status(ctx context.Context) error {
	failing := false
	say := func(err error) {
		switch {
		case err != nil && !failing:
			s.app.log.Warn("systemd cannot be told the service's state: " + err.Error())
		case err == nil && failing:
			s.app.log.Info("systemd can be told the service's state again")
		}
		failing = err != nil
	}
	text := s.summary()
	say(s.systemd.Ready(text))
	settled := time.NewTimer(settling)
	defer settled.Stop()
	defer func() { say(s.systemd.Stopping()) }()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.looked:
			settled.Reset(settling)
		case <-settled.C:
			// Looks at the driver and its files, the first ones above all, take more than all that follows.
			done, err := s.driver.whenUnused(memory.GiveBack)
			if err != nil {
				s.app.log.Debug("some memory could not be given back: " + err.Error())
			}
			if !done {
				settled.Reset(settling)
			}
		case <-s.news:
		}
		if next := s.summary(); next != text {
			text = next
			say(s.systemd.Status(text))
		}
	}
}

// summary is the state in a line.
func (s *service) summary() string {
	var parts []string
	for _, r := range s.plugin.Status() {
		text := fmt.Sprintf("%s: %d of %s healthy", r.Resource, r.Healthy, plural(r.Devices, "device"))
		if !r.Connected {
			text += ", not connected to the kubelet"
		}
		parts = append(parts, text)
	}
	state := s.inv.State()
	return strings.Join(append(parts, state.Remarks()...), "; ")
}
