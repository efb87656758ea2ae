package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/sdnotify"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/manager/metrics"
	"gpu-cdi-plugin/manager/nodestatus"
	"gpu-cdi-plugin/manager/pod"
	"gpu-cdi-plugin/manager/podresources"
)

func (a *app) serveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the kubelet's device manager without a kubelet",
		Long: `Runs a device manager: what a kubelet does for device plugins, for hosts without Kubernetes and for
tests of plugins. Plugins register with it as with a kubelet, at kubelet.sock in --socket-dir or by
--plugins-registry-dir. admit gives the pod of a manifest its devices and prints what its containers get, as arguments
for podman and others; pods, node and release are its other verbs. They call serve at --api-socket, which only root and
--api-group may use. specs/manager.openapi.yaml, in /usr/share/doc/device-manager or the source code, has its requests.

--plugin is the command line of a plugin that serve starts when plugins can register. Both end together: if the plugin
ends, serve ends with an error; if serve is to end, the plugin gets SIGTERM, and is served until it has ended, for up to
35 seconds. Requests wait until the plugin has listed devices, for up to 10 seconds.

It runs until SIGTERM or SIGINT. Pods keep their devices when it ends: the placements are in placements.json in
--state-dir, and each is on the disk when admit returns. If that file is damaged, it is set aside, and all devices are
withheld: see release --withheld.

Only root, or the user that runs the manager, may be able to write to the directories of plugins, of the state and of
the sockets, and to the program of --plugin. --insecure-paths allows other users to write to that program and to the
directories of --api-socket and --pod-resources-socket, but to nothing else.

A kubelet and this manager cannot serve the same --socket-dir. device-manager checkpoint imports a kubelet's
placements, and exports them for a kubelet.

It behaves like a kubelet, without the kubelet's known faults.

Under systemd it reports readiness and notifies the watchdog (Type=notify), and takes the sockets of the API and
of leases if socket units have made them.`,
		Example: `  device-manager serve
  device-manager serve --plugin 'gpu-cdi-plugin serve'
  device-manager serve --topology-policy restricted --api-group gpu
  device-manager serve --socket-dir /run/bench --pod-resources-socket= --seed 7`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Locked, cli.Interrupted),
		RunE:        func(cmd *cobra.Command, _ []string) error { return a.serve(cmd.Context()) },
	}
	cmd.Flags().AddFlagSet(a.ServiceFlags)
	return cmd
}

// placementsFile returns the path of the file with the placements of the device manager.
func (a *app) placementsFile() string { return filepath.Join(a.StateDir, "placements.json") }

func (a *app) serve(ctx context.Context) error {
	reserved, err := nodestatus.ParseReserved(a.SystemReserved, a.KubeReserved, a.EvictionHard)
	if err != nil {
		return err
	}
	group, err := lookupGroup("api-group", a.APIGroup)
	if err != nil {
		return err
	}
	leaseGroup, err := lookupGroup("lease-group", a.LeaseGroup)
	if err != nil {
		return err
	}
	plugin, err := a.findPlugin()
	if err != nil {
		return err
	}
	if err := fileio.MakeDirs(a.StateDir); err != nil {
		return fmt.Errorf("state-dir: %w", err)
	}
	h, err := host.New(a.Root, "", "")
	if err != nil {
		return err
	}
	machine, err := nodestatus.ReadMachine(h, a.StateDir)
	if err != nil {
		return err
	}
	boot := host.ReadLine(procfs + "/sys/kernel/random/boot_id")
	if boot == "" { // leases of an earlier boot would seem to be of this one
		return errors.New("the boot ID of the kernel cannot be read from " + procfs + "/sys/kernel/random/boot_id")
	}
	maxPods := nodestatus.Pods(machine, a.MaxPods, a.PodsPerCore)
	a.warnReserved(nodestatus.Compute(machine, reserved, maxPods, nil))
	options, err := a.managerOptions(machine)
	if err != nil {
		return err
	}
	l, forLeases, err := a.listenAPI(ctx, group, leaseGroup)
	if err != nil {
		return err
	}
	defer l.Close() // has no effect after the listener was closed
	defer forLeases.Close()
	podResources, err := a.listenPodResources(ctx, group)
	if err != nil {
		return err
	}
	observed := metrics.New()
	options.Observer, options.MaxPods = observed, maxPods
	m, err := manager.New(options) //nolint:contextcheck // Run gets ctx, and ends what New has begun
	if err != nil {
		return errors.Join(err, podResources.Close())
	}
	observed.ObserveSockets(m.PluginSockets)
	leases := lease.New(lease.Options{
		Manager: m, Describe: lease.Describer(a.DeviceInfo), UsedBy: lease.UsedBy(a.DeviceInfo),
		Procfs: procfs, Boot: boot, Dir: filepath.Dir(a.APISocket), Grace: leaseGrace, Confiner: a.confiner(), Log: a.Log,
	})
	observed.ObserveLeases(leases.Counts)
	server := &api.Server{
		Manager: m, ParsePod: pod.Parse, Log: a.Log, Metrics: observed.Text, Leases: leases,
		NodeStatus: func() api.NodeStatus {
			return api.NodeStatus(nodestatus.Compute(machine, reserved, maxPods, m.Counts()))
		},
	}
	a.Log.Info("device plugins can register in "+options.Dir, "api", a.APISocket)
	actors, ctx := errgroup.WithContext(ctx)
	// All is served until the plugin has ended: it may have calls to finish, and needs its manager for that.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	actors.Go(func() error {
		defer stop()
		return a.runPlugin(ctx, plugin)
	})
	actors.Go(func() error { return m.Run(serving) })
	actors.Go(func() error {
		if plugin.path != "" {
			awaitDevices(serving, m)
		}
		return server.Run(serving, l)
	})
	actors.Go(func() error { return leases.Run(ctx) })
	actors.Go(func() error {
		if plugin.path != "" {
			awaitDevices(ctx, m)
		}
		one := &api.Server{Manager: m, Log: a.Log, Leases: leases, LeasesOnly: true}
		return one.Run(ctx, forLeases)
	})
	actors.Go(func() error { return a.notify(ctx, m.Check) })
	if podResources != nil {
		reads := &podresources.Server{Manager: m, OnCall: observed.Called}
		actors.Go(func() error { return reads.Run(serving, podResources) })
	}
	return actors.Wait()
}

// procfs has the processes that ask for leases: they are in this process's namespace, whatever the root is.
const procfs = "/proc"

// registerTime is how long requests wait at the start for the devices of the plugin. A host may have none.
const registerTime = 10 * time.Second

// awaitDevices waits until a plugin has listed devices. The first request, for which systemd may have started the
// manager, would find none otherwise.
func awaitDevices(ctx context.Context, m *manager.Manager) {
	ctx, cancel := context.WithTimeout(ctx, registerTime)
	defer cancel()
	changes := m.Watch(ctx)
	for {
		if slices.ContainsFunc(m.Resources(), func(r manager.Resource) bool { return r.Connected && r.Capacity > 0 }) {
			return
		}
		if _, open := <-changes; !open { // ctx or the manager has ended
			return
		}
	}
}

// listenAPI makes the sockets of the API and of leases, or takes those that systemd made.
func (a *app) listenAPI(ctx context.Context, group, leaseGroup int) (l, forLeases *unixsocket.HTTPListener, err error) {
	if err := a.CheckDir("the directory of api-socket", filepath.Dir(a.APISocket)); err != nil {
		return nil, nil, err
	}
	passed, err := sdnotify.Sockets(a.Env)
	if err != nil {
		return nil, nil, err
	}
	var inherited, inheritedForLeases *os.File
	for _, f := range passed {
		defer f.Close() // the listeners have copies
		switch f.Name() {
		case a.APISocket:
			inherited = f
		case a.LeaseSocket():
			inheritedForLeases = f
		default:
			return nil, nil, fmt.Errorf("systemd passes the socket %s; want %s or %s", f.Name(), a.APISocket, a.LeaseSocket())
		}
	}
	for _, s := range []struct {
		socket        *os.File
		option, value string
	}{{inherited, "api-group", a.APIGroup}, {inheritedForLeases, "lease-group", a.LeaseGroup}} {
		if s.socket != nil && s.value != "" {
			a.Log.Warn(s.option+" does not apply to "+s.socket.Name()+": systemd made this socket, so set SocketGroup= in "+
				"its socket unit", s.option, s.value)
		}
	}
	if l, err = api.Listen(ctx, a.APISocket, group, inherited); err != nil {
		return nil, nil, err
	}
	if forLeases, err = api.Listen(ctx, a.LeaseSocket(), leaseGroup, inheritedForLeases); err != nil {
		return nil, nil, errors.Join(err, l.Close())
	}
	return l, forLeases, nil
}

// earlierPlacements is the file in which `gpu-cdi-plugin manager` kept the placements by default.
const earlierPlacements = "/var/lib/gpu-cdi-plugin/manager.db"

// warnReserved logs the resources of which nothing is left for pods. A kubelet refuses to start if more is reserved
// than there is, but here pods can get devices all the same.
func (a *app) warnReserved(s nodestatus.Status) {
	for _, name := range slices.Sorted(maps.Keys(s.Capacity)) {
		if s.Allocatable[name] == "0" && s.Capacity[name] != "0" {
			a.Log.Warn("all "+name+" of this machine is reserved, and nothing of it is allocatable: see --system-reserved, "+
				"--kube-reserved and --eviction-hard", "capacity", s.Capacity[name])
		}
	}
}

// listenPodResources makes the socket of the PodResources service. If none is configured, it returns nil.
func (a *app) listenPodResources(ctx context.Context, group int) (*unixsocket.HTTPListener, error) {
	path := a.PodResourcesSocket
	if path == "" {
		return nil, nil //nolint:nilnil // no service is configured
	}
	if err := a.CheckDir("the directory of pod-resources-socket", filepath.Dir(path)); err != nil {
		return nil, err
	}
	l, err := podresources.Listen(ctx, path, group)
	if errors.Is(err, fileio.ErrHeld) {
		err = cli.With(
			cli.Locked,
			"stop the kubelet or the other manager, or name another socket with --pod-resources-socket",
			err,
		)
	}
	return l, err
}

// managerOptions returns the options of the device manager that the configuration sets.
func (a *app) managerOptions(machine nodestatus.Machine) (o manager.Options, err error) {
	o = manager.Options{
		Dir: a.SocketDir, StateFile: a.placementsFile(), EarlierFiles: []string{earlierPlacements}, Log: a.Log,
		Topology: admission.Topology{
			Policy: admission.Policy(a.TopologyPolicy), Scope: admission.Scope(a.TopologyScope),
			Machine: admission.NodesOf(machine.NUMANodes...),
		},
	}
	if o.RegistryDir, err = filepath.Abs(a.PluginsRegistryDir); err != nil {
		return o, fmt.Errorf("plugins-registry-dir: %w", err)
	}
	if a.Seed != "" {
		seed, err := strconv.ParseUint(a.Seed, 10, 64)
		if err != nil {
			return o, fmt.Errorf("seed: %w", err)
		}
		o.Seed = &seed
	}
	return o, nil
}

// leaseGrace is how long a command has to end by itself when the time of its lease is over.
const leaseGrace = 10 * time.Second

// lookupGroup returns the GID of the group of an option, by its name or number.
func lookupGroup(option, name string) (int, error) {
	if name == "" {
		return unixsocket.OwnerOnly, nil
	}
	g, err := user.LookupGroup(name)
	if err == nil {
		name = g.Gid
	}
	gid, notNumber := strconv.ParseUint(name, 10, 31)
	if _, unknown := errors.AsType[user.UnknownGroupError](err); unknown && notNumber != nil {
		err = fmt.Errorf("there is no group %q", name)
	}
	if notNumber != nil {
		return 0, cli.With(cli.Usage, "name a group of this host, or its number", fmt.Errorf("%s: %w", option, err))
	}
	return int(gid), nil
}

// notify reports to systemd that the manager is ready, notifies the watchdog as long as `check` returns no error, and
// reports when the manager ends.
func (a *app) notify(ctx context.Context, check func() error) error {
	systemd := sdnotify.New(a.Env)
	a.reported(systemd.Ready("device plugins can register in " + a.SocketDir))
	systemd.Watch(ctx, check, a.Log)
	<-ctx.Done()
	a.reported(systemd.Stopping())
	return nil
}

// reported logs the error of a report to systemd.
func (a *app) reported(err error) {
	if err != nil {
		a.Log.Warn("the state cannot be reported to systemd: " + err.Error())
	}
}
