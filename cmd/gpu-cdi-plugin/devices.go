package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
)

func (a *app) devicesCommand() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "devices",
		Short: "List the GPUs and MIG devices of this host",
		Long: `Lists the GPUs and MIG devices that the driver reports. Unreadable GPUs are listed with their error.

-o name prints the CDI names of those that containers can get: no GPUs in MIG mode, but their MIG devices.`,
		Example: `  gpu-cdi-plugin devices
  gpu-cdi-plugin devices -o json | jq -r '.devices[] | select(.numaNode == 0) | .uuid'
  gpu-cdi-plugin devices --driver-root /run/nvidia/driver`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Partial, cli.NoDriver, cli.NoGPU,
			cli.Interrupted),
		RunE: func(cmd *cobra.Command, _ []string) error { return a.devices(cmd.Context(), out) },
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
	return unreadableGPUs(s)
}

// deviceList is the result of devices as JSON.
type deviceList struct {
	DriverVersion string       `json:"driverVersion"`
	CUDAVersion   string       `json:"cudaVersion"`
	Devices       []deviceJSON `json:"devices"`
}

// deviceJSON is a device with all keys, also those of empty values.
type deviceJSON struct {
	gpu.Device
	Error string `json:"error"`
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

func devicesView(s *gpu.Snapshot, kind string) view {
	v := view{
		data: deviceList{s.DriverVersion, s.CUDAVersion, deviceObjects(s.Devices)},
		table: table{
			header: []string{"INDEX", "NAME", "UUID", "MEMORY", "NUMA", "MIG", "STATUS", "MINOR", "PCI", "COMPUTE"},
			wide:   7,
		},
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		add := func(index, name, uuid string, memory uint64, mig, status string) {
			v.table.rows = append(v.table.rows, []string{
				index, orDash(name), orDash(uuid), gibibytes(memory), number(d.NUMANode), mig, status,
				number(d.Minor), orDash(d.PCIBusID), orDash(d.ComputeCapability),
			})
			// The names are those of what a container can get: not a GPU in MIG mode, whose MIG devices follow.
			if d.Usable() && mig != "on" {
				v.names = append(v.names, kind+"="+uuid)
			}
		}
		mig, status := "off", "ok"
		switch {
		case !d.Usable():
			mig, status = "-", "error: "+d.Error
		case d.MIGEnabled:
			mig = "on"
		}
		add(strconv.Itoa(d.Index), d.Name, d.UUID, d.MemoryBytes, mig, status)
		for _, m := range d.MIG {
			add(fmt.Sprintf("%d:%d", d.Index, m.Index), "MIG "+m.Profile, m.UUID, m.MemoryBytes, "-", "ok")
		}
	}
	return v
}

// gibibytes is the cell of a size in bytes; 0 means unknown.
func gibibytes(bytes uint64) string {
	if bytes == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}

// number is the cell of a number; -1 means unknown.
func number(n int) string {
	if n < 0 {
		return "-"
	}
	return strconv.Itoa(n)
}
