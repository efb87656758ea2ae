package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"strconv"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/cmd/gpu-cdi-plugin/topology"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
)

func (a *app) topologyCommand() *cobra.Command {
	var out cli.Output
	var socket string
	cmd := &cobra.Command{
		Use:   "topology",
		Short: "Show how the GPUs are linked, and their NUMA nodes",
		Long: `Prints a matrix of the links between the GPUs, as nvidia-smi topo -m does, and the NUMA node of each GPU.

-o svg draws the node: NUMA nodes, PCIe switches, NVLinks, MIG devices, unusable GPUs, and the pods that hold devices.
JSON and YAML also have the pods, as holders, or null without a kubelet.`,
		Example: `  gpu-cdi-plugin topology
  gpu-cdi-plugin topology -o json | jq '.links[] | select(.nvlinks > 0)'
  gpu-cdi-plugin topology -o svg > node.svg`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Partial, cli.NoDriver, cli.NoGPU,
			cli.Interrupted),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.topology(cmd.Context(), out, socket) },
	}
	out.AddFlags(cmd, "table", "json", "yaml", "svg")
	a.addTimeout(cmd)
	cmd.Flags().StringVar(&socket, "pod-resources-socket", "",
		"`path` of the kubelet's socket that lists the devices of pods (default: that of serve)")
	_ = cmd.MarkFlagFilename("pod-resources-socket", "sock")
	cmd.AddCommand(a.explainCommand())
	return cmd
}

func (a *app) topology(ctx context.Context, out cli.Output, socket string) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	s, err := a.readTopology(ctx, h)
	if err != nil {
		return err
	}
	n := topology.Node{Snapshot: s}
	if out.Format != "table" { // tables do not show which containers hold the devices
		kubelet := podresources.Source{
			Host: h, Socket: cmp.Or(socket, a.plugin.PodResourcesSocket), PluginDir: a.plugin.DevicePluginDir,
		}
		n.Holders, n.HoldersUnknown = a.holders(ctx, kubelet.Path())
	}
	if err := out.Print(a.Stdout, topologyView(n)); err != nil {
		return err
	}
	return unreadableGPUs(s)
}

// holders asks the kubelet which containers hold devices. If they are unknown, it returns why. A host need not have a
// kubelet; but if there is one and it does not answer, that causes a warning.
func (a *app) holders(ctx context.Context, socket string) (list []podresources.Holder, unknown string) {
	list, err := podresources.List(ctx, socket)
	switch {
	case err == nil:
		return list, ""
	case errors.Is(err, fs.ErrNotExist):
		return nil, "there is no kubelet socket at " + socket
	default:
		a.Log.Warn("the containers that hold devices are unknown: " + err.Error())
		return nil, "the kubelet did not answer"
	}
}

// linkList is the result of topology as JSON.
type linkList struct {
	DriverVersion string                `json:"driverVersion"`
	Devices       []deviceJSON          `json:"devices"`
	Links         []gpu.Link            `json:"links"`
	Holders       []podresources.Holder `json:"holders"` // null if they are unknown
}

// legend explains the cells. The abbreviations are those of nvidia-smi topo -m, except PSB.
const legend = `
X     the GPU itself
NV#   joined by # NVLinks, directly or through NVSwitches
PSB   on one board
PIX   through one PCIe switch
PXB   through several PCIe switches
PHB   through one host bridge
NODE  through host bridges of one NUMA node
SYS   through the link between NUMA nodes
?     unknown
`

func topologyView(n topology.Node) cli.View {
	s := n.Snapshot
	t := cli.Table{Header: []string{""}, Legend: legend}
	for i := range s.Devices {
		d := &s.Devices[i]
		row := []string{gpuName(d)}
		for j := range s.Devices {
			row = append(row, linkCell(s, d.Index, s.Devices[j].Index))
		}
		t.Header = append(t.Header, gpuName(d))
		t.Rows = append(t.Rows, append(row, number(d.NUMANode)))
	}
	t.Header = append(t.Header, "NUMA")
	list := linkList{
		DriverVersion: s.DriverVersion, Devices: deviceObjects(s.Devices), Links: append([]gpu.Link{}, s.Links...),
	}
	if n.HoldersUnknown == "" {
		list.Holders = n.DeviceHolders()
	}
	return cli.View{Data: list, Table: t, Draw: func(w io.Writer) error { return topology.WriteSVG(w, n) }}
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
