package agent

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"

	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/resource"
)

// preparer prepares devices before containers start with them.
type preparer struct {
	devices  *devices
	runner   *prepare.Runner
	releaser *releaser
	mps      *mps.Monitor
	ledger   *ledger.Ledger
	record   *prepare.RecordFile
	metrics  *metrics.Metrics
	log      *slog.Logger
}

// preStart prepares the devices of a container of a resource concurrently. The plugin limits its time.
func (p *preparer) preStart(ctx context.Context, resourceName string, requested []*resource.Device) error {
	if err := p.releaser.checkOpen(); err != nil {
		return err
	}
	rules := p.devices.rules.RulesOf(resourceName)
	if rules.Policy.Includes(prepare.Clean) {
		if _, err := p.ledger.Read(ctx); err != nil {
			return fmt.Errorf("it is unknown which containers hold the devices: %w", err)
		}
	}
	for _, d := range requested {
		if why := p.whyNotReady(d); why != "" {
			err := fmt.Errorf("%s is not ready for a container: %s", d.ID, why)
			p.log.Warn(err.Error(), "resource", resourceName)
			return err
		}
	}
	var list []prepare.Device
	for _, d := range requested {
		if slices.ContainsFunc(list, func(other prepare.Device) bool { return other.UUID == d.UUID }) {
			continue // another replica of it
		}
		list = append(list, p.devices.toPrepare(d))
	}
	records, err := p.runner.Run(ctx, list, rules)
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
	return cmp.Or(p.ledger.Reason(d), p.mps.Reason(d))
}

// held returns the UUIDs of the devices that containers hold. It returns an error while the driver is released, since
// no device can be checked then.
func (p *preparer) held(context.Context) (map[string]bool, error) {
	if err := p.releaser.checkOpen(); err != nil {
		return nil, err
	}
	return p.ledger.Held()
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
