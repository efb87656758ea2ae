package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/sim"
)

// node is a node in the output of show.
type node struct {
	Root          string       `json:"root"`
	Machine       string       `json:"machine"`
	DriverVersion string       `json:"driverVersion"`
	Library       string       `json:"library"`
	Devices       []gpu.Device `json:"devices"`
	Faults        []string     `json:"faults"`
}

func (a *app) showCommand() *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "show DIR",
		Short: "Show a simulated node",
		Long: `Shows the machine, the driver and the GPUs of a simulated node, and its faults as in its state file. Lost
GPUs are shown, GPUs that are gone are not.`,
		Example:           "  gpu-sim show /tmp/node",
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage),
		Args:              oneDir,
		ValidArgsFunction: completeDirs,
		RunE: func(_ *cobra.Command, args []string) error {
			n, err := sim.Open(args[0])
			if err != nil {
				return err
			}
			return a.printNode(n, out)
		},
	}
	out.addFlag(cmd, table, asJSON)
	return cmd
}

func (a *app) printNode(n *sim.Node, out format) error {
	s, err := n.Snapshot()
	if err != nil {
		return err
	}
	faults, err := n.Faults()
	if err != nil {
		return err
	}
	if out == asJSON {
		return printJSON(a.stdout, node{n.Root(), n.Machine().Name, n.Driver(), n.Library(), s.Devices, faults})
	}
	return printTable(a.stdout, func(w io.Writer) {
		fmt.Fprintf(w, "Machine:\t%s (%s)\n", n.Machine().Name, n.Machine().Description)
		fmt.Fprintf(w, "Driver:\t%s\n", n.Driver())
		fmt.Fprintf(w, "Library:\t%s\n", n.Library())
		for _, d := range s.Devices {
			fmt.Fprintf(w, "GPU %d:\t%s, minor %d, %s, %s\n", d.Index, d.Name, d.Minor, d.PCIBusID, d.UUID)
			for _, m := range d.MIG {
				fmt.Fprintf(w, "  MIG %d:%d:\t%s, %s\n", d.Index, m.Index, m.Profile, m.UUID)
			}
		}
		for _, f := range faults {
			fmt.Fprintf(w, "Fault:\t%s\n", f)
		}
	})
}
