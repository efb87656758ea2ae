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
)

// explainOptions are the options of topology explain: a request for GPUs.
type explainOptions struct {
	size            int
	available, must []string
	policy          string
	weights         allocator.Weights
	out             cli.Output
}

func (a *app) explainCommand() *cobra.Command {
	o := explainOptions{}
	cmd := &cobra.Command{
		Use:   "explain --size N",
		Short: "Show which GPUs a request would get, and why",
		Long: `Prints the set of --size whole GPUs that a container would get, its score, the pairs that add up to it,
and the remaining GPUs.

The weights of links and the default policy are those of the configuration (allocation), as for serve. For whole GPUs
the policies spread and pack are the same as topology. -o name prints the CDI names of the chosen GPUs.`,
		Example: `  gpu-cdi-plugin topology explain --size 4
  gpu-cdi-plugin topology explain --size 2 --available 0,1,4,5 --must 1
  gpu-cdi-plugin topology explain --size 2 --policy numa -o json | jq '.chosen.score'`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Partial, cli.NoDriver, cli.NoGPU,
			cli.Interrupted),
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
	f.IntVar(&o.size, "size", 0, "`number` of GPUs in the request")
	f.StringSliceVar(&o.available, "available", nil,
		"`GPUs` to choose from, by index or UUID (default: all usable GPUs that are not in MIG mode)")
	f.StringSliceVar(&o.must, "must", nil, "`GPUs` that must be chosen, by index or UUID")
	f.Var(&cli.Choice{Value: &o.policy, Known: allocator.Policies()}, "policy",
		"`policy`: "+strings.Join(allocator.Policies(), ", ")+" (default: allocation.policy of the configuration)")
	_ = cmd.MarkFlagRequired("size")
	_ = cmd.RegisterFlagCompletionFunc("size", cobra.NoFileCompletions)
	for _, name := range []string{"available", "must"} {
		_ = cmd.RegisterFlagCompletionFunc(name, a.completeGPUs)
	}
	o.out.AddFlags(cmd, "table", "json", "yaml", "name")
	a.addTimeout(cmd)
	return cmd
}

// completeGPUs completes a list of GPU indices.
func (a *app) completeGPUs(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	h, err := a.host()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	s, err := a.readDevices(cmd.Context(), h)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	complete := prefix[:strings.LastIndexByte(prefix, ',')+1]
	listed := strings.Split(complete, ",")
	var list []string
	for _, d := range wholeGPUs(s) {
		index := strconv.Itoa(d.Index)
		if text := complete + index; strings.HasPrefix(text, prefix) && !slices.Contains(listed, index) {
			list = append(list, text+"\t"+d.Name)
		}
	}
	return list, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}

func (a *app) explain(ctx context.Context, o *explainOptions) error {
	if o.size < 1 {
		return cli.With(cli.Usage, "see gpu-cdi-plugin topology explain --help",
			fmt.Errorf("--size %d: want at least 1", o.size))
	}
	h, err := a.host()
	if err != nil {
		return err
	}
	s, err := a.readTopology(ctx, h)
	if err != nil {
		return err
	}
	e, err := explainRequest(s, o)
	if err != nil {
		return err
	}
	out, v := o.out, e.view()
	for _, d := range e.Chosen.Devices {
		v.Names = append(v.Names, a.CDIKind+"="+d.UUID)
	}
	if err := out.Print(a.Stdout, v); err != nil {
		return err
	}
	return unreadableGPUs(s)
}

// explainRequest chooses GPUs for a request. If the request cannot be fulfilled, that is a usage error.
func explainRequest(s *gpu.Snapshot, o *explainOptions) (*explanation, error) {
	r := allocator.Request{Size: o.size}
	var err error
	if r.Available, err = gpuIDs(s, "--available", o.available); err != nil {
		return nil, err
	}
	if r.Must, err = gpuIDs(s, "--must", o.must); err != nil {
		return nil, err
	}
	if o.available == nil {
		for _, d := range wholeGPUs(s) {
			r.Available = append(r.Available, d.UUID)
		}
	}
	gpus, err := allocator.NewGPUs(s, o.weights)
	if err != nil {
		return nil, err
	}
	choice, err := gpus.Choose(allocator.Policy(o.policy), r)
	if err != nil {
		return nil, requestError(s, err)
	}
	return &explanation{
		Policy: o.policy, Objective: objectives[allocator.Policy(o.policy)], Size: o.size,
		Available: sortedGPUs(s, r.Available), Must: sortedGPUs(s, r.Must),
		Chosen:  describeSet(s, o.weights, r.Available, choice, len(gpus.UUIDs()) <= allocator.MaxExact),
		weights: o.weights,
	}, nil
}

// wholeGPUs returns the GPUs that a container can get as a whole: they can be used and are not in MIG mode.
func wholeGPUs(s *gpu.Snapshot) []*gpu.Device {
	var list []*gpu.Device
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Usable() && d.UUID != "" && !d.MIGEnabled {
			list = append(list, d)
		}
	}
	return list
}

// gpuIDs returns the UUIDs of the GPUs that a flag names.
func gpuIDs(s *gpu.Snapshot, flag string, names []string) ([]string, error) {
	var ids []string
	for _, name := range names {
		d := findGPU(s, name)
		switch {
		case d == nil:
			return nil, cli.With(cli.Usage, "gpu-cdi-plugin devices lists the GPUs; name them by index or UUID",
				fmt.Errorf("%s: there is no GPU %q", flag, name))
		case !d.Usable():
			return nil, cli.With(cli.Usage, "leave it out, or see gpu-cdi-plugin devices",
				fmt.Errorf("%s: GPU %d cannot be used: %s", flag, d.Index, d.Error))
		case d.MIGEnabled:
			return nil, cli.With(cli.Usage, "leave it out; containers get its MIG devices instead",
				fmt.Errorf("%s: GPU %d is in MIG mode, so a container cannot get it whole", flag, d.Index))
		}
		ids = append(ids, d.UUID)
	}
	return ids, nil
}

// findGPU returns the GPU with an index or UUID, or nil.
func findGPU(s *gpu.Snapshot, name string) *gpu.Device {
	for i := range s.Devices {
		d := &s.Devices[i]
		if strconv.Itoa(d.Index) == name || d.UUID != "" && strings.EqualFold(d.UUID, name) {
			return d
		}
	}
	return nil
}

// requestError returns the error for a request that cannot be fulfilled. It names GPUs by index instead of UUID.
func requestError(s *gpu.Snapshot, err error) error {
	var r *allocator.RequestError
	if !errors.As(err, &r) {
		return err
	}
	indexed := *r
	indexed.IDs = nil
	for _, id := range r.IDs {
		indexed.IDs = append(indexed.IDs, gpuName(findGPU(s, id)))
	}
	return cli.With(cli.Usage, "see --available and --must; GPUs in MIG mode are not available",
		fmt.Errorf("choose GPUs: %w", &indexed))
}
