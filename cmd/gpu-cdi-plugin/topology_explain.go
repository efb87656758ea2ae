package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/exit"
)

// explainOptions are a request as a person asks it.
type explainOptions struct {
	size, runnersUp int
	available, must []string
	policy          string
	weights         allocator.Weights
	out             output
}

// mostRunnersUp is more than a person reads. Of 128 GPUs there are more sets than can be found in any time.
const mostRunnersUp = 100

func (a *app) explainCommand() *cobra.Command {
	o := explainOptions{runnersUp: 3}
	cmd := &cobra.Command{
		Use:   "explain --size N",
		Short: "Show which GPUs a request would get, and why",
		Long: `Prints the whole GPUs that are best for a request of --size GPUs, their score, the pairs that it is made of, what would
be left for the next requests, and the sets that come next.

A GPU is named by its index or UUID. By default all are available that can be used and are not in MIG mode. What links
are worth, and the policy, come from the configuration file (allocation) as for serve. On whole GPUs the policies spread
and pack are the same as topology.

With -o name it prints the CDI names of the chosen GPUs.`,
		Example: `  gpu-cdi-plugin topology explain --size 4
  gpu-cdi-plugin topology explain --size 2 --available 0,1,4,5 --must 1
  gpu-cdi-plugin topology explain --size 2 --policy numa -o json | jq '.chosen.score'`,
		Annotations: cli.Statuses(exit.OK, exit.Failure, exit.Usage, exit.Partial, exit.NoDriver, exit.NoGPU,
			exit.Interrupted),
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.weights = a.plugin.Allocation.Weights
			if !cmd.Flags().Changed("policy") {
				o.policy = string(a.plugin.Allocation.Policy)
			}
			return a.explain(cmd.Context(), &o)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.size, "size", 0, "how many GPUs are asked for, as a `number`")
	f.StringSliceVar(&o.available, "available", nil, "`GPUs` to choose from, by index or UUID (default: all that can be given)")
	f.StringSliceVar(&o.must, "must", nil, "`GPUs` that must be among the chosen")
	f.Var(&choice{&o.policy, allocator.Policies()}, "policy", "`policy` to choose by: "+strings.Join(allocator.Policies(), ", ")+
		" (default: allocation.policy of the configuration)")
	f.IntVar(&o.runnersUp, "runners-up", o.runnersUp, fmt.Sprintf("how many of the next best sets to show, at most %d, as a `number`", mostRunnersUp))
	_ = cmd.MarkFlagRequired("size")
	completeChoices(cmd, f, "policy")
	for _, name := range []string{"size", "runners-up"} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
	for _, name := range []string{"available", "must"} {
		_ = cmd.RegisterFlagCompletionFunc(name, a.completeGPUs)
	}
	o.out.addFlags(cmd, "table", "json", "yaml", "name")
	a.addTimeout(cmd)
	return cmd
}

// completeGPUs offers the indices of the GPUs that can be given, behind those that are there already.
func (a *app) completeGPUs(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	h, err := a.host()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	s, err := a.readDevices(cmd.Context(), h)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	before := prefix[:strings.LastIndexByte(prefix, ',')+1]
	named := strings.Split(before, ",")
	var list []string
	for _, d := range given(s) {
		index := strconv.Itoa(d.Index)
		if name := before + index; strings.HasPrefix(name, prefix) && !slices.Contains(named, index) {
			list = append(list, name+"\t"+d.Name)
		}
	}
	return list, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}

func (a *app) explain(ctx context.Context, o *explainOptions) error {
	if err := o.check(); err != nil {
		return exit.With(exit.Usage, "see gpu-cdi-plugin topology explain --help", err)
	}
	h, err := a.host()
	if err != nil {
		return err
	}
	s, err := a.readTopology(ctx, h)
	if err != nil {
		return err
	}
	e, err := explanationOf(s, o)
	if err != nil {
		return err
	}
	out := o.out
	v := e.view()
	for _, d := range e.Chosen.Devices {
		v.names = append(v.names, a.CDIKind+"="+d.UUID)
	}
	if err := out.print(a.stdout, v); err != nil {
		return err
	}
	return unread(s)
}

func (o *explainOptions) check() error {
	var errs []error
	if o.size < 1 {
		errs = append(errs, fmt.Errorf("--size %d: want at least 1", o.size))
	}
	if o.runnersUp < 0 || o.runnersUp > mostRunnersUp {
		errs = append(errs, fmt.Errorf("--runners-up %d: want 0 to %d", o.runnersUp, mostRunnersUp))
	}
	return errors.Join(errs...)
}

// explanationOf asks the allocator. A request that cannot be fulfilled is wrong use.
func explanationOf(s *gpu.Snapshot, o *explainOptions) (*explanation, error) {
	r := allocator.Request{Size: o.size}
	var err error
	if r.Available, err = gpuIDs(s, "--available", o.available); err != nil {
		return nil, err
	}
	if r.Must, err = gpuIDs(s, "--must", o.must); err != nil {
		return nil, err
	}
	if o.available == nil {
		for _, d := range given(s) {
			r.Available = append(r.Available, d.UUID)
		}
	}
	node, err := allocator.NewNode(s, o.weights)
	if err != nil {
		return nil, err
	}
	choices, err := node.Rank(allocator.Policy(o.policy), r, 1+o.runnersUp)
	if err != nil {
		return nil, requestError(s, err)
	}
	return newExplanation(s, node, o, r, choices)
}

// given are the GPUs that are given out whole.
func given(s *gpu.Snapshot) []*gpu.Device {
	var list []*gpu.Device
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Usable() && d.UUID != "" && !d.MIGEnabled {
			list = append(list, d)
		}
	}
	return list
}

// gpuIDs are the UUIDs of GPUs that are named by index or UUID.
func gpuIDs(s *gpu.Snapshot, flag string, names []string) ([]string, error) {
	var ids []string
	for _, name := range names {
		d := gpuNamed(s, name)
		switch {
		case d == nil:
			return nil, exit.With(exit.Usage, "gpu-cdi-plugin devices lists the GPUs; name them by index or UUID",
				fmt.Errorf("%s: there is no GPU %q", flag, name))
		case !d.Usable():
			return nil, exit.With(exit.Usage, "leave it out, or see gpu-cdi-plugin devices",
				fmt.Errorf("%s: GPU %d cannot be used: %s", flag, d.Index, d.Error))
		case d.MIGEnabled:
			return nil, exit.With(exit.Usage, "leave it out; its MIG devices are given instead",
				fmt.Errorf("%s: GPU %d is in MIG mode and cannot be given whole", flag, d.Index))
		}
		ids = append(ids, d.UUID)
	}
	return ids, nil
}

func gpuNamed(s *gpu.Snapshot, name string) *gpu.Device {
	for i := range s.Devices {
		d := &s.Devices[i]
		if strconv.Itoa(d.Index) == name || d.UUID != "" && strings.EqualFold(d.UUID, name) {
			return d
		}
	}
	return nil
}

// requestError tells of a request that has no answer, with the names that people use.
func requestError(s *gpu.Snapshot, err error) error {
	var r *allocator.RequestError
	if !errors.As(err, &r) {
		return err
	}
	named := *r
	named.IDs = nil
	for _, id := range r.IDs {
		named.IDs = append(named.IDs, gpuName(gpuNamed(s, id)))
	}
	hint := "name each GPU once"
	switch {
	case r.Reason == allocator.BadSize && r.Available == 0:
		hint = "name GPUs with --available; those in MIG mode cannot be given whole"
	case r.Reason == allocator.BadSize:
		hint = fmt.Sprintf("ask for %d to %d, or make more available; GPUs in MIG mode cannot be given whole",
			max(r.Must, 1), r.Available)
	case r.Reason == allocator.NotAvailable:
		hint = "what is in --must has to be in --available too; GPUs in MIG mode cannot be given whole"
	}
	return exit.With(exit.Usage, hint, fmt.Errorf("choose GPUs: %w", &named))
}
