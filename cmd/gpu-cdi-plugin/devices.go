package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/exit"
)

func (a *app) devicesCommand() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "devices",
		Short: "List the GPUs and MIG devices of this host",
		Long: `Asks the driver what GPUs and MIG devices there are. A GPU that cannot be read is in the list with its error.

With -o name it prints the names that a CDI spec gives to them.`,
		Example: `  gpu-cdi-plugin devices
  gpu-cdi-plugin devices -o json | jq -r '.devices[] | select(.numaNode == 0) | .uuid'
  gpu-cdi-plugin devices --driver-root /run/nvidia/driver`,
		Annotations: cli.Statuses(exit.OK, exit.Failure, exit.Usage, exit.Partial, exit.NoDriver, exit.NoGPU,
			exit.Interrupted),
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.devices(cmd.Context(), out) },
	}
	out.addFlags(cmd, "table", "wide", "json", "yaml", "name")
	a.addTimeout(cmd)
	return cmd
}

func (a *app) devices(ctx context.Context, out output) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	s, err := a.readDevices(ctx, h)
	if err != nil {
		return err
	}
	if err := out.print(a.stdout, devicesView(s, a.CDIKind)); err != nil {
		return err
	}
	if !hasNodes(h) {
		a.log.Warn("containers cannot be given these GPUs: " + hintDevRoot(h))
	}
	return unread(s)
}

// deviceList is what devices prints as JSON.
type deviceList struct {
	DriverVersion string       `json:"driverVersion"`
	CUDAVersion   string       `json:"cudaVersion"`
	Devices       []deviceJSON `json:"devices"`
}

// deviceJSON is a device with all keys, whatever it has: who reads it need not ask whether they are there.
type deviceJSON struct {
	gpu.Device
	Error string `json:"error"`
}

func devicesView(s *gpu.Snapshot, kind string) view {
	return view{
		data:  deviceList{s.DriverVersion, s.CUDAVersion, deviceObjects(s.Devices)},
		table: devicesTable(s),
		names: uuidNames(s, kind),
	}
}

func deviceObjects(devices []gpu.Device) []deviceJSON {
	list := make([]deviceJSON, len(devices))
	for i, d := range devices {
		list[i] = deviceJSON{d, d.Error}
		if d.MIG == nil {
			list[i].MIG = []gpu.MIGDevice{}
		}
	}
	return list
}

func devicesTable(s *gpu.Snapshot) table {
	t := table{
		header: []string{"INDEX", "NAME", "UUID", "MEMORY", "NUMA", "MIG", "STATUS", "MINOR", "PCI", "COMPUTE"},
		wide:   7,
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		t.rows = append(t.rows, deviceRow(d))
		for j := range d.MIG {
			t.rows = append(t.rows, migRow(d, &d.MIG[j]))
		}
	}
	return t
}

func deviceRow(d *gpu.Device) []string {
	mig, status := "off", "ok"
	if d.MIGEnabled {
		mig = "on"
	}
	if !d.Usable() {
		mig, status = "-", "error: "+d.Error
	}
	return []string{
		strconv.Itoa(d.Index), orDash(d.Name), orDash(d.UUID), gibibytes(d.MemoryBytes), number(d.NUMANode), mig, status,
		number(d.Minor), orDash(d.PCIBusID), orDash(d.ComputeCapability),
	}
}

func migRow(parent *gpu.Device, m *gpu.MIGDevice) []string {
	return []string{
		fmt.Sprintf("%d:%d", parent.Index, m.Index), "MIG " + m.Profile, m.UUID, gibibytes(m.MemoryBytes),
		number(parent.NUMANode), "-", "ok", number(parent.Minor), orDash(parent.PCIBusID), orDash(parent.ComputeCapability),
	}
}

// gibibytes is a size as people compare GPUs by it.
func gibibytes(bytes uint64) string {
	if bytes == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}

// number is a cell for a number of which -1 says that it is not known.
func number(n int) string {
	if n < 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

// uuidNames are the CDI names of what can be given to a container: a GPU in MIG mode cannot, its MIG devices can.
func uuidNames(s *gpu.Snapshot, kind string) []string {
	var names []string
	for i := range s.Devices {
		d := &s.Devices[i]
		if !d.Usable() {
			continue
		}
		if !d.MIGEnabled {
			names = append(names, kind+"="+d.UUID)
		}
		for _, m := range d.MIG {
			names = append(names, kind+"="+m.UUID)
		}
	}
	return names
}
