package agent

import (
	"context"
	"errors"
	"log/slog"
	"strings"

	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
)

// serveMetrics serves metrics and health until ctx ends, if an address is configured. It is an actor. A failure is a
// remark: the node is served without metrics too.
func (d *daemon) serveMetrics(ctx context.Context) error {
	address := d.opts.Config.Listen
	if address == "" {
		return nil
	}
	if err := d.listenAndServe(ctx, address); err != nil {
		d.unserved.Store(&node.Remark{
			Key: "listen", Level: slog.LevelError, Text: wording.OneLine(err), Advice: d.opts.Hint(err),
		})
		d.changed.Wake()
	}
	return nil
}

func (d *daemon) listenAndServe(ctx context.Context, address string) error {
	checks := metrics.Checks{
		Healthy: d.alive,
		Ready:   d.ready,
		Remarks: d.remarks,
	}
	server, err := d.metrics.Listen(ctx, address, checks, d.opts.Log)
	if err != nil {
		return err
	}
	d.opts.Log.Info("metrics and health are served on "+server.Address(), "address", server.Address())
	return server.Run(ctx)
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

// reportStatus reports the state to systemd and logs the service's remarks, whenever they change. The node logs its
// own.
func (d *daemon) reportStatus(ctx context.Context) error {
	text, remarks := d.statusLine(), d.serviceRemarks()
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
		remarks = d.serviceRemarks()
		node.LogRemarks(d.opts.Log, before, remarks)
		if next := d.statusLine(); next != text {
			text = next
			d.logUnsent(d.systemd.Status(text))
		}
	}
}

// reportEnd reports to systemd why the service ends. systemd never takes STOPPING back: it kills a process that goes
// on.
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

// serviceRemarks are all remarks but the node's.
func (d *daemon) serviceRemarks() []node.Remark {
	list := d.role.remarks()
	if r := d.unserved.Load(); r != nil {
		list = append(list, *r)
	}
	return list
}

// remarks are the lines of all remarks.
func (d *daemon) remarks() []string {
	if i := d.idle.Load(); i != nil {
		if i.ready {
			return []string{i.text}
		}
		return nil
	}
	state := d.node.State()
	var list []string
	for _, r := range d.serviceRemarks() {
		list = append(list, r.Text)
	}
	return append(list, state.Remarks()...)
}

// statusLine describes the state in one line.
func (d *daemon) statusLine() string {
	return strings.Join(append(d.role.summary(), d.remarks()...), "; ")
}
