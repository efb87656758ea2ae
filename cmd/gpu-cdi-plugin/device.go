package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/node"
)

func (a *app) deviceCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "device",
		Short: "Take devices out of service, reset them, release the driver, make device nodes",
		Long: `The verbs of an administrator. All but make-nodes send requests to the serve of this host, through the socket
control.sock in its --runtime-dir, which only root and the user of serve may use. DEVICE is a UUID, the index of a GPU
(3) or that of a MIG device (3:0), as gpu-cdi-plugin devices lists them.`,
		Example: `  gpu-cdi-plugin device cordon 3
  gpu-cdi-plugin device reset 3`,
		Annotations: cli.Statuses(cli.OK, cli.Usage),
		Args:        cli.UnknownVerb,
		RunE:        cli.ShowHelp,
	}
	for _, option := range []string{"runtime-dir", "state-dir"} {
		cmd.PersistentFlags().AddFlag(a.ServiceFlags.Lookup(option))
	}
	cmd.AddCommand(a.cordonCommand(), a.uncordonCommand(), a.resetCommand(),
		a.releaseCommand(), a.reopenCommand(), a.makeNodesCommand())
	return cmd
}

func (a *app) cordonCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use:   "cordon DEVICE --reason TEXT",
		Short: "Take a device out of service",
		Long: `Takes a device out of service, and with a GPU its MIG devices: it stays advertised, as unhealthy, and no
container gets it until device uncordon. Containers that have it keep it. devices shows the reason.

A cordon survives restarts of serve and of the host. If serve is not running, the cordon is written to the record in
--state-dir, which serve reads at its next start.`,
		Example: `  gpu-cdi-plugin device cordon 3 --reason "a fan is loud, ticket 4711"
  gpu-cdi-plugin device cordon GPU-8f6c3a1e-0000-4000-8000-000000000001 --reason maintenance`,
		Annotations:       deviceStatuses(cli.NoDriver, cli.NoGPU, cli.Locked),
		Args:              oneDevice,
		ValidArgsFunction: a.completeDevice,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.setCordon(cmd.Context(), control.Request{Act: control.Cordon, Device: args[0], Reason: reason})
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, as one line of `text` (required)")
	_ = cmd.MarkFlagRequired("reason")
	a.addTimeout(cmd)
	return cmd
}

func (a *app) uncordonCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "uncordon DEVICE",
		Short: "Bring a device back into service",
		Long: `Ends device cordon; for a GPU, also for its MIG devices. The device is then as healthy as its probes and
events say. If serve is not running, the record in --state-dir is changed, which serve reads at its next start.`,
		Example:           `  gpu-cdi-plugin device uncordon 3`,
		Annotations:       deviceStatuses(cli.NoDriver, cli.NoGPU, cli.Locked),
		Args:              oneDevice,
		ValidArgsFunction: a.completeDevice,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.setCordon(cmd.Context(), control.Request{Act: control.Uncordon, Device: args[0]})
		},
	}
	a.addTimeout(cmd)
	return cmd
}

func (a *app) resetCommand() *cobra.Command {
	r := control.Request{Act: control.Reset}
	cmd := &cobra.Command{
		Use:   "reset DEVICE",
		Short: "Reset a GPU that is not in use",
		Long: `Resets a whole GPU, by nvidia-smi or, if the driver has none, by the kernel: serve cordons it, resets
it, probes it and uncordons it. A GPU that was cordoned before stays cordoned. The driver is closed meanwhile, for all
GPUs.

A GPU that a container uses, as the kubelet or the driver reports, is not reset: the container is printed, and the verb
fails or, with --wait, waits. The same holds for processes outside containers, unless --force is given. --force does
not end them, and the driver refuses to reset a GPU that a process has open. Programs that prestart.programs lists are
ignored. An interrupt ends the waiting, but not a reset that has begun.

A GPU in MIG mode may lose its MIG devices by the reset. On virtual machines, and on machines with NVSwitches, a single
GPU may not be resettable; the error says so.`,
		Example: `  gpu-cdi-plugin device reset 3
  gpu-cdi-plugin device reset GPU-8f6c3a1e-0000-4000-8000-000000000001 --wait`,
		Annotations:       deviceStatuses(cli.Unreachable),
		Args:              oneDevice,
		ValidArgsFunction: a.completeDevice,
		RunE: func(cmd *cobra.Command, args []string) error {
			r.Device = args[0]
			return a.ask(cmd.Context(), r)
		},
	}
	cmd.Flags().BoolVar(&r.Wait, "wait", false, "wait until the GPU is not in use")
	cmd.Flags().BoolVar(&r.Force, "force", false, "reset it although processes outside containers use it")
	return cmd
}

func (a *app) releaseCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "release",
		Short: "Close the driver, so that it can be unloaded or upgraded",
		Long: `Makes serve close the driver's library, so that the kernel module can be unloaded without stopping
serve. The devices stay advertised, but no container starts with one, and the kubelet gets the reason. Their health is
not probed.

The release ends with device reopen, when the kernel module was loaded again, when the driver was replaced, and when
serve restarts. Containers, MPS daemons and other programs that use the driver are not ended.`,
		Example: `  gpu-cdi-plugin device release
  gpu-cdi-plugin device release && rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia`,
		Annotations: deviceStatuses(cli.Unreachable),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.ask(cmd.Context(), control.Request{Act: control.Release})
		},
	}
}

func (a *app) reopenCommand() *cobra.Command {
	return &cobra.Command{
		Use:         "reopen",
		Short:       "End device release",
		Long:        `Makes serve open the driver's library again after device release.`,
		Example:     `  gpu-cdi-plugin device reopen`,
		Annotations: deviceStatuses(cli.Unreachable),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.ask(cmd.Context(), control.Request{Act: control.Reopen})
		},
	}
}

func (a *app) makeNodesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "make-nodes",
		Short: "Make the device nodes that this host lacks",
		Long: `Runs the driver's nvidia-modprobe where device nodes are missing, which also loads the kernel modules: those
of GPUs, of nvidia-uvm and nvidia-modeset, and of MIG devices. It prints the nodes that were made, and runs nothing if
none is missing. After a boot without a display server nothing else makes them. Nodes with another number than their
device are made anew, or removed if that device is gone. Only root may be able to change nvidia-modprobe.

The units of gpu-cdi-plugin run this before they start.`,
		Example:     `  gpu-cdi-plugin device make-nodes`,
		Annotations: deviceStatuses(cli.NoDriver),
		RunE:        func(cmd *cobra.Command, _ []string) error { return a.makeNodes(cmd.Context()) },
	}
}

func (a *app) makeNodes(ctx context.Context) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	path := driver.FindProgram(h, "nvidia-modprobe")
	if path == "" {
		err := fmt.Errorf("the driver in %s has no nvidia-modprobe", h.DriverRoot())
		if unsupported := host.OnPlatform(h, err); errors.Is(unsupported, host.ErrUnsupported) {
			return unsupported
		}
		return cli.With(cli.NoDriver, "install the NVIDIA driver with its nvidia-modprobe, in Debian a package of its own, "+
			"or name its root with --driver-root", err)
	}
	made, err := agent.MakeNodes(ctx, h, prepare.Program{Path: path}, a.CheckProgram)
	for _, node := range made {
		fmt.Fprintln(a.Stdout, node)
	}
	return err
}

// deviceStatuses returns the exit statuses of the verbs that send requests to the running `serve`.
func deviceStatuses(more ...cli.Code) map[string]string {
	return cli.Statuses(slices.Concat([]cli.Code{cli.OK, cli.Failure, cli.Usage}, more, []cli.Code{cli.Interrupted})...)
}

var oneDevice = cli.Arguments("one device, a UUID or an index", 1, 1)

// setCordon makes serve cordon or uncordon a device. If serve does not run, it changes the health record instead.
func (a *app) setCordon(ctx context.Context, r control.Request) error {
	err := a.ask(ctx, r)
	if !errors.Is(err, control.ErrNoServer) {
		return err
	}
	if err := a.CheckDir("state-dir", agent.DescriptorDir(a.config)); err != nil {
		return err
	}
	what := ""
	edit := func(data []byte) ([]byte, error) {
		d, id, err := a.recordedDevice(ctx, data, r.Device)
		if err != nil {
			return nil, err
		}
		what = d.UUID + " is " + string(r.Act) + "ed"
		return health.EditCordon(data, id, time.Now(), d, r.Reason)
	}
	switch editing := node.EditHealthRecord(agent.DescriptorDir(a.config), agent.HealthRecord(a.config), edit); {
	case errors.Is(editing, fileio.ErrHeld):
		return cli.With(cli.Locked,
			"name the --runtime-dir of the running serve; if its control.sock was removed, restart the service",
			fmt.Errorf("%w, but a running serve uses %s", err, a.plugin.StateDir))
	case editing != nil:
		return editing
	}
	_, err = fmt.Fprintf(a.Stdout, "%s in %s; serve is not running here, and will read it at its next start\n",
		what, agent.HealthRecord(a.config))
	return err
}

// ask sends a request to the running `serve` and prints what was done.
func (a *app) ask(ctx context.Context, r control.Request) error {
	result, err := a.send(ctx, r)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(a.Stdout, result)
	return err
}

// send sends a request to the running `serve` and returns its result.
func (a *app) send(ctx context.Context, r control.Request) (string, error) {
	if err := r.Check(); err != nil {
		return "", cli.With(cli.Usage, "", err)
	}
	if err := a.CheckDir("runtime-dir", a.plugin.RuntimeDir); err != nil { // otherwise another program could answer
		return "", err
	}
	progress := func(text string) { fmt.Fprintln(a.Stderr, text) }
	return control.Send(ctx, a.plugin.RuntimeDir, r, progress)
}

// recordedDevice finds a device in the health record by its UUID, or else among the driver's devices by its UUID or
// index. With a device of the driver it also returns the identity for a new record.
func (a *app) recordedDevice(ctx context.Context, data []byte, name string) (health.Device, health.Identity, error) {
	if len(data) > 0 {
		recorded, err := health.Recorded(data, health.Identity{})
		if err != nil {
			return health.Device{}, health.Identity{}, err
		}
		if _, known := recorded[name]; known {
			return health.Device{UUID: name}, health.Identity{}, nil
		}
	}
	h, err := a.host()
	if err != nil {
		return health.Device{}, health.Identity{}, err
	}
	s, err := a.readDevices(ctx, h)
	if err != nil {
		return health.Device{}, health.Identity{}, err
	}
	d, _, err := node.FindDevice(s, name)
	return d, node.HealthIdentity(h, s.DriverVersion), err
}

// completeDevice completes the devices of this host's CDI spec, by index and UUID, and those in the health record, some
// of which may be gone.
func (a *app) completeDevice(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	_ = a.Start(cmd) // sets the paths; it may fail, since a required flag may still follow
	names := map[string]bool{}
	if data, err := fileio.ReadFile(agent.HealthRecord(a.config), node.MaxHealthRecord); err == nil {
		recorded, _ := health.Recorded(data, health.Identity{})
		for uuid := range recorded {
			names[uuid] = true
		}
	}
	if spec, err := cdi.ReadFile(a.ownSpec()); err == nil {
		for i := range spec.Devices {
			names[spec.Devices[i].Name] = true
		}
	}
	delete(names, cdi.AllDevices)
	list := slices.Sorted(maps.Keys(names))
	return slices.DeleteFunc(list, func(name string) bool { return !strings.HasPrefix(name, prefix) }),
		cobra.ShellCompDirectiveNoFileComp
}
