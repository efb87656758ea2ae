package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/manager/arguments"
	"gpu-cdi-plugin/manager/lease"
)

func (a *app) leasesCommand() *cobra.Command {
	var out cli.Output
	var watch bool
	cmd := a.asksServe(&cobra.Command{
		Use:   "leases",
		Short: "List the leases, and who waits for one",
		Long: `Lists the leases in the order of their begin, then the requests that wait, first come first, and then the
devices that were left out in the last 10 minutes, with the reason, such as a process that uses them without a lease.
The devices of a lease have their indexes on the host. -o wide also shows their IDs, and why requests wait; -o json and
yaml show all of it. -o name prints the IDs of the leases. --watch ends with Ctrl-C.`,
		Example: `  device-manager leases
  device-manager leases -o json | jq -r '.items[].devices[]'`,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.leases(cmd.Context(), out, watch) },
	})
	out.AddFlags(cmd, "table", "wide", "json", "yaml", "name")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "print the list again whenever it has changed")
	return cmd
}

// watchInterval is the time between two looks at the leases.
const watchInterval = time.Second

// leases prints the leases, with `watch` again at each change.
func (a *app) leases(ctx context.Context, out cli.Output, watch bool) error {
	client := a.leaseClient()
	var last api.LeaseList
	for first := true; ; first = false {
		list, err := client.Leases(ctx)
		if watch && ctx.Err() != nil { // this is how a watch ends
			return nil //nolint:nilerr // it is the error of the signal
		}
		if err != nil {
			return cli.Classify(err, leaseErrors)
		}
		if first || !sameLeases(list, last) {
			if !first && (out.Format == "table" || out.Format == "wide") {
				fmt.Fprintln(a.Stdout)
			}
			if err := out.Print(a.Stdout, leasesView(list, time.Now())); err != nil || !watch {
				return err
			}
			last = list
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(watchInterval):
		}
	}
}

// sameLeases reports whether two lists are the same. When a lease ends is calculated anew for each list, by clocks that
// differ a little.
func sameLeases(a, b api.LeaseList) bool {
	plain := func(list api.LeaseList) api.LeaseList {
		list.Items = slices.Clone(list.Items)
		for i := range list.Items {
			list.Items[i].Ends = nil
		}
		return list
	}
	return reflect.DeepEqual(plain(a), plain(b)) && slices.EqualFunc(a.Items, b.Items, func(x, y lease.Lease) bool {
		if x.Ends == nil || y.Ends == nil {
			return x.Ends == y.Ends
		}
		return x.Ends.Sub(*y.Ends).Abs() <= time.Second
	})
}

// maxReason is how many bytes of a reason the wide table shows.
const maxReason = 160

func leasesView(list api.LeaseList, now time.Time) cli.View {
	v := cli.View{
		Data: list,
		Table: cli.Table{
			Header: []string{"LEASE", "USER", "PID", "DEVICES", "SINCE", "ENDS IN", "COMMAND", "IDS"}, Wide: 7,
		},
	}
	since := func(t time.Time) string { return now.Sub(t).Truncate(time.Second).String() }
	for _, l := range list.Items {
		ends := "-"
		if l.Ends != nil {
			ends = l.Ends.Sub(now).Truncate(time.Second).String()
		}
		devices := fmt.Sprintf("%d x %s", len(l.Devices), strings.Join(append(l.Models, l.Resource)[:1], ""))
		if len(l.Indexes) > 0 {
			devices += " (" + strings.Join(l.Indexes, ",") + ")"
		}
		v.Table.Rows = append(v.Table.Rows, []string{
			l.ID, l.User, pidCell(l.PID), devices, since(l.Since), ends, wording.Shorten(l.Command, maxShown),
			strings.Join(l.Devices, ","),
		})
		v.Names = append(v.Names, l.ID)
	}
	for _, w := range list.Waiting {
		v.Table.Rows = append(v.Table.Rows, []string{
			fmt.Sprintf("waits (%d)", w.Position), w.User, pidCell(w.PID), w.Request, since(w.Since), "-",
			wording.Shorten(w.Command, maxShown), wording.Shorten(w.Reason, maxReason),
		})
	}
	v.Table.Rows = append(v.Table.Rows, leftOutRows(list.Busy, since)...)
	return v
}

// leftOutRows has a row for each reason why devices were left out, with the time of the last one.
func leftOutRows(list []lease.Busy, since func(time.Time) string) (rows [][]string) {
	var reasons []string
	devices, last := map[string][]string{}, map[string]time.Time{}
	for _, b := range list {
		if devices[b.Reason] == nil {
			reasons = append(reasons, b.Reason)
		}
		devices[b.Reason] = append(devices[b.Reason], b.Device)
		if b.At.After(last[b.Reason]) {
			last[b.Reason] = b.At
		}
	}
	for _, reason := range reasons {
		ids, what := devices[reason], devices[reason][0]
		if len(ids) > 1 {
			what = wording.Count(len(ids), "device")
		}
		rows = append(rows, []string{
			"left out", "-", "-", what, since(last[reason]), "-", wording.Shorten(reason, maxReason), strings.Join(ids, ","),
		})
	}
	return rows
}

// pidCell returns a process ID. A lease for a time has none.
func pidCell(pid int) string {
	if pid == 0 {
		return "-"
	}
	return strconv.Itoa(pid)
}

func (a *app) leaseCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lease",
		Short: "Make, list, extend and end leases",
		Long: `Makes, lists, extends and ends leases: device-manager serve gives devices to a command, to a process or for a
time. device-manager run leases devices for a command.`,
		Example: `  device-manager lease list
  device-manager lease end 7c2kq1xm`,
		Annotations: cli.Statuses(cli.OK, cli.Usage),
		Args:        cli.UnknownVerb,
		RunE:        cli.ShowHelp,
	}
	list := a.leasesCommand()
	list.Use, list.Example = "list", strings.ReplaceAll(list.Example, "manager leases", "manager lease list")
	list.Long = "The same as device-manager leases.\n\n" + list.Long
	cmd.AddCommand(a.leaseCreateCommand(), a.leaseAdoptCommand(), list)
	var left timeLimit
	extend := a.asksServe(&cobra.Command{
		Use:   "extend LEASE --for TIME",
		Short: "Have a lease end later",
		Long: `Has a lease end after a time from now. It must be later than before, and a lease without a limit, for which
device-manager leases shows no end, stays without one. A lease that passed others in the queue, since it ends before
they can begin, is not extended.`,
		Example: `  device-manager lease extend 7c2kq1xm --for 2h`,
		Args:    cli.Arguments("the ID of a lease", 1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			err := a.changeLease(func(c *api.Client) error {
				return c.ExtendLease(cmd.Context(), args[0], time.Duration(left))
			})
			if errors.Is(err, manager.ErrInvalid) {
				err = cli.With(cli.Failure, "device-manager leases shows when it ends; without a time it has no limit", err)
			}
			return err
		},
	})
	extend.Flags().Var(&left, "for", "`time` from now after which the lease ends")
	_ = extend.MarkFlagRequired("for")
	cmd.AddCommand(extend, a.asksServe(&cobra.Command{
		Use:   "end LEASE...",
		Short: "End the commands of leases",
		Long: `Ends the commands of leases: with SIGTERM, and with SIGKILL 10 s later. The devices are free when the commands
have ended, and for a command that you may not signal, as that of sudo, 40 s later without its end. Root and the members
of --api-group can end any lease, and other users their own.`,
		Example: `  device-manager lease end 7c2kq1xm`,
		Args:    cli.Arguments("IDs of leases", 1, math.MaxInt),
		RunE: func(cmd *cobra.Command, args []string) error {
			var errs []error
			for _, id := range args {
				errs = append(errs, a.changeLease(func(c *api.Client) error { return c.EndLease(cmd.Context(), id) }))
			}
			return errors.Join(errs...)
		},
	}))
	return cmd
}

// changeLease calls the API on the socket by which this user may do most.
func (a *app) changeLease(change func(*api.Client) error) error {
	return cli.Classify(change(a.leaseClient()), leaseErrors)
}

func (a *app) leaseCreateCommand() *cobra.Command {
	o, out, quote := leaseOptions{}, cli.Output{}, false
	cmd := a.leasing(&cobra.Command{
		Use:   "create --gpus N --for TIME",
		Short: "Lease devices for a time",
		Long: `Leases devices for a time, for what cannot be run by device-manager run. -o podman, docker and nerdctl print
what a container gets as arguments of these engines, for $(...); see device-manager admit. When the time is over, such a
container gets SIGTERM, and SIGKILL 10 s later, and the lease ends with it. What uses the devices otherwise goes on
without a lease.`,
		Example: `  podman create $(device-manager lease create --gpus 1 --for 2h -o podman) \
    docker.io/library/debian sleep 2h`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.limit == 0 {
				return cli.With(cli.Usage, "", errors.New("--for: want the time of the lease"))
			}
			return a.printLease(cmd.Context(), o, api.LeaseRequest{Timed: true, Command: "lease create"}, out, quote)
		},
	})
	o.addFlags(cmd)
	addLeaseOutput(cmd, &out, &quote)
	return cmd
}

func (a *app) leaseAdoptCommand() *cobra.Command {
	o, out, quote := leaseOptions{}, cli.Output{}, false
	cmd := a.leasing(&cobra.Command{
		Use:   "adopt PID --device ID...",
		Short: "Lease the devices that a process uses already",
		Long: `Leases devices that a process uses already, so that nobody else gets them. The process must be the user's own.
If something uses the devices, it waits until device-manager leases shows the process as one that does; for root it does
not. Devices that nothing uses are leased at once, and it is not checked that the process will use them. The lease ends
when the process has ended, and containers that it has started with the devices.`,
		Example: `  device-manager lease adopt 4711 --device GPU-20b81d6d-296c-823a-8c99-394eda7a72e1`,
		Args:    cli.Arguments("a process ID", 1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			pid, err := strconv.Atoi(args[0])
			if err != nil || pid < 1 {
				return cli.With(cli.Usage, "", fmt.Errorf("%q is no process ID", args[0]))
			}
			return a.printLease(cmd.Context(), o, api.LeaseRequest{PID: pid, Command: commandOf(pid)}, out, quote)
		},
	})
	o.addWaitFlags(cmd)
	cmd.Flags().StringSliceVar(&o.Devices, "device", nil, "`ID` or UUID of a device that the process uses; for several, "+
		"with commas or again")
	addLeaseOutput(cmd, &out, &quote)
	return cmd
}

// commandOf returns the command line of a process for people, or nothing if it cannot be read.
func commandOf(pid int) string {
	p, err := proc.Open(procfs, pid)
	if err != nil {
		return ""
	}
	defer p.Close()
	args, _ := p.Arguments()
	return wording.Line(args)
}

// leasing marks cmd as a verb that asks for a lease.
func (a *app) leasing(cmd *cobra.Command) *cobra.Command {
	cmd.Annotations = cli.Statuses(cli.OK, cli.Failure, cli.Usage, waitEnded, noLease, cli.Interrupted)
	return cmd
}

func addLeaseOutput(cmd *cobra.Command, out *cli.Output, quote *bool) {
	out.AddFlags(cmd, append([]string{"table", "json", "yaml", "name"}, arguments.Engines()...)...)
	cmd.Flags().BoolVar(quote, "quote", false, "quote the arguments of -o podman, docker and nerdctl for a shell's eval")
}

// printLease waits for a lease, and prints what a container with it gets.
func (a *app) printLease(
	ctx context.Context, o leaseOptions, request api.LeaseRequest, out cli.Output, quote bool,
) error {
	if err := o.complete(); err != nil {
		return err
	}
	granted, err := a.acquire(ctx, o, request)
	if err != nil {
		return err
	}
	if slices.Contains(arguments.Engines(), out.Format) {
		return a.printArguments(out.Format, granted.Options, quote)
	}
	v := cli.View{
		Data: granted, Names: []string{granted.ID}, Table: cli.Table{Header: []string{"LEASE", "DEVICES", "CDI"}},
	}
	v.Table.Rows = [][]string{{
		granted.ID, strings.Join(granted.Devices, ","), cli.OrDash(strings.Join(granted.Options.CDIDevices, ",")),
	}}
	return out.Print(a.Stdout, v)
}
