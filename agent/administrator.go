package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/kubeapi"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/node"
)

// administrator carries out the requests that administrators and the hook send to the control socket.
type administrator struct {
	node     *node.Reconciler
	monitor  *node.Monitor
	devices  *devices
	runner   *prepare.Runner
	releaser *releaser
	reporter *kubeapi.Reporter
	mps      *mps.Monitor
	ledger   *ledger.Ledger
	handOver *handOver

	resetting sync.Map // the UUIDs of GPUs that are being reset
}

var _ control.Handler = (*administrator)(nil)

// Handle implements control.Handler.
func (a *administrator) Handle(ctx context.Context, r control.Request, progress func(string)) (string, error) {
	switch r.Act {
	case control.Release:
		return "the NVIDIA driver is released; open it again with: gpu-cdi-plugin device reopen", a.releaser.release(ctx)
	case control.Reopen:
		return "the NVIDIA driver is opened again", a.releaser.reopen(ctx)
	case control.Claims:
		return a.claims(ctx)
	case control.Forget:
		return "forgotten until the kubelet has dropped it: " + r.Holder, a.ledger.Forget(ctx, r.Holder, r.Force)
	case control.Allocation:
		return a.allocation(ctx, r)
	case control.HoldOpen:
		return a.handOver.hold(ctx, progress)
	case control.HandOver:
		return a.handOver.handOver(ctx, r.NoDriver)
	}
	d, title, err := a.find(r.Device)
	if err != nil && r.Act != control.Reset && a.monitor.Knows(r.Device) {
		d, title, err = health.Device{UUID: r.Device}, "the absent device", nil
	}
	if err != nil {
		return "", err
	}
	switch r.Act {
	case control.Cordon:
		return fmt.Sprintf("%s (%s) is cordoned", title, d.UUID),
			a.monitor.Cordon(d.UUID, r.Reason)
	case control.Uncordon:
		text := fmt.Sprintf("%s (%s) is uncordoned", title, d.UUID)
		if _, resetting := a.resetting.Load(d.GPU); resetting {
			text += ", and is back in service when the reset of its GPU has ended"
		}
		return text, a.monitor.Uncordon(d.UUID)
	default: // control.Reset, since the server has checked the request
		return a.reset(ctx, r, d, title, progress)
	}
}

// find returns a device of the last snapshot by its UUID or index.
func (a *administrator) find(name string) (health.Device, string, error) {
	s := a.node.State().Snapshot
	if s == nil {
		return health.Device{}, "", errors.New("the GPUs have not been read yet")
	}
	return node.FindDevice(s, name)
}

const (
	// usersInterval is how often a waiting reset checks what uses the GPU. repeatAfter is how often it repeats an
	// unchanged report.
	usersInterval = time.Second
	repeatAfter   = time.Minute
	// usersLimit bounds the search for users of a GPU, and resetLimit a reset with its probes.
	usersLimit = 10 * time.Second
	resetLimit = time.Minute
)

// reset resets a GPU that is not in use, and holds it so that no container gets it meanwhile.
func (a *administrator) reset(
	ctx context.Context, r control.Request, d health.Device, title string, progress func(string),
) (result string, err error) {
	if d.UUID != d.GPU {
		return "", fmt.Errorf("%s is a part of a GPU: reset the GPU %s", title, d.GPU)
	}
	if err := a.releaser.checkOpen(); err != nil {
		return "", err
	}
	if _, busy := a.resetting.LoadOrStore(d.UUID, true); busy {
		return "", fmt.Errorf("%s is already being reset", title)
	}
	defer a.resetting.Delete(d.UUID)
	one := a.node.State().Snapshot.Find(d.UUID)
	if one == nil {
		return "", fmt.Errorf("the driver no longer reports %s", title)
	}
	if err := a.monitor.HoldForReset(d.UUID, "held for a reset by an administrator"); err != nil {
		return "", err
	}
	defer func() {
		if _, hung := errors.AsType[*prepare.AbandonedError](err); !hung {
			a.monitor.EndHold(d.UUID)
		}
	}()
	if err := a.awaitFree(ctx, r, one, title, progress); err != nil {
		return "", err
	}
	progress(title + " is being reset")
	// A reset that has begun goes on without the client.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resetLimit)
	defer cancel()
	defer a.node.Trigger()
	if err := a.mps.End(ctx, d.UUID); err != nil { // its servers have the GPU open, also without clients
		return "", fmt.Errorf("reset %s: %w", title, err)
	}
	device := prepare.Device{UUID: d.UUID, GPU: d.UUID, PCIBusID: one.PCIBusID, Nodes: a.devices.nodesOf(one)}
	err = a.runner.Reset(ctx, device, a.monitor.CheckReset)
	if r.Force && prepare.InUse(err) {
		err = fmt.Errorf("%w; --force does not end processes", err)
	}
	if err != nil {
		return "", err
	}
	a.reporter.WasReset(title)
	return fmt.Sprintf("%s (%s) was reset", title, d.UUID), nil
}

// awaitFree returns nil when a GPU is not in use. While it is in use, awaitFree waits if the request has Wait, and
// otherwise returns an error.
func (a *administrator) awaitFree(
	ctx context.Context, r control.Request, d *gpu.Device, title string, progress func(string),
) error {
	reported, at := "", time.Time{}
	for {
		users, err := a.usersOf(ctx, d, r.Force)
		text := title + " is in use by " + strings.Join(users, ", ")
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("wait until %s is not in use: %w", title, context.Cause(ctx))
		case err != nil:
			text = fmt.Sprintf("the users of %s are unknown: %v", title, err)
		case len(users) == 0:
			return nil
		}
		if !r.Wait {
			return errors.New(text + "; use --wait to wait until it is free")
		}
		if text != reported || time.Since(at) > repeatAfter {
			progress("waiting: " + text)
			reported, at = text, time.Now()
		}
		select {
		case <-time.After(usersInterval):
		case <-ctx.Done():
		}
	}
}

// usersOf lists what uses a GPU or one of its MIG devices: containers as the kubelet reports them, claims, processes as
// the driver does, and processes that have the device node open. With force, processes outside containers are left out,
// unless they have the device node open: the driver does not reset the GPU then.
func (a *administrator) usersOf(ctx context.Context, d *gpu.Device, force bool) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, usersLimit) // the driver may hang, or be released
	defer cancel()
	if _, err := a.ledger.Read(ctx); err != nil {
		return nil, err
	}
	uuids := []string{d.UUID}
	for _, m := range d.MIG {
		uuids = append(uuids, m.UUID)
	}
	var users []string
	for _, h := range a.ledger.Holdings() {
		if (h.GPU == d.UUID || h.GPU == "") && !h.AdminAccess && h.State != ledger.Forgotten {
			users = append(users, h.String())
		}
	}
	programs := a.devices.preStart().RulesOf("").Programs
	for _, uuid := range uuids {
		containers, others, err := a.runner.Users(ctx, uuid, programs)
		if err != nil {
			return nil, err
		}
		users = append(users, containers...)
		if !force {
			users = append(users, others...)
		}
	}
	open, _ := a.runner.Openers(ctx, a.devices.nodesOf(d)) // if unknown, the reset fails because of them
	users = append(users, open...)
	slices.Sort(users)
	return slices.Compact(users), nil
}
