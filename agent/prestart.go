package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/topology"
	"gpu-cdi-plugin/resource"
)

// preparer prepares devices before containers start with them.
type preparer struct {
	devices  *devices
	runner   *prepare.Runner
	releaser *releaser
	mps      *mps.Monitor
	kubelet  string // the kubelet's socket for PodResources
	record   *prepare.RecordFile
	metrics  *metrics.Metrics
	log      *slog.Logger
}

// preStart prepares the devices of a container of a resource concurrently. The plugin limits its time.
func (p *preparer) preStart(ctx context.Context, resourceName string, requested []*resource.Device) error {
	if err := p.releaser.checkOpen(); err != nil {
		return err
	}
	for _, d := range requested {
		if why := p.whyNotReady(d); why != "" {
			err := fmt.Errorf("%s is not ready for a container: %s", d.ID, why)
			p.log.Warn(err.Error(), "resource", resourceName)
			return err
		}
	}
	others := p.othersOf(ctx, resourceName, requested)
	var list []prepare.Device
	for _, d := range requested {
		if slices.ContainsFunc(list, func(other prepare.Device) bool { return other.UUID == d.UUID }) {
			continue // another replica of it
		}
		device := p.devices.toPrepare(d)
		device.Others = func() (string, error) { return others(d) }
		list = append(list, device)
	}
	records, err := p.runner.Run(ctx, list, p.devices.rules.RulesOf(resourceName))
	for i := range records {
		p.metrics.Prepared(&records[i])
		p.logRecord(resourceName, &records[i])
		p.record.Add(records[i])
	}
	return err
}

// whyNotReady returns why no container may have a device under any policy, or empty. The policy handles faults of the
// device.
func (p *preparer) whyNotReady(d *resource.Device) string {
	if !d.Healthy && !d.Fault {
		return d.Reason
	}
	return p.mps.Reason(d)
}

// holdersLimit is how long a container waits for the kubelet's answer about which containers have which devices.
const holdersLimit = 2 * time.Second

// othersOf returns a function for prepare.Device.Others: which other containers have a GPU of a request, as a replica
// or under another name, from before a reload or from another plugin. No container has a MIG device of the GPU, since
// GPUs in MIG mode are not offered whole. The kubelet is called once for all GPUs. Without its PodResources socket the
// function returns none.
func (p *preparer) othersOf(
	ctx context.Context, resourceName string, requested []*resource.Device,
) func(*resource.Device) (string, error) {
	list := sync.OnceValues(func() ([]topology.Holder, error) {
		ctx, cancel := context.WithTimeout(ctx, holdersLimit)
		defer cancel()
		list, err := podresources.List(ctx, p.kubelet)
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

// held returns the UUIDs of the devices that containers hold, as the kubelet reports them. It does not call the
// kubelet while the driver is released, since no device can be checked then. Without a kubelet there are no
// containers.
func (p *preparer) held(ctx context.Context) (map[string]bool, error) {
	if err := p.releaser.checkOpen(); err != nil {
		return nil, err
	}
	list, err := podresources.List(ctx, p.kubelet)
	if err != nil {
		return nil, err
	}
	uuids := map[string]bool{}
	for _, h := range list {
		for _, uuid := range h.UUIDs() {
			uuids[uuid] = true
		}
	}
	return uuids, nil
}

func (p *preparer) logRecord(resourceName string, r *prepare.Record) {
	var steps []string
	for _, s := range r.Steps {
		text := s.Name + " " + string(s.Result)
		if s.Note != "" {
			text += " (" + s.Note + ")"
		}
		steps = append(steps, text)
	}
	log, text := p.log.Debug, "was prepared for a container"
	if r.Error != "" {
		log, text = p.log.Warn, "is not given to a container"
	}
	log(r.UUID+" "+text+" of "+resourceName+": "+strings.Join(steps, ", "), "took", r.Duration)
}

// FindProgram finds a program of the driver on a host, and the driver itself. The file is nil if this driver lacks the
// program.
func FindProgram(h host.Host, name string) (*driver.Driver, *driver.File, error) {
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
