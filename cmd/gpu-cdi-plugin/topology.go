package main

import (
	"context"
	"strconv"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/exit"
)

func (a *app) topologyCommand() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "topology",
		Short: "Show how the GPUs are linked, and their NUMA nodes",
		Long:  "Prints a matrix of the links between the GPUs, as nvidia-smi topo -m does, with the NUMA node of each GPU.",
		Example: `  gpu-cdi-plugin topology
  gpu-cdi-plugin topology -o json | jq '.links[] | select(.nvlinks > 0)'`,
		Annotations: statuses(exit.OK, exit.Failure, exit.Usage, exit.Partial, exit.NoDriver, exit.NoGPU,
			exit.Interrupted),
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.topology(cmd.Context(), out) },
	}
	out.addFlags(cmd, "table", "json", "yaml")
	return cmd
}

func (a *app) topology(ctx context.Context, out output) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	s, err := a.readTopology(ctx, h)
	if err != nil {
		return err
	}
	if err := out.print(a.stdout, topologyView(s)); err != nil {
		return err
	}
	return unread(s)
}

// linkList is what topology prints as JSON.
type linkList struct {
	DriverVersion string       `json:"driverVersion"`
	Devices       []deviceJSON `json:"devices"`
	Links         []gpu.Link   `json:"links"`
}

// legend explains the cells, in the words of nvidia-smi topo -m where it has some.
const legend = `
X     the GPU itself
NV#   joined by # NVLinks, directly or through NVSwitches
PSB   on one board
PIX   through one PCIe switch
PXB   through several PCIe switches
PHB   through one host bridge
NODE  through host bridges of one NUMA node
SYS   through the link between NUMA nodes
?     not known
`

func topologyView(s *gpu.Snapshot) view {
	t := table{header: []string{""}, legend: legend}
	for i := range s.Devices {
		t.header = append(t.header, gpuName(&s.Devices[i]))
		t.rows = append(t.rows, linkRow(s, &s.Devices[i]))
	}
	t.header = append(t.header, "NUMA")
	return view{
		data:  linkList{s.DriverVersion, deviceObjects(s.Devices), append([]gpu.Link{}, s.Links...)},
		table: t,
	}
}

func linkRow(s *gpu.Snapshot, d *gpu.Device) []string {
	row := []string{gpuName(d)}
	for i := range s.Devices {
		row = append(row, linkCell(s, d.Index, s.Devices[i].Index))
	}
	return append(row, number(d.NUMANode))
}

func linkCell(s *gpu.Snapshot, a, b int) string {
	if a == b {
		return "X"
	}
	if l, ok := s.Link(a, b); ok && (l.NVLinks > 0 || l.PCIe != gpu.PathUnknown) {
		return l.String()
	}
	return "?"
}

func gpuName(d *gpu.Device) string { return "GPU" + strconv.Itoa(d.Index) }
