package main

import (
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/kubeapi"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/agent/plugin"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

func (a *app) serveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve this host's GPUs to the kubelet",
		Long: `Runs the device plugin: it advertises the GPUs to the kubelet and allocates them to containers. It writes
their CDI spec to --cdi-dir and keeps it up to date; devices are in the spec before they are advertised.

It runs until SIGTERM or SIGINT, then ends open calls and removes its sockets; the spec stays. It registers again when
the kubelet restarts, and starts itself again when the driver was replaced. SIGHUP reads the configuration again; an
invalid one is logged, and the old one stays in use. Under systemd it reports readiness, status and the watchdog
(Type=notify).

A container finds a description of each of its devices in ` + node.DescriptorsPath + `: UUID.json with index, model,
PCI address, NUMA node, memory and how the device is shared.

With sharing.mps (experimental) containers share GPUs by CUDA's multi-process service. Each such GPU needs a control
daemon: see gpu-cdi-plugin mps. While it is not ready, the GPU's devices are unhealthy.

The spec of something that containers get besides GPUs (extras, imex) is a file of its own. It stays when that is no
longer configured, since running containers may need it to start again; cdi remove removes it.

The hook, the driver's library and the directories that serve writes to must belong to root, with all directories above
them. Otherwise serve does not start, unless --insecure-paths allows it.

A device whose UUID another CDI spec file defines too is unhealthy; the log and /readyz name that file. If other files
define all devices, as the vendor's own spec does, serve does not start.

A GPU that does not answer is unhealthy after --gpu-timeout; the others are served. Without a driver serve exits, or
waits for one with --fail-on-init-error=false.

At the socket control.sock in --runtime-dir, root and the user of serve can take devices out of service, reset them and
release the driver: see gpu-cdi-plugin device.

In a pod, --report-health reports the health of the devices to the API server: events are Events about the Node, and
node-condition is its condition ` + kubeapi.ConditionType + `. The node's name comes from the variable NODE_NAME.

--listen serves /metrics, /healthz and /readyz. Ready means that all resources are registered and watched, and that the
devices can be given to containers unless the GPUs themselves are at fault.`,
		Example: `  gpu-cdi-plugin serve
  gpu-cdi-plugin serve --config /etc/gpu-cdi-plugin/config.yaml --listen 127.0.0.1:9400
  gpu-cdi-plugin serve --mig-strategy mixed --strategy cdi-cri,device-specs`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.NoDriver, cli.Locked, cli.Unreachable,
			cli.Interrupted),
		PersistentPreRunE: a.startDaemon,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.serve(cmd) },
	}
	cmd.Flags().AddFlagSet(a.ServiceFlags)
	return cmd
}

// startDaemon begins a verb that reads its configuration again at SIGHUP.
func (a *app) startDaemon(cmd *cobra.Command, _ []string) error {
	// Until now a SIGHUP ends the process; from now on it has the configuration read again.
	a.hangups = make(chan os.Signal, 1)
	signal.Notify(a.hangups, unix.SIGHUP)
	return a.Start(cmd)
}

// service is the device plugin: a daemon that publishes the node's state to the kubelet.
type service struct {
	*daemon
	plugin      *plugin.Plugin
	preparer    *preparer
	prepared    *prepare.RecordFile
	mps         *mps.Monitor
	releaser    *releaser
	reporter    *kubeapi.Reporter
	connections atomic.Pointer[allocator.GPUs] // between the GPUs of the last snapshot

	publishing sync.Mutex
	state      node.State // the last of the node
	refused    string     // why the kubelet has older devices of some resources, or empty
}

func (a *app) serve(cmd *cobra.Command) error {
	s, err := a.newService()
	if err != nil {
		return err
	}
	if err := s.plugin.Check(); err != nil { // before the spec is written
		return err
	}
	return s.run(cmd, s.runPlugin, s.mps.Run, s.newControl().Run, s.releaser.run, s.reporter.Run, s.newFreed().Run)
}

func (a *app) newService() (*service, error) {
	s := &service{}
	var err error
	offerOf := func(a *app) resource.Config { return a.plugin.Config }
	if s.daemon, err = a.newDaemon(a.servedSpec(), a.descriptorDir(), a.healthRecord(), offerOf, s.publish); err != nil {
		return nil, err
	}
	s.mps, s.preparer = s.newMonitor(), s.newPreparer()
	offered := func(uuid string) bool { return s.preparer.find(uuid) != nil }
	s.prepared = prepare.NewRecordFile(a.preparations(), offered, a.Log)
	s.releaser, s.reporter = newReleaser(s), a.newReporter()
	s.ready, s.summary, s.admit = func() error { return s.plugin.Ready() }, s.resources, s.checkConfig
	s.released = s.releaser.released
	s.plugin, err = plugin.New(s.pluginOptions())
	return s, err
}

// newReporter returns what reports the health of the devices to the API server.
func (a *app) newReporter() *kubeapi.Reporter {
	reports := slices.Contains[[]config.HealthReport]
	return kubeapi.New(kubeapi.Options{
		Events:      reports(a.plugin.ReportHealth, config.ReportEvents),
		Condition:   reports(a.plugin.ReportHealth, config.ReportCondition),
		Credentials: a.plugin.ServiceAccountDir, Env: a.Env, Log: a.Log,
	})
}

// servedSpec is the spec file, or empty if no container is given a CDI name.
func (a *app) servedSpec() string {
	uses := slices.Contains[[]resource.Strategy]
	if uses(a.plugin.Strategy, resource.CDICRI) || uses(a.plugin.Strategy, resource.CDIAnnotations) {
		return a.ownSpec()
	}
	return ""
}

// descriptorDir has the files that describe devices to containers.
func (a *app) descriptorDir() string { return filepath.Join(a.plugin.StateDir, "devices") }

// healthRecord is the file with the health of the devices, which survives a restart and a reboot.
func (a *app) healthRecord() string { return filepath.Join(a.plugin.StateDir, "health.json") }

// preparations is the file with the last preparation of each device for a container.
func (a *app) preparations() string { return filepath.Join(a.plugin.StateDir, "prestart.json") }

func (s *service) pluginOptions() plugin.Options {
	p := s.app.plugin
	o := plugin.Options{
		Dir: p.DevicePluginDir,
		Allocate: plugin.AllocateOptions{
			Strategies:       p.Strategy,
			AnnotationPrefix: p.CDIAnnotationPrefix,
			Preference: plugin.Preference{
				GPUs: s.connections.Load, Policy: p.Allocation.Policy, SharedPolicy: p.Allocation.SharedPolicy,
			},
			PreStart: s.preparer.prepare,
		},
		Log:      s.app.Log,
		Observer: observer{s.metrics, s.daemon},
	}
	if p.Registration == config.RegisterWatcher {
		o.RegistryDir = p.PluginsRegistryDir
	}
	return o
}

// observer passes on what the plugin does to the metrics and to systemd.
type observer struct {
	*metrics.Metrics
	daemon *daemon
}

var _ plugin.Observer = observer{}

func (o observer) Watched(resource string, watched bool) {
	o.Metrics.Watched(resource, watched)
	o.daemon.wake.Wake()
}

func (o observer) Registered(resource string, err error) {
	o.Metrics.Registered(resource, err)
	o.daemon.wake.Wake()
}

// publish takes a state of the node. When it returns, no device that left the state can be allocated.
func (s *service) publish(state node.State) {
	s.publishing.Lock()
	same := state.Snapshot == s.state.Snapshot // as after an event
	s.state = state
	s.publishing.Unlock()
	if !same {
		s.updateConnections(state.Snapshot)
	}
	s.preparer.warnOfParts(state.Resources)
	s.mps.Set(state.Resources)
	s.advertise()
}

// updateConnections precomputes which GPUs are connected best.
func (s *service) updateConnections(snapshot *gpu.Snapshot) {
	connections, err := allocator.NewGPUs(snapshot, s.app.plugin.Allocation.Weights)
	if err != nil {
		s.app.Log.Error("containers get any GPUs instead of the best connected ones: " + cli.OneLine(err))
	}
	s.connections.Store(connections)
}

// advertise gives the last state to the kubelet and to the reporter. In it, devices are unhealthy whose MPS daemon is
// not ready.
func (s *service) advertise() {
	s.publishing.Lock()
	defer s.publishing.Unlock()
	state := s.state
	state.Resources = mps.WithGrants(resource.MarkUnhealthy(state.Resources, s.mps.Reason), s.app.mpsDir())
	refused := ""
	if err := s.plugin.Update(state.Resources); err != nil {
		refused = cli.OneLine(err)
	}
	switch {
	case refused != "" && refused != s.refused:
		s.app.Log.Error("some resources keep their old devices, since the new ones cannot be advertised: " + refused)
	case refused == "" && s.refused != "":
		s.app.Log.Info("the devices of all resources are advertised again")
	}
	s.refused = refused
	s.metrics.Advertised(state)
	if err := s.releaser.checkOpen(); err != nil { // meanwhile no fault is noticed
		state.Err = fmt.Errorf("%w: %w", gpu.ErrNoDriver, err)
	}
	s.reporter.Publish(state)
	s.wake.Wake()
}

// resources are the states of the resources as text.
func (s *service) resources() []string {
	var parts []string
	for _, r := range s.plugin.Status() {
		text := fmt.Sprintf("%s: %d of %s healthy", r.Resource, r.Healthy, cli.Plural(r.Devices, "device"))
		if !r.Watched {
			text += ", not connected to the kubelet"
		}
		parts = append(parts, text)
	}
	if err := s.releaser.checkOpen(); err != nil {
		parts = append(parts, err.Error())
	}
	return parts
}
