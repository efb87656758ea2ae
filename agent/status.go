package agent

import (
	"context"
	"errors"
	"strings"

	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/node"
)

// listen returns the server of metrics and health. If no address is configured, the server serves nothing.
func (d *daemon) listen(ctx context.Context) (*metrics.Server, error) {
	address := d.opts.Config.Listen
	if address == "" {
		return &metrics.Server{}, nil
	}
	checks := metrics.Checks{
		Healthy: d.alive,
		Ready:   d.ready,
		Remarks: d.remarks,
	}
	server, err := d.metrics.Listen(ctx, address, checks, d.opts.Log)
	if err != nil {
		return nil, err
	}
	d.opts.Log.Info("metrics and health are served on "+server.Address(), "address", server.Address())
	return server, nil
}

// alive returns an error if the service hangs.
func (d *daemon) alive() error {
	if d.idle.Load() != nil {
		return nil
	}
	return d.node.Alive()
}

// ready returns an error if the service is not ready.
func (d *daemon) ready() error {
	if i := d.idle.Load(); i != nil {
		if i.ready {
			return nil
		}
		return errors.New(i.text)
	}
	state := d.node.State()
	return errors.Join(d.role.ready(), state.Ready())
}

func (d *daemon) watchdog(ctx context.Context) error {
	d.systemd.Watch(ctx, d.alive, d.opts.Log)
	return nil
}

// reportStatus reports the state to systemd and logs the role's remarks, whenever they change. The node logs its own.
func (d *daemon) reportStatus(ctx context.Context) error {
	text, remarks := d.statusLine(), d.role.remarks()
	node.LogRemarks(d.opts.Log, nil, remarks)
	d.logUnsent(d.systemd.Ready(text))
	defer func() { d.logUnsent(d.reportEnd(context.Cause(ctx))) }()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.changed:
		}
		before := remarks
		remarks = d.role.remarks()
		node.LogRemarks(d.opts.Log, before, remarks)
		if next := d.statusLine(); next != text {
			text = next
			d.logUnsent(d.systemd.Status(text))
		}
	}
}

// reportEnd reports to systemd why the service ends. systemd never takes STOPPING back: it kills a process that goes on.
func (d *daemon) reportEnd(cause error) error {
	switch {
	case errors.Is(cause, errHandedOver):
		return nil
	case NeedsRestart(cause):
		return d.systemd.Reloading() // the program is ready again when it has started anew
	}
	return d.systemd.Stopping()
}

func (d *daemon) logUnsent(err error) {
	if err != nil {
		d.opts.Log.Warn("the state cannot be reported to systemd: " + err.Error())
	}
}

// remarks are the remarks of the role and of the node.
func (d *daemon) remarks() []string {
	if i := d.idle.Load(); i != nil {
		if i.ready {
			return []string{i.text}
		}
		return nil
	}
	state := d.node.State()
	var list []string
	for _, r := range d.role.remarks() {
		list = append(list, r.Text)
	}
	return append(list, state.Remarks()...)
}

// statusLine describes the state in one line.
func (d *daemon) statusLine() string {
	return strings.Join(append(d.role.summary(), d.remarks()...), "; ")
}
