package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/api"
)

// asksServe marks cmd as a verb that sends requests to this host's manager.
func (a *app) asksServe(cmd *cobra.Command) *cobra.Command {
	cmd.Annotations = cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Unreachable, cli.Interrupted)
	return cmd
}

func (a *app) client() *api.Client { return api.NewClient(a.APISocket) }

// leaseClient returns the client for leases.
func (a *app) leaseClient() *api.Client { return api.NewLeaseClient(a.APISocket, a.LeaseSocket()) }

// errNoPod means that a name or UID does not name exactly one placed pod.
var errNoPod = errors.New("find the pod")

// findPod finds a placed pod by its UID, its name, or NAMESPACE/NAME.
func findPod(pods []api.Pod, name string) (api.Pod, error) {
	var found []api.Pod
	for _, p := range pods {
		switch name {
		case p.Metadata.UID:
			return p, nil
		case p.Metadata.Name, p.Metadata.Namespace + "/" + p.Metadata.Name:
			found = append(found, p)
		}
	}
	switch len(found) {
	case 0:
		return api.Pod{}, fmt.Errorf("%w: no placed pod has the name or UID %q", errNoPod, name)
	case 1:
		return found[0], nil
	}
	var names []string
	for _, p := range found {
		names = append(names, p.Metadata.Namespace+"/"+p.Metadata.Name+" ("+p.Metadata.UID+")")
	}
	return api.Pod{}, fmt.Errorf("%w: %q matches %d pods: %s; use NAMESPACE/NAME or a UID",
		errNoPod, name, len(found), strings.Join(names, ", "))
}

// containersOf returns all containers of a pod in the order of their start.
func containersOf(p api.Pod) []api.Container { return slices.Concat(p.InitContainers, p.Containers) }

// podName returns NAMESPACE/NAME, or the UID if the name of the pod is unknown, for example after an import.
func podName(m api.Metadata) string {
	if m.Name == "" {
		return m.UID
	}
	return m.Namespace + "/" + m.Name
}

// completePod completes the names of placed pods.
func (a *app) completePod(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	var names []string
	if len(args) == 0 && a.Resolve() == nil {
		pods, _ := a.client().Pods(cmd.Context())
		for _, p := range pods {
			if name := podName(p.Metadata); strings.HasPrefix(name, prefix) {
				names = append(names, name)
			}
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

func (a *app) podsCommand() *cobra.Command {
	var out cli.Output
	cmd := a.asksServe(&cobra.Command{
		Use:   "pods",
		Short: "List the pods that the device manager has placed",
		Long: `Lists the pods that hold devices of device-manager serve, in the order of their admission. -o wide also
shows the devices and the process that admitted the pod. -o json and yaml also show the health of the devices in
allocatedResourcesStatus, like a v1.PodStatus. -o name prints the pods' UIDs.`,
		Example: `  device-manager pods
  device-manager pods -o json | jq -r '.items[].containers[].devices[]?.deviceIds[]'
  device-manager pods -o json | jq '.items[].containers[].allocatedResourcesStatus[]?'`,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.pods(cmd.Context(), out) },
	})
	out.AddFlags(cmd, "table", "wide", "json", "yaml", "name")
	return cmd
}

func (a *app) pods(ctx context.Context, out cli.Output) error {
	pods, err := a.client().Pods(ctx)
	if err != nil {
		return err
	}
	return out.Print(a.Stdout, podsView(pods))
}

func podsView(pods []api.Pod) cli.View {
	v := cli.View{
		Data: api.PodList{Items: pods},
		Table: cli.Table{
			Header: []string{"NAMESPACE", "NAME", "DEVICES", "ADMITTED", "UID", "CALLER", "IDS"}, Wide: 4,
		},
	}
	for _, p := range pods {
		devices := devicesOf(p)
		var counts, ids []string
		for _, d := range devices {
			counts = append(counts, fmt.Sprintf("%s=%d", d.ResourceName, len(d.DeviceIDs)))
			ids = append(ids, d.ResourceName+"="+strings.Join(d.DeviceIDs, ","))
		}
		v.Table.Rows = append(v.Table.Rows, []string{
			cli.OrDash(p.Metadata.Namespace), cmp.Or(p.Metadata.Name, p.Metadata.UID), cli.OrDash(strings.Join(counts, " ")),
			p.Metadata.CreationTimestamp.UTC().Format(time.RFC3339), p.Metadata.UID,
			fmt.Sprintf("user %d, process %d", p.Caller.UID, p.Caller.PID), cli.OrDash(strings.Join(ids, " ")),
		})
		v.Names = append(v.Names, p.Metadata.UID)
	}
	return v
}

// devicesOf returns the devices that a pod holds, by resource. A device that several containers share is listed once.
func devicesOf(p api.Pod) []api.ContainerDevices {
	var list []api.ContainerDevices
	for _, c := range containersOf(p) {
		for _, d := range c.Devices {
			i, found := slices.BinarySearchFunc(list, d.ResourceName, func(e api.ContainerDevices, name string) int {
				return cmp.Compare(e.ResourceName, name)
			})
			if !found {
				list = slices.Insert(list, i, api.ContainerDevices{ResourceName: d.ResourceName})
			}
			for _, id := range d.DeviceIDs {
				if !slices.Contains(list[i].DeviceIDs, id) {
					list[i].DeviceIDs = append(list[i].DeviceIDs, id)
				}
			}
		}
	}
	return list
}

func (a *app) nodeCommand() *cobra.Command {
	var out cli.Output
	var devices bool
	cmd := a.asksServe(&cobra.Command{
		Use:   "node",
		Short: "Show what this node has, as the device manager counts it",
		Long: `Shows capacity and allocatable of this node, as a kubelet would report them: cpu, memory, hugepages, ephemeral
storage, pods, and the resources of the plugins that are registered with device-manager serve. -o json prints a
v1.NodeStatus.

--devices lists the devices of these resources instead, with their health and the pods that hold them. A device whose
plugin is disconnected has the health Unknown. If the placements were lost because their file was damaged, all devices
are withheld: see device-manager release --withheld. -o name prints RESOURCE=ID.`,
		Example: `  device-manager node
  device-manager node -o json | jq '.allocatable["nvidia.com/gpu"]'
  device-manager node --devices -o wide`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if devices {
				return a.nodeDevices(cmd, out)
			}
			return a.nodeStatus(cmd.Context(), out)
		},
	})
	out.AddFlags(cmd, "table", "wide", "json", "yaml", "name")
	cmd.Flags().BoolVar(&devices, "devices", false, "list the devices")
	return cmd
}

func (a *app) nodeStatus(ctx context.Context, out cli.Output) error {
	status, err := a.client().Node(ctx)
	if err != nil {
		return err
	}
	v := cli.View{Data: status, Table: cli.Table{Header: []string{"RESOURCE", "CAPACITY", "ALLOCATABLE"}}}
	for name := range status.Capacity {
		v.Names = append(v.Names, name)
	}
	slices.Sort(v.Names)
	for _, name := range v.Names {
		v.Table.Rows = append(v.Table.Rows, []string{name, status.Capacity[name], cli.OrDash(status.Allocatable[name])})
	}
	return out.Print(a.Stdout, v)
}

func (a *app) nodeDevices(cmd *cobra.Command, out cli.Output) error {
	ctx, client := cmd.Context(), a.client()
	list, err := client.Devices(ctx)
	if err != nil {
		return err
	}
	pods, err := client.Pods(ctx)
	if err != nil {
		return err
	}
	if err := out.Print(a.Stdout, nodeDevicesView(list, pods)); err != nil {
		return err
	}
	if list.Withheld != nil {
		a.Log.Warn(a.WithOptions(cmd, "devices are withheld, since placements were lost and unknown pods may hold them: see "+
			"device-manager release --withheld"), "reason", list.Withheld.Reason, "file", list.Withheld.File)
	}
	return nil
}

func nodeDevicesView(list api.ResourceList, pods []api.Pod) cli.View {
	names := map[string]string{}
	for _, p := range pods {
		names[p.Metadata.UID] = podName(p.Metadata)
	}
	v := cli.View{
		Data:  list,
		Table: cli.Table{Header: []string{"RESOURCE", "DEVICE", "HEALTH", "POD", "CONTAINERS", "NUMA"}, Wide: 4},
	}
	for _, r := range list.Items {
		for _, d := range r.Devices {
			v.Table.Rows = append(v.Table.Rows, []string{
				r.Name, d.ID, healthCell(d), cli.OrDash(cmp.Or(names[d.Pod], d.Pod)),
				cli.OrDash(strings.Join(d.Containers, ",")), cli.OrDash(strings.Trim(fmt.Sprint(d.NUMA), "[]")),
			})
			v.Names = append(v.Names, r.Name+"="+d.ID)
		}
	}
	return v
}

func healthCell(d manager.Device) string {
	if d.Withheld {
		return string(d.Health) + ", withheld"
	}
	return string(d.Health)
}
