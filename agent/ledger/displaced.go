package ledger

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

// Displaced notices that another device plugin has registered a resource of this one. The kubelet then uses the later
// plugin, and does not notify the earlier one. Displaced compares the devices that the kubelet has with those that are
// advertised. It does not notice a plugin that advertises the same devices.
//
// It also notices that the kubelet watches a plugin and has lost its devices all the same: one before 1.37 does if the
// plugin registers while it still forgets another plugin of the resource. It is an actor.
type Displaced struct {
	opts DisplacedOptions

	mu      sync.Mutex
	healthy map[string]map[string]bool // the advertised healthy devices by resource
	// changed says that healthy has changed during a check, so that the kubelet may still have the old devices.
	changed  bool
	differed map[string]bool // the resources of which the kubelet had other devices at the last check
	text     string          // what is wrong, or empty
}

// DisplacedOptions are the parameters of a Displaced. All are required.
type DisplacedOptions struct {
	// Allocatable returns the healthy devices that the kubelet has, by resource.
	Allocatable func(context.Context) (map[string]map[string]bool, error)
	// Watched reports whether the kubelet watches all resources. Otherwise it need not have their devices.
	Watched func() bool
	// Lost is called for a resource of which the kubelet has no healthy device.
	Lost func(resource string)
	// Changed is woken when Text has another result.
	Changed wake.Chan
}

// NewDisplaced returns a Displaced; call Run.
func NewDisplaced(opts DisplacedOptions) *Displaced { return &Displaced{opts: opts} }

// Advertised sets the devices that are advertised from now on.
func (d *Displaced) Advertised(resources []resource.Resource) {
	healthy := map[string]map[string]bool{}
	for i := range resources {
		ids := map[string]bool{}
		for _, one := range resources[i].Devices {
			if one.Healthy {
				ids[one.ID] = true
			}
		}
		healthy[resources[i].Name] = ids
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !maps.EqualFunc(d.healthy, healthy, maps.Equal) {
		d.healthy, d.changed = healthy, true
	}
}

// Run checks until ctx ends.
func (d *Displaced) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wake.Next(interval)):
			d.check(ctx)
		}
	}
}

// check compares once. Only a difference that two checks in a row find counts.
func (d *Displaced) check(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	d.mu.Lock()
	d.changed = false
	d.mu.Unlock()
	list, err := d.opts.Allocatable(ctx)
	watched := d.opts.Watched()
	d.mu.Lock()
	defer d.mu.Unlock()
	differ := map[string]bool{}
	if err == nil && watched && !d.changed {
		for name, ids := range d.healthy {
			if !maps.Equal(ids, list[name]) {
				differ[name] = true
			}
		}
	}
	lasting := slices.DeleteFunc(slices.Sorted(maps.Keys(differ)), func(name string) bool { return !d.differed[name] })
	d.differed = differ
	for _, name := range lasting {
		if len(list[name]) == 0 {
			d.opts.Lost(name)
		}
	}
	text := ""
	if len(lasting) > 0 {
		text = "the kubelet has other devices of " + strings.Join(lasting, ", ") + " than this plugin advertises: another " +
			"device plugin has probably registered the same resource; stop that plugin, and restart this one"
	}
	d.set(text)
}

// set sets the text.
func (d *Displaced) set(text string) {
	if text == d.text {
		return
	}
	d.text = text
	d.opts.Changed.Wake()
}

// Text says of which resources the kubelet has other devices, or is empty.
func (d *Displaced) Text() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.text
}
