package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/node"
)

func (a *app) devicesCommand() *cobra.Command {
	var out cli.Output
	cmd := &cobra.Command{
		Use:   "devices",
		Short: "List the GPUs and MIG devices of this host",
		Long: `Lists the GPUs and MIG devices that the driver reports. Unreadable GPUs are listed with their error. Where
serve runs, or has run, STATUS is the health that it has recorded: see state-dir in the configuration file. With -o
wide, SINCE is when that status began, and PRESTART the last preparation of a device for a container: when it began, the
policy, the result with the step that failed, and how long it took. JSON and YAML have all its steps.

-o name prints the CDI names of those that containers can get: no GPUs in MIG mode, but their MIG devices.`,
		Example: `  gpu-cdi-plugin devices
  gpu-cdi-plugin devices -o json | jq -r '.devices[] | select(.numaNode == 0) | .uuid'
  gpu-cdi-plugin devices --driver-root /run/nvidia/driver`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Partial, cli.NoDriver, cli.NoGPU,
			cli.Interrupted),
		RunE: func(cmd *cobra.Command, _ []string) error { return a.devices(cmd.Context(), out) },
	}
	out.AddFlags(cmd, "table", "wide", "json", "yaml", "name")
	a.addTimeout(cmd)
	return cmd
}

func (a *app) devices(ctx context.Context, out cli.Output) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	s, err := a.readDevices(ctx, h)
	if err != nil {
		return err
	}
	recordedHealth := recorded(a, agent.HealthRecord(a.config), "the devices' health", node.MaxHealthRecord,
		func(data []byte) (map[string]health.Status, error) {
			return health.Recorded(data, node.HealthIdentity(h, s.DriverVersion))
		})
	preparations := recorded(a, agent.Preparations(a.config), "their last preparations", prepare.MaxRecords,
		prepare.ParseRecords)
	nodes := driver.DiscoverNodes(h)
	left := cdi.FindDevices(s, nodes)
	if err := out.Print(a.Stdout, devicesView(s, recordedHealth, preparations, problems(left), a.CDIKind)); err != nil {
		return err
	}
	if err := nodes.Check(driver.All); err != nil {
		return fmt.Errorf("containers cannot be given these GPUs: %w", err)
	}
	for _, f := range nodes.Findings {
		if f.Broken {
			text, advice := f.Lack()
			a.Log.Warn(text + "; " + advice)
		}
	}
	return errors.Join(unreadableGPUs(s), lacking(left))
}

// problems returns why containers cannot be given devices because of the host, by UUID.
func problems(findings []driver.Finding) map[string]string {
	list := map[string]string{}
	for _, f := range findings {
		if f.Broken && f.UUID != "" {
			list[f.UUID] = f.Note
		}
	}
	return list
}

// recorded returns what `serve` has recorded about the devices in a file of at most limit bytes, by UUID. If `serve`
// never ran, the result is empty.
func recorded[T any](
	a *app, path, what string, limit int64, parse func([]byte) (map[string]T, error),
) map[string]T {
	all, err := readRecorded(a, path, limit, parse)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.Log.Warn("what serve has recorded of " + what + " is not shown: " + err.Error())
	}
	return all
}

func readRecorded[T any](
	a *app, path string, limit int64, parse func([]byte) (map[string]T, error),
) (map[string]T, error) {
	data, err := fileio.ReadFile(path, limit)
	if err != nil {
		return nil, err
	}
	if err := a.CheckPath(trust.File, path); err != nil {
		return nil, err
	}
	return parse(data)
}

// deviceList is the result of devices as JSON.
type deviceList struct {
	DriverVersion string       `json:"driverVersion"`
	CUDAVersion   string       `json:"cudaVersion"`
	Devices       []deviceJSON `json:"devices"`
	// Health is the health of the devices as `serve` recorded it, by UUID.
	Health map[string]health.Status `json:"health,omitempty"`
	// Problems says why containers cannot be given devices that the driver can use, by UUID.
	Problems map[string]string `json:"problems,omitempty"`
	// PreStart has the last preparation of each device for a container as `serve` recorded it, by UUID.
	PreStart map[string]prepare.Record `json:"preStart,omitempty"`
}

// deviceJSON is a device with all keys, including those of empty values.
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

func devicesView(
	s *gpu.Snapshot, recorded map[string]health.Status, prepared map[string]prepare.Record, problems map[string]string,
	kind string,
) cli.View {
	v := cli.View{
		Data: deviceList{s.DriverVersion, s.CUDAVersion, deviceObjects(s.Devices), recorded, problems, prepared},
		Table: cli.Table{
			Header: []string{
				"INDEX", "NAME", "UUID", "MEMORY", "NUMA", "MIG", "STATUS", "SINCE", "MINOR", "PCI", "COMPUTE", "PRESTART",
			},
			Wide: 7,
		},
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		add := func(index, name, uuid string, memory uint64, mig, problem string) {
			since, last := "-", "-"
			problem = cmp.Or(problem, problems[uuid])
			if h, known := recorded[uuid]; known && problem == "" {
				since = h.Since.UTC().Format(time.RFC3339)
				switch {
				case h.State != health.Healthy:
					problem = h.String()
				case h.EventsMissed != "":
					problem = "ok, but its events are not received: " + h.EventsMissed
				}
			}
			if r, known := prepared[uuid]; known {
				last = r.String()
			}
			v.Table.Rows = append(v.Table.Rows, []string{
				index, cli.OrDash(name), cli.OrDash(uuid), gibibytes(memory), number(d.NUMANode), mig, cmp.Or(problem, "ok"),
				since, number(d.Minor), cli.OrDash(d.PCIBusID), cli.OrDash(d.ComputeCapability), last,
			})
		}
		allocatable := d.Allocatables()
		mig, problem := "off", ""
		switch {
		case !d.Usable():
			mig = "-"
		case d.MIGEnabled:
			mig = "on"
		}
		if allocatable[0].MIG == nil || !d.Usable() {
			problem = allocatable[0].Reason
		}
		add(strconv.Itoa(d.Index), d.Name, d.UUID, d.MemoryBytes, mig, problem)
		for _, a := range allocatable {
			if m := a.MIG; m != nil {
				add(a.IndexName(), "MIG "+m.Profile, m.UUID, m.MemoryBytes, "-", a.Reason)
			}
			if a.Reason == "" && problems[a.UUID()] == "" {
				v.Names = append(v.Names, kind+"="+a.UUID())
			}
		}
	}
	return v
}

// gibibytes formats a size in bytes for a table; 0 means unknown.
func gibibytes(bytes uint64) string {
	if bytes == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}

// number formats a number for a table; -1 means unknown.
func number(n int) string {
	if n < 0 {
		return "-"
	}
	return strconv.Itoa(n)
}
