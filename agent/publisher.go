package agent

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/dra"
	"gpu-cdi-plugin/agent/kubeapi"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/agent/plugin"
	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// publisher passes each state of the node to the kubelet, the metrics and the API server.
type publisher struct {
	config    *config.Config // only what needs a restart is used
	devices   *devices
	plugin    *plugin.Plugin
	dra       *dra.Driver // or nil
	mps       *mps.Monitor
	ledger    *ledger.Ledger
	displaced *ledger.Displaced
	releaser  *releaser
	reporter  *kubeapi.Reporter
	metrics   *metrics.Metrics
	weights   allocator.Weights
	again     wake.Chan // an MPS daemon, the release of the driver, the ledger or the configuration has changed
	changed   wake.Chan // a state was passed on

	mu       sync.Mutex
	state    node.State      // the last state of the node
	gpus     *allocator.GPUs // how the GPUs of its snapshot are connected, or nil if it is unknown
	unknown  string          // why that is unknown, or empty
	outdated string          // why the node has older labels, or empty
	ended    bool            // set by end
	heldBack bool            // set by holdBack
	refused  string          // why the kubelet still has older devices of some resources, or empty
	unread   error           // why the last state that was passed on lacks devices that can be given soon, or nil
}

// publish passes on a state of the node. When it returns, no device that left the state can be allocated.
func (p *publisher) publish(state node.State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if state.Snapshot != p.state.Snapshot { // events do not change the snapshot
		p.connect(state.Snapshot)
	}
	p.state = state
	p.mps.Set(state.Resources)
	advertised, claimable := split(p.config, state.Snapshot, state.Resources)
	p.ledger.Offer(state.Snapshot, advertised, claimable...)
	p.advertise()
}

// labelsInterval is the time between two checks of the file with the node's labels. Node feature discovery may make its
// directory at any time, and anyone may change the file.
const labelsInterval = time.Minute

// run passes the last state on again when anything outside the node changes.
func (p *publisher) run(ctx context.Context) error {
	labels := time.NewTimer(wake.Next(labelsInterval))
	defer labels.Stop()
	for {
		send := p.advertise
		select {
		case <-ctx.Done():
			return nil
		case <-p.again:
		case <-labels.C:
			send = p.writeLabels
			labels.Reset(wake.Next(labelsInterval))
		}
		p.mu.Lock()
		send()
		p.mu.Unlock()
	}
}

// advertise passes the last state on. It marks devices as unhealthy that a container holds so that the kubelet does
// not know, or whose MPS daemon is not ready; for the plugin those that a claim has, and those that cannot be given
// before the kubelet was read; and for DRA those that a claim has so that the scheduler does not know.
func (p *publisher) advertise() {
	if p.ended {
		return
	}
	p.unread = p.ledger.Ready()
	state := p.state
	state.Resources = resource.MarkUnhealthy(state.Resources, func(d *resource.Device) (why string) {
		why, d.Ending = p.ledger.Reason(d)
		return cmp.Or(why, p.mps.Reason(d))
	})
	advertised, claimable := split(p.config, state.Snapshot, state.Resources)
	advertised = resource.MarkUnhealthy(advertised, p.ledger.Claim)
	for i := range advertised {
		of := advertised[i : i+1]
		of[0] = resource.MarkUnhealthy(of, func(d *resource.Device) string { return p.ledger.Unread(of[0].Name, d) })[0]
	}
	claimable = resource.MarkUnhealthy(claimable, p.ledger.Unscheduled)
	if p.heldBack {
		advertised = slices.Clone(advertised)
		for i := range advertised {
			advertised[i].Devices = nil
		}
	}
	if p.config.Leaves() {
		claimable = nil
	}
	p.refused = ""
	if err := p.plugin.Update(advertised, p.gpus); err != nil {
		p.refused = wording.OneLine(err)
	}
	if p.dra != nil {
		p.dra.Publish(state, dra.Offer{Resources: claimable, Displaced: displacedBy(p.config, claimable)})
	}
	p.displaced.Advertised(advertised)
	p.metrics.Advertised(state)
	if err := p.releaser.checkOpen(); err != nil { // faults are not noticed while the driver is released
		state.Err = fmt.Errorf("%w: %w", gpu.ErrNoDriver, err)
	}
	p.reporter.Publish(state)
	p.writeLabels()
	p.changed.Wake()
}

// ready returns an error if the kubelet has not got all devices yet, since it was not known which containers have.
func (p *publisher) ready() error {
	if err := p.ledger.Ready(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unread
}

// writeLabels writes the labels of the last state.
func (p *publisher) writeLabels() {
	if p.ended {
		return
	}
	before := p.outdated
	p.outdated = ""
	if err := p.devices.writeLabels(&p.state); err != nil {
		p.outdated = wording.OneLine(err)
	}
	if p.outdated != before {
		p.changed.Wake()
	}
}

// holdBack has the plugin advertise no devices, or all of them again: while ResourceSlices are withdrawn, claims can
// still be allocated, and a pod that gets the same device by the plugin would fail.
func (p *publisher) holdBack(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heldBack = on
	p.again.Wake()
}

// end makes the publisher pass on nothing more, since another instance does. The driver may still report events.
func (p *publisher) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
}

// connect precomputes which GPUs are best connected.
func (p *publisher) connect(snapshot *gpu.Snapshot) {
	var err error
	p.unknown = ""
	if p.gpus, err = allocator.NewGPUs(snapshot, p.weights); err != nil {
		p.unknown = wording.OneLine(err)
	}
}

// remarks are about devices that the kubelet does not get as they are configured, and about resources whose MIG devices
// no container could ever get. For replicas the latter is an error of the configuration, but only the driver knows
// whether there are MIG devices.
func (p *publisher) remarks() []node.Remark {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []node.Remark
	add := func(level slog.Level, key, text string) {
		list = append(list, node.Remark{Key: key, Level: level, Text: text})
	}
	if p.refused != "" {
		add(slog.LevelError, "refused",
			"some resources keep their old devices, since the new ones cannot be advertised: "+p.refused)
	}
	if p.unknown != "" {
		add(slog.LevelError, "connections",
			"containers get arbitrary GPUs instead of the best connected ones: "+p.unknown)
	}
	if p.outdated != "" {
		add(slog.LevelWarn, "labels", "the node keeps its old labels: "+p.outdated)
	}
	for _, r := range p.state.Resources {
		part := func(d resource.Device) bool { return d.UUID != d.Parent }
		if p.devices.preStart().RefusesParts(r.Name) && slices.ContainsFunc(r.Devices, part) {
			add(slog.LevelWarn, "parts of "+r.Name, "no container gets a MIG device of "+r.Name+", since policy reset cannot "+
				"reset them and prestart.strict is set: give the resource another policy in prestart.resources")
		}
	}
	return list
}
