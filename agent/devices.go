package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strconv"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// devices gives package prepare access to the published devices.
type devices struct {
	host    host.Host
	node    *node.Reconciler
	monitor *node.Monitor
	config  *current
	log     *slog.Logger
}

var _ prepare.State = (*devices)(nil)

// preStart returns the rules for the preparation of devices.
func (ds *devices) preStart() *config.PreStart { return &ds.config.Load().PreStart }

// whyBlind says why processes on devices cannot be seen, if the policy of one of the resources has them checked, and is
// empty otherwise.
func (ds *devices) whyBlind(resources []resource.Resource) string {
	rules := ds.preStart()
	checks := func(r resource.Resource) bool { return rules.RulesOf(r.Name).Policy.Includes(prepare.Check) }
	if !slices.ContainsFunc(resources, checks) {
		return ""
	}
	if err := proc.SeesAll(ds.host.Proc()); err != nil {
		return "processes on a GPU are not checked before a container gets it, since this program cannot see them " +
			"(a pod needs hostPID: true): " + wording.OneLine(err)
	}
	return ""
}

// find returns a device of the published state, or nil.
func (ds *devices) find(uuid string) *resource.Device {
	for _, r := range ds.node.State().Resources {
		for i := range r.Devices {
			if r.Devices[i].UUID == uuid {
				return &r.Devices[i]
			}
		}
	}
	return nil
}

// offered reports whether a device is offered.
func (ds *devices) offered(uuid string) bool { return ds.find(uuid) != nil }

// toCheck returns the offered devices by UUID, each with the rules of its resource.
func (ds *devices) toCheck() map[string]prepare.CheckedDevice {
	list := map[string]prepare.CheckedDevice{}
	for _, r := range ds.node.State().Resources {
		rules := ds.preStart().RulesOf(r.Name)
		for i := range r.Devices {
			d := &r.Devices[i]
			list[d.UUID] = prepare.CheckedDevice{Device: ds.toPrepare(d), Rules: rules} // one of the replicas of a device
		}
	}
	return list
}

// toPrepare converts a device to the type of package prepare.
func (ds *devices) toPrepare(d *resource.Device) prepare.Device {
	device := prepare.Device{
		UUID: d.UUID, GPU: d.Parent, PCIBusID: d.PCIBusID, Exclusive: d.MPS != nil,
		Replica: d.ID != d.UUID || d.Shared(),
	}
	one := ds.node.State().Snapshot.Find(d.Parent)
	if one == nil {
		return device
	}
	device.Nodes = ds.nodesOf(one)
	instances := map[int]int{} // how many MIG devices each GPU instance has
	for _, m := range one.MIG {
		instances[m.GPUInstance]++
	}
	device.SharesMemory = slices.ContainsFunc(one.MIG, func(m gpu.MIGDevice) bool {
		return m.UUID == d.UUID && instances[m.GPUInstance] > 1
	})
	return device
}

// nodesOf returns the paths of the device nodes of a GPU, or none if they are unknown.
func (ds *devices) nodesOf(d *gpu.Device) []string {
	if d.Minor == gpu.NoMinor {
		return nil
	}
	return []string{ds.host.Dev("nvidia" + strconv.Itoa(d.Minor))}
}

// Healthy implements prepare.State.
func (ds *devices) Healthy(ctx context.Context, uuid string) error {
	d := ds.find(uuid)
	if d == nil {
		return errors.New("it is no longer offered")
	}
	err := ds.monitor.Check(ctx, d.Parent, uuid)
	if h := ds.node.State().Health[uuid]; err != nil && h.State == health.Unhealthy && h.Remedy == health.Reset {
		return &prepare.NeedsResetError{Err: err}
	}
	return err
}

// Shared implements prepare.State.
func (ds *devices) Shared(uuid string) string {
	replicas := 0
	for _, r := range ds.node.State().Resources {
		for i := range r.Devices {
			if r.Devices[i].UUID == uuid && r.Devices[i].Shared() {
				replicas++
			}
		}
	}
	if replicas == 0 {
		return ""
	}
	return "it has " + wording.Count(replicas, "replica")
}

// WasReset implements prepare.State.
func (ds *devices) WasReset(uuid string) { ds.monitor.WasReset(uuid) }

// HoldForReset implements prepare.State.
func (ds *devices) HoldForReset(uuid, reason string) {
	if err := ds.monitor.HoldForReset(uuid, reason); err != nil {
		ds.log.Warn(err.Error())
	}
}

// EndHold implements prepare.State.
func (ds *devices) EndHold(uuid string) { ds.monitor.EndHold(uuid) }

// CannotReset implements prepare.State.
func (ds *devices) CannotReset(uuid string) string { return ds.monitor.CannotReset(uuid) }

// SetCannotReset implements prepare.State.
func (ds *devices) SetCannotReset(uuid, reason string) { ds.monitor.SetCannotReset(uuid, reason) }
