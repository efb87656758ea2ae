package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/cmd/device-manager/launch"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/quantity"
)

// Exit statuses of run besides those of the command, as those of timeout(1) and of container engines.
const (
	waitEnded   cli.Code = 124
	noLease     cli.Code = 125
	noExecution cli.Code = 126
	noCommand   cli.Code = 127
)

// leaseProgram is the name of a link to this program that does the same as the verb leaseVerb.
const (
	leaseProgram = "gpu-run"
	leaseVerb    = "run"
)

// leaseOptions are the options of a request for a lease.
type leaseOptions struct {
	lease.Request

	cmd    *cobra.Command // the verb that asks
	memory string
	wait   waitTime
	limit  timeLimit
	quiet  bool
	ids    string
}

// Kinds of names in CUDA_VISIBLE_DEVICES.
const (
	byUUID  = "uuid"
	byIndex = "index"
)

// waitTime is a time to wait at most.
type waitTime time.Duration

// forever has no limit.
const forever waitTime = -1

// String implements pflag.Value.
func (w *waitTime) String() string {
	if *w == forever {
		return "no limit"
	}
	return time.Duration(*w).String()
}

// Set implements pflag.Value.
func (w *waitTime) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return fmt.Errorf("want a time such as 10m, or 0, got %q", text)
	}
	*w = waitTime(d)
	return nil
}

// Type implements pflag.Value.
func (*waitTime) Type() string { return "duration" }

// timeLimit is the time of a lease. Without the flag it is 0, which means no limit. The flag refuses 0: a script with a
// calculated time would get a lease without an end.
type timeLimit time.Duration

// String implements pflag.Value.
func (l *timeLimit) String() string {
	if *l == 0 {
		return ""
	}
	return time.Duration(*l).String()
}

// Set implements pflag.Value.
func (l *timeLimit) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return fmt.Errorf("want a time such as 30s, 10m or 2h, got %q", text)
	}
	*l = timeLimit(d)
	return nil
}

// Type implements pflag.Value.
func (*timeLimit) Type() string { return "duration" }

const leaseText = `Leases devices from device-manager serve, and executes a command with them. The lease ends when
the command has ended, however it ends. All of the devices are given or none; who cannot have them now waits, first
come, first served. A request waits behind an earlier one only for devices that this one could use too.

podman, docker and nerdctl get the devices as their own options, behind "run". In any argument {cdi} stands for the CDI
names with commas, {uuids} for the UUIDs, {count} for the number; an argument {podman}, {docker} or {nerdctl} for these
options of the engine. Where such a placeholder is used, nothing else is inserted. Any other command gets
CUDA_VISIBLE_DEVICES and, where systemd runs, a scope in which it can open the leased devices, terminals, /dev/null and
the like, but no other devices. Elsewhere it can ignore the variable, which a line says. With --ids index the variable
has indexes in the order of the PCI bus: from 0 in a scope, and elsewhere those of the host. A line says which of the
variables that are set here are replaced.

The lease of a container ends with the container, also in the background (--detach). Containers that are started later
or again, as with create or --restart, are refused without a placeholder. Lease devices for a time for them, with
device-manager lease create --for. Any other lease ends with the command.

The command replaces this program, so terminal, signals and exit status are its own. When its time is over (--for) it
gets SIGTERM, and SIGKILL 10 s later, and so does a container that is left. podman also gets --timeout for the
container, which lease extend does not change.
`

func (a *app) runCommand() *cobra.Command {
	cmd := a.leasedCommand(func(_ leaseOptions, args []string, dashed bool) (int, []string, error) {
		if len(args) > 1 && !dashed && isNumber(args[0]) {
			return 0, nil, fmt.Errorf("%q is no command: the number of devices is that of --gpus", args[0])
		}
		return 0, args, nil
	})
	cmd.Use = leaseVerb + " --gpus N [flags] -- COMMAND [ARG...]"
	cmd.Long = leaseText + `
The program gpu-run is the same: gpu-run [flags] N [--] COMMAND [ARG...].`
	cmd.Example = `  device-manager run --gpus 2 -- podman run --rm docker.io/library/debian nvidia-smi -L
  device-manager run --gpus 1 --model H100 --wait 10m --for 8h -- python3 train.py
  gpu-run 1 -- podman run --rm docker.io/library/debian nvidia-smi -L
  make -j4 CUDA="gpu-run 1 --"`
	return cmd
}

// leaseProgramUsage is how gpu-run is called.
const leaseProgramUsage = leaseProgram + " [flags] N [--] COMMAND [ARG...]"

// leaseProgramCommand returns the command of gpu-run, which is run with the number of devices as its first argument.
func (a *app) leaseProgramCommand() *cobra.Command {
	cmd := a.leasedCommand(leaseOptions.countFirst)
	cmd.Use = leaseProgramUsage
	cmd.Long = leaseText + `
N is the number of devices, and flags come before it. device-manager run is the same, with --gpus N.`
	cmd.Example = `  gpu-run 2 -- podman run --rm docker.io/library/debian nvidia-smi -L
  gpu-run --model H100 --wait 10m --for 8h 1 -- python3 train.py
  make -j4 CUDA="gpu-run 1 --"`
	return a.Alone(cmd)
}

// leasedCommand returns a command that executes another one with devices. The function takes the number of devices, or
// 0, from the arguments, of which the first may be behind a "--".
func (a *app) leasedCommand(
	count func(o leaseOptions, args []string, dashed bool) (n int, rest []string, err error),
) *cobra.Command {
	o := leaseOptions{}
	cmd := &cobra.Command{
		Short: "Lease devices for the life of a command",
		Annotations: cli.Statuses(cli.OK, cli.Usage, waitEnded, noLease, noExecution, noCommand,
			cli.Interrupted),
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			n, args, err := count(o, args, cmd.ArgsLenAtDash() == 0)
			if err != nil {
				return cli.With(cli.Usage, cli.UsageHint(cmd), err)
			}
			o.Count = max(o.Count, n)
			return a.runLeased(cmd.Context(), o, args)
		},
	}
	cmd.Flags().SetInterspersed(false)
	o.addFlags(cmd)
	o.ids = byUUID
	cmd.Flags().Var(&cli.Choice{Value: &o.ids, Known: []string{byUUID, byIndex}}, "ids",
		"`kind` of the names in CUDA_VISIBLE_DEVICES: uuid, or index for programs that read only numbers; for MIG "+
			"devices it is always uuid")
	return cmd
}

// addFlags adds the flags of a request for a lease.
func (o *leaseOptions) addFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.IntVar(&o.Count, "gpus", 0, "`number` of devices")
	f.StringVar(&o.Resource, "resource", "", "extended `resource` of the devices, such as nvidia.com/gpu "+
		"(default: any whose devices are as asked for)")
	f.StringVar(&o.Model, "model", "", "part of the `name` of the devices' model, such as H100")
	f.StringVar(&o.Profile, "profile", "", "`profile` of MIG devices, such as 1g.10gb, which "+
		"gpu-cdi-plugin lists with mig-strategy mixed or single (default: whole GPUs)")
	f.StringVar(&o.memory, "min-memory", "", "`memory` that each device has at least, such as 40Gi")
	f.BoolVar(&o.SameNUMA, "same-numa", false, "all devices near one NUMA node")
	f.BoolVar(&o.AllowBusy, "allow-busy", false, "also take devices that something uses without a lease; they are not "+
		"prepared. For root and the members of --api-group")
	o.addWaitFlags(cmd)
}

// addWaitFlags adds the flags that do not choose devices.
func (o *leaseOptions) addWaitFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	o.cmd, o.wait = cmd, forever
	f.Var(&o.wait, "wait", "`time` to wait for the devices at most; 0 does not wait")
	f.Var(&o.limit, "for", "`time` after which the command is ended (default: no limit)")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "print only warnings and errors")
}

// countFirst takes the number of devices from the arguments of gpu-run.
func (o leaseOptions) countFirst(args []string, dashed bool) (n int, rest []string, err error) {
	switch {
	case len(args) == 0:
		return 0, nil, errors.New("usage: " + leaseProgramUsage)
	case o.Count > 0 && !dashed && isNumber(args[0]):
		return 0, nil, fmt.Errorf("the number of devices is given twice: --gpus %d and %s", o.Count, args[0])
	case o.Count > 0:
		return 0, args, nil
	case !isNumber(args[0]):
		return 0, nil, fmt.Errorf("%q is no number of devices; usage: %s", args[0], leaseProgramUsage)
	}
	n, err = strconv.Atoi(args[0])
	rest = args[1:]
	switch {
	case err != nil || n < 1:
		return 0, nil, fmt.Errorf("%q is no number of devices; usage: %s", args[0], leaseProgramUsage)
	case len(rest) > 0 && rest[0] == "--":
		rest = rest[1:]
	case len(rest) > 0 && strings.HasPrefix(rest[0], "-"):
		return 0, nil, fmt.Errorf("%s: flags come before the number; usage: %s", rest[0], leaseProgramUsage)
	}
	return n, rest, nil
}

// isNumber reports whether a text is a whole number.
func isNumber(text string) bool {
	return text != "" && strings.Trim(strings.TrimPrefix(text, "-"), "0123456789") == ""
}

// complete completes the options, and checks them.
func (o *leaseOptions) complete() (err error) {
	if o.memory != "" {
		if o.MinMemory, err = parseMemory(o.memory); err != nil {
			return cli.With(cli.Usage, "", fmt.Errorf("--min-memory: %w", err))
		}
	}
	if len(o.Devices) > 0 {
		o.Count = len(o.Devices)
	}
	switch {
	case o.Count < 1 && o.cmd.Flags().Lookup("device") != nil:
		return cli.With(cli.Usage, "", errors.New("--device: want the devices that the process uses"))
	case o.Count < 1:
		return cli.With(cli.Usage, "", errors.New("--gpus: want the number of devices"))
	}
	return nil
}

// findCommand returns the path of the command, and whether it is neither an engine nor names one. The command must be
// there before anyone waits for devices.
func findCommand(args []string) (program string, bare bool, err error) {
	// If the plugin gives no CDI names for {cdi}, that is known with the devices only.
	likely := model.RunOptions{CDIDevices: []string{"example.com/device=0"}}
	plan, err := launch.For(args, launch.Lease{RunOptions: likely, IDs: []string{"0"}})
	if err != nil {
		return "", false, cli.With(noLease, cli.HintOf(cli.Classify(err, leaseErrors)), err)
	}
	program, err = exec.LookPath(args[0])
	switch {
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, os.ErrNotExist):
		return "", false, cli.With(noCommand, "", err)
	case err != nil:
		return "", false, cli.With(noExecution, "", err)
	}
	return program, plan.Bare, nil
}

// minMemory is less than any device has, in bytes. Who asks for less has forgotten the unit.
const minMemory = 1 << 20

// parseMemory parses a number of bytes, such as 40Gi, and 40GiB as people write it.
func parseMemory(text string) (uint64, error) {
	q, err := quantity.Parse(strings.TrimSuffix(text, "B"))
	n, whole := q.Whole()
	if err != nil || !whole || n < minMemory {
		return 0, fmt.Errorf("want memory with its unit, such as 40Gi, got %q", text)
	}
	return uint64(n), nil
}

// runLeased executes a command with devices. It returns only if that fails.
func (a *app) runLeased(ctx context.Context, o leaseOptions, args []string) error {
	if err := o.complete(); err != nil {
		return err
	}
	if len(args) == 0 {
		return cli.With(cli.Usage, cli.UsageHint(o.cmd), errors.New("there is no command to run"))
	}
	program, bare, err := findCommand(args)
	if err != nil {
		return err
	}
	granted, err := a.acquire(ctx, o, api.LeaseRequest{Command: wording.Line(args), Confine: bare})
	if err != nil {
		return err
	}
	killed := time.Duration(o.limit)
	if killed > 0 {
		killed += leaseGrace
	}
	plan, err := launch.For(args, launch.Lease{
		RunOptions: granted.Options, IDs: granted.Devices, Limit: killed,
		ByIndex: o.ids == byIndex, HostIndexes: granted.Indexes, Confined: granted.Confined,
	})
	if err != nil {
		return cli.With(noLease, "", err)
	}
	env, replaced := plan.Environ(a.Env)
	for _, note := range slices.Concat(granted.Options.Conflicts, plan.Notes, replaced) {
		a.Log.Warn(note)
	}
	if plan.Bundle != "" {
		if err := a.showWithOptions(plan.Bundle, granted.Options); err != nil {
			return cli.With(noLease, "", err)
		}
	}
	if plan.Bare && !granted.Confined && !o.quiet {
		a.Log.Info("CUDA_VISIBLE_DEVICES names the leased devices; nothing keeps the command from others")
	}
	// Before the signals are released, they only request the end of this program. After that SIGINT and SIGHUP are ignored
	// if they were when it began, as those of `command &` and nohup. Of other signals Go does not know that.
	if a.ReleaseSignals() || ctx.Err() != nil {
		return context.Cause(ctx)
	}
	err = syscall.Exec(program, plan.Args, env)
	return cli.With(noExecution, "", fmt.Errorf("execute %s: %w", wording.Quote(program), err))
}

var (
	// errBusy means that the devices are not free, and the user does not wait.
	errBusy = errors.New("the devices are not free")
	// errLost means that the manager has ended while it gave devices.
	errLost = errors.New("the device manager has ended while it gave the devices")
)

const (
	// restartTime is how long a request waits for the next manager when the manager has ended, such as when its package
	// is upgraded, and restartPoll the time between two attempts.
	restartTime = 30 * time.Second
	restartPoll = 200 * time.Millisecond
)

// acquire waits for a lease.
func (a *app) acquire(ctx context.Context, o leaseOptions, request api.LeaseRequest) (lease.Granted, error) {
	request.Request, request.Seconds = o.Request, time.Duration(o.limit).Seconds()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if o.wait > 0 {
		timer := time.AfterFunc(time.Duration(o.wait), func() { cancel(errBusy) })
		defer timer.Stop()
	}
	reason := "they are being prepared"
	line := a.newWaitLine()
	defer line.clear()
	say := func(text string) {
		if o.wait != 0 && !o.quiet {
			line.show(o.cmd.CommandPath() + " " + text)
		}
	}
	r := asking{client: a.leaseClient(), request: request, begin: time.Now()}
	if o.AllowBusy { // which is for users of the whole API
		r.client = a.client()
	}
	r.waits = func(w lease.Waiting) {
		reason = w.Reason
		if o.wait == 0 {
			cancel(errBusy)
		}
		say(fmt.Sprintf("waits for %s: place %d in the queue, %s", w.Request, w.Position, reason))
	}
	r.lost = func(err error) {
		reason = "the device manager has ended"
		say(fmt.Sprintf("asks again for up to %v, at the end of the queue: %s", restartTime, wording.OneLine(err)))
	}
	if o.wait == 0 {
		r.lost = nil
	}
	granted, err := r.ask(ctx)
	switch {
	case errors.Is(err, errBusy):
		return granted, cli.With(waitEnded, "device-manager leases shows who has devices and who waits",
			fmt.Errorf("%w: %s", err, reason))
	case errors.Is(err, api.ErrNotAllowed) && o.AllowBusy:
		return granted, cli.With(noLease, "--allow-busy is for root and the members of the manager's --api-group", err)
	case err != nil && !errors.Is(err, context.Canceled):
		return granted, cli.With(noLease, cli.HintOf(a.Classify(cli.Classify(err, leaseErrors))), err)
	}
	return granted, err
}

// leaseClient has the methods of api.Client that a request for a lease needs.
type leaseClient interface {
	Lease(ctx context.Context, r api.LeaseRequest, waits func(lease.Waiting)) (lease.Granted, error)
	Leases(ctx context.Context) (api.LeaseList, error)
}

var _ leaseClient = (*api.Client)(nil)

// asking is a request for a lease that outlives a manager.
type asking struct {
	client  leaseClient
	request api.LeaseRequest
	begin   time.Time
	waits   func(lease.Waiting)
	lost    func(error) // called when the place in the queue is lost; nil does not ask again
}

// ask asks until the lease begins. When the manager ends, it asks the next one.
func (r *asking) ask(ctx context.Context) (lease.Granted, error) {
	var lost time.Time // since when no manager answers
	for {
		err := error(nil)
		if !lost.IsZero() {
			err = r.checkLost(ctx)
		}
		if err == nil {
			var granted lease.Granted
			granted, err = r.client.Lease(ctx, r.request, func(w lease.Waiting) {
				lost = time.Time{}
				r.waits(w)
			})
			if err == nil {
				return granted, nil
			}
		}
		ended := errors.Is(err, manager.ErrRetry) || errors.Is(err, unixsocket.ErrEnded)
		switch {
		case r.lost == nil || !ended && (lost.IsZero() || !errors.Is(err, api.ErrNoManager)):
			return lease.Granted{}, err
		case lost.IsZero():
			lost = time.Now()
			r.lost(err)
		case time.Since(lost) > restartTime:
			return lease.Granted{}, err
		}
		select {
		case <-ctx.Done():
			return lease.Granted{}, context.Cause(ctx)
		case <-time.After(restartPoll):
		}
	}
}

// checkLost returns an error that wraps errLost if the manager that has ended had given the devices already: another
// request would wait for the first one's devices.
func (r *asking) checkLost(ctx context.Context) error {
	list, err := r.client.Leases(ctx)
	if err != nil {
		return err
	}
	for _, l := range list.Items {
		holder := l.PID == os.Getpid() || r.request.PID > 0 && l.PID == r.request.PID || r.request.Timed && l.PID == 0
		if holder && l.UID == os.Geteuid() && l.Since.After(r.begin.Add(-time.Second)) {
			return fmt.Errorf("%w: the lease is %s", errLost, l.ID)
		}
	}
	return nil
}
