package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/topology"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/resource"
)

// preparer prepares devices before containers start with them.
type preparer struct {
	*service
	runner *prepare.Runner
	warned map[string]bool // resources that warnOfParts has warned of
}

func (s *service) newPreparer() *preparer {
	p := &preparer{service: s, warned: map[string]bool{}}
	check := func(path string) error { return s.app.CheckPath(trust.RootFile, path) }
	resetter := &prepare.DriverReset{
		Host: s.host, Find: p.findSMI, Check: check, LockDir: filepath.Join(s.app.plugin.StateDir, "resets"),
	}
	s.stillResetting = resetter.StillResetting
	p.runner = prepare.New(prepare.Options{
		Host: s.host, Driver: s.session, State: p, Check: check, Resetter: resetter, Log: s.app.Log,
	})
	return p
}

// warnOfParts warns once of each resource with MIG devices that no container would ever get. For replicas that is an
// error of the configuration, but only the driver knows whether there are MIG devices.
func (p *preparer) warnOfParts(resources []resource.Resource) {
	for _, r := range resources {
		part := func(d resource.Device) bool { return d.UUID != d.Parent }
		if p.warned[r.Name] || !p.app.plugin.PreStart.RefusesParts(r.Name) || !slices.ContainsFunc(r.Devices, part) {
			continue
		}
		p.warned[r.Name] = true
		p.app.Log.Warn("no container gets a MIG device of " + r.Name + ", since policy reset cannot reset them and " +
			"prestart.strict is set: give the resource another policy in prestart.resources")
	}
}

// waitPreparations is how long the end of the program waits for preparations. Kubernetes kills a pod 30 s after its
// SIGTERM.
const waitPreparations = 20 * time.Second

// runPlugin runs the plugin and, after it has ended, waits for the preparations that have not. All are recorded.
func (s *service) runPlugin(ctx context.Context) error {
	afterEnd := context.WithoutCancel(ctx)
	recording, endRecording := context.WithCancel(afterEnd)
	defer endRecording()
	var records errgroup.Group
	records.Go(func() error { return s.prepared.Run(recording) })
	err := s.plugin.Run(ctx)
	waiting, cancel := context.WithTimeout(afterEnd, waitPreparations)
	defer cancel()
	s.preparer.runner.Wait(waiting)
	endRecording()
	return errors.Join(err, records.Wait())
}

// findSMI finds the driver's own tool, which resets GPUs.
func (p *preparer) findSMI() (prepare.Program, bool) {
	_, file, err := driverProgram(p.host, "nvidia-smi")
	if err != nil || file == nil {
		return prepare.Program{}, false
	}
	return prepare.Program{Path: file.Path, Root: p.host.DriverRoot()}, true
}

// driverProgram finds the files of the driver and, among them, a program: nil if the driver has none.
func driverProgram(h host.Host, name string) (*driver.Driver, *driver.File, error) {
	d, err := driver.Discover(h, "")
	if err != nil {
		return nil, nil, fmt.Errorf("find %s: %w", name, err)
	}
	at := slices.IndexFunc(d.Files, func(f driver.File) bool { return filepath.Base(f.Path) == name })
	if at < 0 {
		return d, nil, nil
	}
	return d, &d.Files[at], nil
}

// prepare prepares the devices of a container of a resource.
func (p *preparer) prepare(ctx context.Context, resourceName string, devices []*resource.Device) error {
	if err := p.releaser.checkOpen(); err != nil {
		return err
	}
	for _, d := range devices {
		if why := p.whyNotReady(d); why != "" {
			err := fmt.Errorf("%s is not ready for a container: %s", d.ID, why)
			p.app.Log.Warn(err.Error(), "resource", resourceName)
			return err
		}
	}
	rules := p.app.plugin.PreStart.RulesOf(resourceName)
	others := p.othersOf(ctx, resourceName, devices)
	var list []prepare.Device
	for _, d := range devices {
		if slices.ContainsFunc(list, func(other prepare.Device) bool { return other.UUID == d.UUID }) {
			continue // another replica of it
		}
		device := p.deviceOf(d)
		device.Others = func() (string, error) { return others(d) }
		list = append(list, device)
	}
	records, err := p.runner.Run(ctx, list, rules)
	for i := range records {
		p.metrics.Prepared(&records[i])
		p.log(resourceName, &records[i])
		p.prepared.Add(records[i])
	}
	return err
}

// holdersLimit is how long a container waits for the kubelet to say which containers have which devices.
const holdersLimit = 2 * time.Second

// othersOf returns a function for prepare.Device.Others: which other containers have a GPU of a request, as a replica
// or under another name, from before a reload or from another plugin. No container has a MIG device of it, since GPUs
// in MIG mode are not offered whole. The kubelet is asked once for all GPUs. Where it has no PodResources socket, there
// are none.
func (p *preparer) othersOf(
	ctx context.Context, resourceName string, requested []*resource.Device,
) func(*resource.Device) (string, error) {
	list := sync.OnceValues(func() ([]topology.Holder, error) {
		ctx, cancel := context.WithTimeout(ctx, holdersLimit)
		defer cancel()
		list, err := podresources.List(ctx, p.podResources())
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return list, err
	})
	var ids []string
	for _, d := range requested {
		ids = append(ids, d.ID)
	}
	return func(d *resource.Device) (string, error) {
		all, err := list()
		if err != nil {
			return "", err
		}
		var has []string
		for _, h := range podresources.Others(all, resourceName, ids, d.UUID) {
			has = append(has, h.String()+" has it")
		}
		return strings.Join(has, ", "), nil
	}
}

// whyNotReady returns why a container must not have a device whatever its policy does, or empty. Faults of the device
// are a matter of the policy.
func (p *preparer) whyNotReady(d *resource.Device) string {
	if !d.Healthy && !d.Fault {
		return d.Reason
	}
	return p.mps.Reason(d)
}

func (p *preparer) log(resourceName string, r *prepare.Record) {
	var steps []string
	for _, s := range r.Steps {
		text := s.Name + " " + string(s.Result)
		if s.Note != "" {
			text += " (" + s.Note + ")"
		}
		steps = append(steps, text)
	}
	log, text := p.app.Log.Debug, "was prepared for a container"
	if r.Error != "" {
		log, text = p.app.Log.Warn, "is not given to a container"
	}
	log(r.UUID+" "+text+" of "+resourceName+": "+strings.Join(steps, ", "), "took", r.Duration)
}

func (p *preparer) deviceOf(d *resource.Device) prepare.Device {
	device := prepare.Device{
		UUID: d.UUID, GPU: d.Parent, PCIBusID: d.PCIBusID, Exclusive: d.MPS != nil,
	}
	if s := p.node.State().Snapshot; s != nil {
		if one := findGPU(s, d.Parent); one != nil {
			device.Nodes = p.nodesOf(one)
			instances := map[int]int{} // MIG devices of each GPU instance
			for _, m := range one.MIG {
				instances[m.GPUInstance]++
			}
			device.SharesMemory = slices.ContainsFunc(one.MIG, func(m gpu.MIGDevice) bool {
				return m.UUID == d.UUID && instances[m.GPUInstance] > 1
			})
		}
	}
	return device
}

// nodesOf are the paths of the device nodes of a GPU, or none if they are unknown.
func (s *service) nodesOf(d *gpu.Device) []string {
	if d.Minor == gpu.NoMinor {
		return nil
	}
	return []string{s.host.Dev("nvidia" + strconv.Itoa(d.Minor))}
}

// Healthy implements prepare.State.
func (p *preparer) Healthy(ctx context.Context, uuid string) error {
	d := p.find(uuid)
	if d == nil {
		return errors.New("it is no longer offered")
	}
	err := p.node.Monitor().Check(ctx, d.Parent, uuid)
	if h := p.node.State().Health[uuid]; err != nil && h.State == health.Unhealthy && h.Remedy == health.Reset {
		return &prepare.NeedsResetError{Err: err}
	}
	return err
}

// Shared implements prepare.State.
func (p *preparer) Shared(_ context.Context, uuid string) (string, error) {
	replicas := 0
	for _, r := range p.node.State().Resources {
		for i := range r.Devices {
			if r.Devices[i].UUID == uuid && r.Devices[i].Shared() {
				replicas++
			}
		}
	}
	if replicas == 0 {
		return "", nil
	}
	return fmt.Sprintf("it has %s", cli.Plural(replicas, "replica")), nil
}

// WasReset implements prepare.State.
func (p *preparer) WasReset(uuid string) { p.node.Monitor().WasReset(uuid) }

// CannotReset implements prepare.State.
func (p *preparer) CannotReset(uuid string) string { return p.node.Monitor().CannotReset(uuid) }

// SetCannotReset implements prepare.State.
func (p *preparer) SetCannotReset(uuid, reason string) { p.node.Monitor().SetCannotReset(uuid, reason) }

// find returns a device of the published state, or nil.
func (p *preparer) find(uuid string) *resource.Device {
	for _, r := range p.node.State().Resources {
		for i := range r.Devices {
			if r.Devices[i].UUID == uuid {
				return &r.Devices[i]
			}
		}
	}
	return nil
}
