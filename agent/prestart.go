package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/agent/dra"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/node"
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
	changed  wake.Chan // the remarks may have changed
	log      *slog.Logger

	mu     sync.Mutex
	undone map[string]string // what could not be done in the last preparation of a device, by UUID
}

// remarks are about the steps of preparations that cannot be done.
func (p *preparer) remarks() []node.Remark {
	var list []node.Remark
	if why := p.devices.whyBlind(p.devices.node.State().Resources); why != "" {
		list = append(list, node.Remark{Key: "blind", Level: slog.LevelWarn, Text: why})
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, uuid := range slices.Sorted(maps.Keys(p.undone)) {
		if p.devices.offered(uuid) {
			list = append(list, node.Remark{Key: "undone " + uuid, Level: slog.LevelWarn, Text: uuid + p.undone[uuid]})
		}
	}
	return list
}

// setUndone records what could not be done for a device that a container got.
func (p *preparer) setUndone(r *prepare.Record) {
	if r.Error != "" {
		return
	}
	text := ""
	if steps := r.Undone(); len(steps) > 0 {
		text = " was given to a container although these steps could not be done: " + strings.Join(steps, ", ")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.undone[r.UUID] == text {
		return
	}
	if text == "" {
		delete(p.undone, r.UUID)
	} else {
		p.undone[r.UUID] = text
	}
	p.changed.Wake()
}

// How long a preparation waits at most until the last holder of a device has ended: a reset needs more of the time that
// is left.
const (
	waitForHolder   = 20 * time.Second
	waitBeforeReset = 10 * time.Second
)

// preStart waits until no other container has the devices of a container of a resource, and prepares them concurrently.
// The plugin limits its time.
func (p *preparer) preStart(ctx context.Context, resourceName string, requested []*resource.Device) error {
	rules := p.devices.preStart().RulesOf(resourceName)
	limit := waitForHolder
	if rules.Policy.Includes(prepare.Reset) {
		limit = waitBeforeReset
	}
	var ids []string
	for _, d := range requested {
		ids = append(ids, d.ID)
	}
	waiting, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := p.ledger.AwaitFree(waiting, resourceName, ids, requested); err != nil {
		if held, ok := errors.AsType[*ledger.HeldError](err); ok {
			err = fmt.Errorf("%s is not ready for a container: %s", held.UUID, held.Why)
		}
		p.log.Warn(err.Error(), "resource", resourceName)
		return err
	}
	return p.prepare(ctx, resourceName, requested, rules)
}

// preStartClaim is preStart for a claim, which may have a policy of its own. The door limits its time.
func (p *preparer) preStartClaim(
	ctx context.Context, resourceName string, requested []*resource.Device, wish dra.PreStart,
) error {
	return p.prepare(ctx, resourceName, requested, p.rulesForClaim(resourceName, wish))
}

// resetsForClaim reports whether preStartClaim may reset a device.
func (p *preparer) resetsForClaim(resourceName string, wish dra.PreStart) bool {
	return p.rulesForClaim(resourceName, wish).Policy.Includes(prepare.Reset)
}

func (p *preparer) rulesForClaim(resourceName string, wish dra.PreStart) prepare.Rules {
	rules := p.devices.preStart().RulesOf(resourceName)
	rules.Policy = cmp.Or(prepare.Policy(wish.Policy), rules.Policy)
	if least := prepare.Policy(wish.Least); least != "" && !rules.Policy.Includes(least) {
		rules.Policy = least
	}
	return rules
}

func (p *preparer) prepare(
	ctx context.Context, resourceName string, requested []*resource.Device, rules prepare.Rules,
) error {
	if err := p.releaser.checkOpen(); err != nil {
		return err
	}
	if rules.Policy.Includes(prepare.Clean) {
		if _, err := p.ledger.Read(ctx); err != nil {
			return fmt.Errorf("it is unknown which containers hold the devices: %w", err)
		}
	}
	for _, d := range requested {
		if why := p.whyNotReady(resourceName, d); why != "" {
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
		p.setUndone(&records[i])
		p.record.Add(records[i])
	}
	return err
}

// old returns a device that a container has under an ID that is not advertised any more, or nil.
func (p *preparer) old(resourceName, id string) *resource.Device {
	d := p.devices.find(resource.UUIDOf(id))
	if d == nil || !p.ledger.HeldAs(resourceName, id) {
		return nil
	}
	one := *d
	one.ID = id
	return &one
}

// whyNotReady returns why no container may have a device under any policy, or empty. The policy handles faults of the
// device. A container that has the device under an older name is itself the holder that the ledger protects.
func (p *preparer) whyNotReady(resourceName string, d *resource.Device) string {
	if !d.Healthy && !d.Fault && !d.Ending {
		return d.Reason
	}
	if p.ledger.HeldAs(resourceName, d.ID) {
		return ""
	}
	return p.mps.Reason(d)
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
