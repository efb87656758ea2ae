package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
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
		Long: `Makes a simulated node in a new directory and prints the directory or, with -o, what show prints. The
machine is one of ` + "`gpu-sim list-machines`" + `, or a file of your own, whose name has a slash or ends in
.yaml. A machine pcie-fabric-N is generated: N GPUs (a multiple of 16, at most 128) behind PCIe switches, with 16
GPUs, two host bridges and eight switches on each NUMA node.

The library is compiled on the first use, with $CC or cc, into the user's cache directory. Device nodes have the numbers
of real ones, but no driver serves them; to make them takes root (CAP_MKNOD).`,
		Example: `  gpu-sim create /tmp/node --machine dgx-h100
  gpu-sim create /tmp/node --machine ./lab.yaml --lib-dir usr/lib64
  gpu-sim create /tmp/node --machine dgx-h100 --driver 590.44.01 --force   # the driver is upgraded`,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Interrupted),
		Args:              oneDir,
		ValidArgsFunction: completeDirs,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.create(cmd.Context(), args[0], opts, out)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&opts.Machine, "machine", "m", "", "`name` or file of the machine")
	f.StringVar(&opts.Driver, "driver", "",
		"`version` of the driver (default: the machine's, usually "+sim.DefaultDriver+")")
	f.StringVar(&opts.LibDir, "lib-dir", "",
		"`directory` of the libraries in the node (default: Debian's multiarch directory)")
	f.StringSliceVar(&opts.Extras, "extras", nil, "`list` of devices besides GPUs: "+strings.Join(sim.Extras(), ", "))
	f.BoolVar(&opts.Force, "force", false, "replace the simulated node in DIR")
	f.BoolVar(&opts.PlainNodes, "plain-nodes", false,
		"make regular files instead of device nodes: needs no root, and no container can use them")
	out.addFlag(cmd, directory, table, asJSON)
	_ = cmd.RegisterFlagCompletionFunc("machine", completeMachines)
	_ = cmd.RegisterFlagCompletionFunc("extras",
		cobra.FixedCompletions(sim.Extras(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *app) create(ctx context.Context, dir string, opts createOptions, out format) error {
	if opts.Machine == "" {
		return cli.With(cli.Usage, "",
			errors.New("--machine is missing; there are "+strings.Join(sim.Machines(), ", ")))
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
