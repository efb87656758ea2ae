package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/sim"
)

// machine is a machine in the output of list-machines.
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
		Short: "List machines that can be simulated",
		Long: `Lists the machines that come with gpu-sim, or only those that are named. Files are checked. The machines
that come with gpu-sim are in sim/machines of the sources.`,
		Example: `  gpu-sim list-machines -o name
  gpu-sim list-machines ./lab.yaml   # is the file valid?`,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage),
		ValidArgsFunction: completeMachines,
		RunE:              func(_ *cobra.Command, args []string) error { return a.listMachines(args, out) },
	}
	out.addFlag(cmd, table, asJSON, names)
	return cmd
}

func (a *app) listMachines(selected []string, out format) error {
	list := []machine{}
	if len(selected) == 0 {
		selected = sim.Machines()
	}
	for _, name := range selected {
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

func completeMachines(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return sim.Machines(), cobra.ShellCompDirectiveDefault
}
