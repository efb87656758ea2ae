package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/sim"
)

// createOptions are the options of create.
type createOptions struct {
	sim.Options
	Machine string
}

func (a *app) createCommand() *cobra.Command {
	var opts createOptions
	var out format
	cmd := &cobra.Command{
		Use:   "create DIR --machine NAME|FILE",
		Short: "Make a simulated node",
		Long: `Makes a simulated node in a new directory and prints the directory or, with -o, what show prints of it. The machine is
one of ` + "`gpu-sim list-machines`" + ` or a file of your own, which is named with a slash or an extension .yaml. A machine
pcie-fabric-N is generated: N GPUs (a multiple of 16, at most 128) behind PCIe switches, with 16 GPUs, two host bridges
and eight switches on each NUMA node.

The library is compiled when it is needed for the first time, with $CC or cc, and kept in the user's cache directory.
Device nodes have the numbers of real ones but no driver behind them; making them needs root (CAP_MKNOD).`,
		Example: `  gpu-sim create /tmp/node --machine dgx-h100
  gpu-sim create /tmp/node --machine ./lab.yaml --lib-dir usr/lib64
  gpu-sim create /tmp/node --machine dgx-h100 --driver 590.44.01 --force   # the driver is upgraded`,
		Annotations:       cli.Statuses(exit.OK, exit.Failure, exit.Usage, exit.Interrupted),
		Args:              noMore,
		ValidArgsFunction: completeDirs,
		RunE:              func(cmd *cobra.Command, args []string) error { return a.create(cmd.Context(), args[0], opts, out) },
	}
	f := cmd.Flags()
	f.StringVarP(&opts.Machine, "machine", "m", "", "the machine's `name` or file")
	f.StringVar(&opts.Driver, "driver", "", "the driver's `version` (default the machine's, most often "+sim.DefaultDriver+")")
	f.StringVar(&opts.LibDir, "lib-dir", "", "the libraries' `directory` in the node (default Debian's multiarch directory)")
	f.StringSliceVar(&opts.Extras, "extras", nil, "`list` of what there is besides GPUs: "+strings.Join(sim.Extras(), ", "))
	f.BoolVar(&opts.Force, "force", false, "replace a simulated node that is in DIR")
	f.BoolVar(&opts.PlainNodes, "plain-nodes", false, "make regular files instead of device nodes, for containers unusable; needs no root")
	out.addFlag(cmd, directory, table, asJSON)
	_ = cmd.RegisterFlagCompletionFunc("machine", completeMachines)
	_ = cmd.RegisterFlagCompletionFunc("extras", cobra.FixedCompletions(sim.Extras(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *app) create(ctx context.Context, dir string, opts createOptions, out format) error {
	if opts.Machine == "" {
		return exit.With(exit.Usage, "", errors.New("--machine is missing; there are "+strings.Join(sim.Machines(), ", ")))
	}
	m, err := sim.LoadMachine(opts.Machine)
	if err != nil {
		return err
	}
	for _, e := range a.env {
		if cc, ok := strings.CutPrefix(e, "CC="); ok {
			opts.Compiler = cc
		}
	}
	n, err := sim.Create(ctx, dir, m, opts.Options)
	if err != nil {
		return err
	}
	if out == directory {
		_, err = fmt.Fprintln(a.stdout, n.Root())
		return err
	}
	return a.printNode(n, out)
}
