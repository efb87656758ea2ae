package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/sim"
)

// machine is a machine in list-machines.
type machine struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	GPUs        int    `json:"gpus"`
	Model       string `json:"model"`
}

func (a *app) listCommand() *cobra.Command {
	var out format
	cmd := &cobra.Command{
		Use:   "list-machines [NAME|FILE...]",
		Short: "List the machines that can be made",
		Long: `Lists the machines that come with gpu-sim, or only those of these names and files, which must be machines. Each that
comes with it is a file in sim/machines of the sources.`,
		Example: `  gpu-sim list-machines -o name
  gpu-sim list-machines ./lab.yaml   # is it one?`,
		Annotations:       cli.Statuses(exit.OK, exit.Failure, exit.Usage),
		ValidArgsFunction: completeMachines,
		RunE:              func(_ *cobra.Command, args []string) error { return a.listMachines(args, out) },
	}
	out.addFlag(cmd, table, asJSON, names)
	return cmd
}

func (a *app) listMachines(wanted []string, out format) error {
	list := []machine{}
	if len(wanted) == 0 {
		wanted = sim.Machines()
	}
	for _, name := range wanted {
		m, err := sim.LoadMachine(name)
		if err != nil {
			return err
		}
		list = append(list, machine{m.Name, m.Description, len(m.GPUs), m.GPUs[0].Name})
	}
	if out == asJSON {
		return printJSON(a.stdout, map[string][]machine{"machines": list})
	}
	return printTable(a.stdout, func(w io.Writer) {
		if out == names {
			for _, m := range list {
				fmt.Fprintln(w, m.Name)
			}
			return
		}
		fmt.Fprintln(w, "NAME\tGPUS\tDESCRIPTION")
		for _, m := range list {
			fmt.Fprintf(w, "%s\t%d\t%s\n", m.Name, m.GPUs, m.Description)
		}
	})
}

// node is what show prints of a node.
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
		Long: `Shows the machine, the driver and the GPUs of a simulated node, and its faults as its state file has them. The GPUs are
those that the library is told to have; what is lost is among them.`,
		Example:           "  gpu-sim show /tmp/node",
		Annotations:       cli.Statuses(exit.OK, exit.Failure, exit.Usage),
		Args:              noMore,
		ValidArgsFunction: completeDirs,
		RunE:              func(_ *cobra.Command, args []string) error { return a.show(args[0], out) },
	}
	out.addFlag(cmd, table, asJSON)
	return cmd
}

func (a *app) show(dir string, out format) error {
	n, err := sim.Open(dir)
	if err != nil {
		return err
	}
	return a.printNode(n, out)
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
	return printTable(a.stdout, func(w io.Writer) { writeNode(w, n, s, faults) })
}

func writeNode(w io.Writer, n *sim.Node, s *gpu.Snapshot, faults []string) {
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
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func printTable(w io.Writer, rows func(io.Writer)) error {
	tw := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	rows(tw)
	return tw.Flush()
}
