package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/dra"
	"gpu-cdi-plugin/agent/kubeapi"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/agent/plugin"
	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/internal/sdnotify"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// Serve advertises the devices of the host to the kubelet until ctx ends. The error may be
// ErrSuccessorEnded, or one for which NeedsRestart says that the process must restart.
//
// The parts are made from the bottom up, and each gets those below it: the node, the preparation of devices, the
// plugin, and the publisher.
func Serve(ctx context.Context, o *Options) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	c, m := &o.Config, metrics.New(o.Build)
	again, changed, watched := wake.New(), wake.New(), wake.New()

	effective := &current{}
	effective.Store(c)
	resets := newResets(o)
	offer := func() resource.Config { return effective.Load().Config }
	n := node.New(nodeOptions(o, files{servedSpec(c), DescriptorDir(c), HealthRecord(c)}, offer, m, resets.StillResetting))
	devs := &devices{o.Host, n, n.Monitor(), effective, o.Log}

	runner := prepare.New(prepare.Options{
		Host: o.Host, Driver: o.Driver, State: devs, Check: o.Trust.CheckProgram, Resetter: resets, Log: o.Log,
	})
	rel := &releaser{
		host: o.Host, node: n, monitor: n.Monitor(), runner: runner, changed: again, log: o.Log,
		requests: make(chan *release),
	}
	kubelet := &podresources.Source{Host: o.Host, Socket: c.PodResourcesSocket, PluginDir: c.DevicePluginDir}
	var p *plugin.Plugin
	held := ledger.New(ledger.Options{
		Beside: c.TakeOver, Kubelet: kubelet, Driver: dra.DefaultDriver, Pods: runningPods,
		Resend: func() bool { return p.Resend() },
		Files: ledger.Files{
			Parents: filepath.Join(c.RuntimeDir, "parents.json"), Forgotten: filepath.Join(c.StateDir, "forgotten.json"),
			Known: filepath.Join(c.RuntimeDir, "holders.json"),
		},
		Changed: again, Log: o.Log,
	})
	daemons := mps.New(mps.MonitorOptions{Dir: MPSDir(c), Modes: o.Driver, Changed: again.Wake, Log: o.Log})
	prep := &preparer{
		devices: devs, runner: runner, releaser: rel, mps: daemons, ledger: held, metrics: m, changed: changed, log: o.Log,
		undone: map[string]string{}, record: prepare.NewRecordFile(Preparations(c), devs.offered, o.Log),
	}

	if c.PodMetrics {
		m.AddHolders(held.Holdings)
	}
	obs := observer{m, changed, watched, held.Wake}
	p, err := plugin.New(pluginOptions(o, prep, held, obs))
	if err != nil {
		return err
	}
	var claims *dra.Driver
	if servesClaims(c) {
		if claims, err = newDRA(o, held, prep, obs); err != nil {
			return err
		}
		m.AddClaims(claims.Prepared)
	}
	reporter := newReporter(o)
	displaced := ledger.NewDisplaced(ledger.DisplacedOptions{
		Allocatable: kubelet.Allocatable, Watched: func() bool { return p.Ready() == nil }, Changed: changed,
		Lost: func(resource string) {
			o.Log.Warn("the kubelet watches " + resource + " and has none of its devices: it is registered again")
			p.Reconnect(resource)
		},
	})
	pub := &publisher{
		config: c, devices: devs, plugin: p, dra: claims, mps: daemons, ledger: held, displaced: displaced, releaser: rel,
		reporter: reporter, metrics: m, weights: c.Allocation.Weights, again: again, changed: changed,
	}
	admin := &administrator{
		node: n, monitor: n.Monitor(), devices: devs, runner: runner, releaser: rel, reporter: reporter, mps: daemons,
		ledger: held, handOver: newHandOver(n, runner, rel, o.Log),
	}
	used := prepare.NewUseChecker(prepare.UseCheckerOptions{
		Runner: runner, State: n, Offered: devs.toCheck, Held: prep.held, Log: o.Log,
	})
	s := &service{
		opts: o, config: effective, plugin: p, dra: claims, publisher: pub, preparer: prep, releaser: rel, ledger: held,
		displaced: displaced, node: n, handOver: admin.handOver,
		control: &control.Server{Dir: c.RuntimeDir, Log: o.Log, Handler: admin},
		others:  []actor{daemons.Run, reporter.Run, held.Run, displaced.Run, used.Run},
	}
	if c.Leaves() {
		s.leaver = newLeaver(c, held, claims, end, o.Log)
		s.others = append(s.others, s.leaver.run)
	}
	if err := p.Check(); err != nil { // before the spec is written
		return err
	}
	d := &daemon{
		opts: o, role: s, node: n, metrics: m, changed: changed, systemd: sdnotify.New(o.Env), takesOver: c.TakeOver,
		watched: watched, locked: s.restoreClaims, alone: s.alone,
	}
	if err := d.run(ctx); err != nil || s.leaver == nil {
		return err
	}
	return s.leaver.result()
}

// service is the role of Serve.
type service struct {
	opts      *Options
	config    *current
	plugin    *plugin.Plugin
	dra       *dra.Driver // or nil
	publisher *publisher
	preparer  *preparer
	releaser  *releaser
	ledger    *ledger.Ledger
	displaced *ledger.Displaced
	node      *node.Reconciler
	handOver  *handOver
	control   *control.Server
	leaver    *leaver // or nil
	others    []actor
}

var _ role = (*service)(nil)

func (s *service) publish(state node.State) { s.publisher.publish(state) }

func (s *service) offer(c *config.Config) resource.Config { return c.Config }

func (s *service) use(c *config.Config) {
	s.config.Store(c)
	s.publisher.again.Wake()
}

// check checks the directories. If no restart is needed, they are already in use.
func (s *service) check(fresh *Options) error {
	if fresh != s.opts && !needsRestart(&s.opts.Config, &fresh.Config) {
		return nil
	}
	return checkDirs(fresh, s.opts.Log)
}

func (s *service) ready() error {
	if s.leaver != nil {
		return s.leaver.ready()
	}
	if s.opts.Config.Door == config.PluginDoor {
		return errors.Join(s.plugin.Ready(), s.publisher.ready())
	}
	return errors.Join(s.plugin.Ready(), s.dra.Ready(), s.publisher.ready())
}

// restoreClaims reads the records of the prepared claims.
func (s *service) restoreClaims(ctx context.Context) error {
	if s.dra == nil {
		return nil
	}
	s.publisher.holdBack(s.dra.Offered())
	return s.dra.Restore(ctx)
}

// alone reads what another instance has given, and offers what was held back because of that.
func (s *service) alone(ctx context.Context) error {
	s.ledger.Alone()
	if s.dra == nil {
		return nil
	}
	if err := s.dra.RestoreAfter(ctx); err != nil {
		return err
	}
	if s.dra.Offered() {
		s.dra.Leave(ctx)
	}
	s.publisher.holdBack(false)
	return nil
}

// summary describes the state of each resource.
func (s *service) summary() []string {
	var parts []string
	for _, r := range s.plugin.Status() {
		text := fmt.Sprintf("%s: %d of %s healthy", r.Resource, r.Healthy, wording.Count(r.Devices, "device"))
		if !r.Watched {
			text += ", not connected to the kubelet"
		}
		parts = append(parts, text)
	}
	if s.dra != nil {
		parts = append(parts, s.dra.Summary())
	}
	return parts
}

func (s *service) remarks() []node.Remark {
	var list []node.Remark
	if err := s.releaser.checkOpen(); err != nil {
		list = append(list, node.Remark{Key: "released", Level: slog.LevelInfo, Text: err.Error()})
	}
	for _, r := range []node.Remark{
		{Key: "holders", Level: slog.LevelWarn, Text: s.ledger.Unknown()},
		{Key: "IDs", Level: slog.LevelWarn, Text: s.ledger.Unrecognised()},
		{Key: "displaced", Level: slog.LevelWarn, Text: s.displaced.Text()},
	} {
		if r.Text != "" {
			list = append(list, r)
		}
	}
	if s.dra != nil {
		list = append(list, s.dra.Remarks()...)
	}
	return slices.Concat(list, s.publisher.remarks(), s.preparer.remarks())
}

func (s *service) keepOpen(ctx context.Context) (until string, opened <-chan struct{}) {
	return s.handOver.keepOpen(ctx)
}

// run implements role. When another instance takes over, the doors end last, so that the kubelet can allocate devices
// until it knows those of the other instance.
func (s *service) run(ctx context.Context, node actor) error {
	if c := &s.opts.Config; !c.NodeLabels {
		if _, err := RemoveLabels(c, s.opts.Trust); err != nil {
			s.opts.Log.Warn("the node keeps labels that node-labels does not want any more: " + wording.OneLine(err))
		}
	}
	writers := append([]actor{node, s.publisher.run, s.releaser.run, s.handOver.run}, s.others...)
	doors := []actor{s.plugin.Run}
	if s.dra != nil {
		writers, doors = append(writers, s.dra.Run), append(doors, s.dra.Serve)
	}
	return runAll(ctx, s.control.Run, func(ctx context.Context) error {
		serve := func(ctx context.Context) error { return s.runDoors(ctx, doors...) }
		err := runAll(ctx, serve, func(ctx context.Context) error {
			err := runAll(ctx, writers...)
			if errors.Is(err, errHandedOver) {
				s.publisher.end()
				err = errors.Join(err, s.node.Unlock())
				s.plugin.Retire()
				if s.dra != nil {
					s.dra.Retire()
				}
				// Calls that wait for the ledger must end here, with an error: the other instance has a ledger of its own,
				// which may give what they wait for as soon as this one has answered.
				s.handOver.awaitOther(ctx)
			}
			return err
		})
		return errors.Join(err, s.node.Unlock())
	})
}

// waitPreparations is how long the program waits for preparations before it ends. Kubernetes kills a pod 30 s after
// its SIGTERM.
const waitPreparations = 20 * time.Second

// runDoors runs the plugin and the DRA driver, and then waits for unfinished preparations, so that all are recorded.
func (s *service) runDoors(ctx context.Context, doors ...actor) error {
	afterEnd := context.WithoutCancel(ctx)
	recording, endRecording := context.WithCancel(afterEnd)
	defer endRecording()
	var records errgroup.Group
	records.Go(func() error { return s.preparer.record.Run(recording) })
	err := runAll(ctx, doors...)
	waiting, cancel := context.WithTimeout(afterEnd, waitPreparations)
	defer cancel()
	s.preparer.runner.Wait(waiting)
	endRecording()
	return errors.Join(err, records.Wait())
}

func pluginOptions(
	o *Options, prep *preparer, held *ledger.Ledger, observer plugin.Observer,
) plugin.Options {
	c := &o.Config
	options := plugin.Options{
		Dir:    c.DevicePluginDir,
		Beside: c.TakeOver,
		Allocate: plugin.AllocateOptions{
			Strategies:       c.Strategy,
			AnnotationPrefix: c.CDIAnnotationPrefix,
			Preference: plugin.Preference{
				Policy: c.Allocation.Policy, SharedPolicy: c.Allocation.SharedPolicy, Held: held.IDs,
			},
			Take:     held.Take,
			Old:      prep.old,
			PreStart: prep.preStart,
		},
		Log:      o.Log,
		Observer: observer,
	}
	if c.Door == config.DRADoor {
		// A kubelet refuses a container that gets the resource by DRA if the plugin of the resource, which has no devices
		// then, wants to prepare them (1.37, callPreStartContainerIfNeeded).
		options.Allocate.PreStart = nil
	}
	if c.Registration == config.RegisterWatcher {
		options.RegistryDir = c.PluginsRegistryDir
	}
	return options
}

// newReporter returns the reporter of the devices' health to the API server.
func newReporter(o *Options) *kubeapi.Reporter {
	reports := slices.Contains[[]config.HealthReport]
	return kubeapi.New(kubeapi.Options{
		Events:      reports(o.Config.ReportHealth, config.ReportEvents),
		Condition:   reports(o.Config.ReportHealth, config.ReportCondition),
		Credentials: o.Config.ServiceAccountDir, Env: o.Env, Log: o.Log,
	})
}

// observer passes notifications of the doors to the metrics, to systemd and to the end of a hand-over.
type observer struct {
	metrics          *metrics.Metrics
	changed, watched wake.Chan
	refresh          func() // called when the kubelet begins to watch, so that it can be asked to write its checkpoint
}

var (
	_ plugin.Observer = observer{}
	_ dra.Observer    = observer{}
)

// Watched implements plugin.Observer.
func (o observer) Watched(resource string, watched bool) {
	o.metrics.Watched(resource, watched)
	o.wake()
	o.refresh()
}

// wake says that the service may be ready, or not any more.
func (o observer) wake() {
	o.watched.Wake()
	o.changed.Wake()
}

// Registered implements plugin.Observer.
func (o observer) Registered(resource string, err error) {
	o.metrics.Registered(resource, err)
	o.changed.Wake()
}

// Allocated implements plugin.Observer.
func (o observer) Allocated(resource string, code codes.Code, devices int, took time.Duration) {
	o.metrics.Allocated(resource, code, devices, took)
}

// ClaimHandled implements dra.Observer.
func (o observer) ClaimHandled(op dra.Operation, err error, took time.Duration) {
	o.metrics.ClaimHandled(string(op), err, took)
}

// SliceWritten implements dra.Observer.
func (o observer) SliceWritten(err error) { o.metrics.SliceWritten(err) }

// newResets returns the resetter of GPUs.
func newResets(o *Options) *prepare.DriverReset {
	return &prepare.DriverReset{
		Host: o.Host, Check: o.Trust.CheckProgram, LockDir: filepath.Join(o.Config.StateDir, "resets"),
		Find: func() (prepare.Program, bool) {
			_, file, err := FindProgram(o.Host, "nvidia-smi")
			if err != nil || file == nil {
				return prepare.Program{}, false
			}
			root := o.Host.DriverRoot()
			if root == "/" {
				return prepare.Program{Path: file.HostPath}, true
			}
			return prepare.Program{
				Path: filepath.Join("/", strings.TrimPrefix(file.HostPath, root)), Root: root, Library: o.Driver.Library(),
			}, true
		},
	}
}
