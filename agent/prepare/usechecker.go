package prepare

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"

	"gpu-cdi-plugin/internal/wake"
)

// UseChecker checks the devices that no container holds. One that is in use all the same, by a process of the host or
// by what is left of a container, is advertised as unhealthy before a container gets it. UseChecker is an actor.
type UseChecker struct {
	opts UseCheckerOptions
	// found is what the last round found, by UUID.
	found map[string]Use
	// lastHeld is when containers last held a device, at first when Run was called.
	lastHeld time.Time
}

// UseCheckerOptions are the parameters of a UseChecker. All are required.
type UseCheckerOptions struct {
	Runner *Runner
	State  UseState
	// Offered returns the devices that containers can get, by UUID.
	Offered func() map[string]CheckedDevice
	// Held returns the UUIDs of the devices that containers hold, also of other plugins.
	Held func(context.Context) (map[string]bool, error)
	Log  *slog.Logger
}

// UseState records which devices are in use without a container, by UUID. node.Reconciler implements it.
type UseState interface {
	// SetInUse marks a device as in use although no container holds it, by these processes as far as they are known. An
	// empty reason removes the mark.
	SetInUse(uuid, reason string, pids []int)
	// InUse reports whether a device is marked. Marks survive a restart of the program.
	InUse(uuid string) bool
}

// CheckedDevice is a device to check, with the rules of its resource.
type CheckedDevice struct {
	Device Device
	Rules  Rules
}

// NewUseChecker returns a UseChecker; call Run.
func NewUseChecker(opts UseCheckerOptions) *UseChecker { return &UseChecker{opts: opts} }

const (
	// useInterval is the time between two rounds.
	useInterval = 2 * wake.Tick
	// useLimit bounds the checks of a round.
	useLimit = 10 * time.Second
	// kubeletStart is for how long a kubelet that has just started may not know its pods.
	kubeletStart = 30 * time.Second
)

// Run checks devices until ctx ends.
func (c *UseChecker) Run(ctx context.Context) error {
	c.lastHeld = time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wake.Next(useInterval)):
			c.round(ctx)
		}
	}
}

// round checks the devices that no container holds. Only if two rounds in a row find something, a device is marked: a
// container may take a moment to leave its devices. While no container holds any device, the kubelet may have just
// started and not know its pods, so no device is marked until that has been so for a while.
func (c *UseChecker) round(ctx context.Context) {
	devices := c.opts.Offered()
	for uuid, d := range devices {
		if d.Rules.Policy == None { // since no check would clear a mark that it had before a reload
			c.opts.State.SetInUse(uuid, "", nil)
			delete(devices, uuid)
		}
	}
	if len(devices) == 0 {
		return
	}
	held, err := c.opts.Held(ctx)
	if err != nil {
		c.found = nil // the next round is not the one after what was found
		c.opts.Log.Debug("devices that no container holds are not checked: " + err.Error())
		return
	}
	if len(held) > 0 {
		c.lastHeld = time.Now()
	}
	known := len(held) > 0 || time.Since(c.lastHeld) >= kubeletStart
	maps.DeleteFunc(devices, func(uuid string, _ CheckedDevice) bool {
		if held[uuid] {
			c.opts.State.SetInUse(uuid, "", nil) // from now on, Runner.Run refuses the device if it is in use
		}
		return held[uuid] || !known && !c.opts.State.InUse(uuid)
	})
	before := c.found
	c.found = c.check(ctx, devices)
	for uuid, found := range c.found {
		if found.Text == "" || before[uuid].Text != "" || c.opts.State.InUse(uuid) {
			c.opts.State.SetInUse(uuid, found.Text, found.PIDs)
		}
	}
}

// check returns what uses the devices, by UUID. Devices that cannot be checked are left out.
func (c *UseChecker) check(ctx context.Context, devices map[string]CheckedDevice) map[string]Use {
	ctx, cancel := context.WithTimeout(ctx, useLimit)
	defer cancel()
	var (
		all   sync.WaitGroup
		mu    sync.Mutex
		found = map[string]Use{}
	)
	for uuid, d := range devices {
		all.Go(func() {
			use, err := c.opts.Runner.FindUse(ctx, d.Device, d.Rules)
			if err != nil {
				c.opts.Log.Debug(uuid + " is held by no container, but cannot be checked: " + err.Error())
				return
			}
			mu.Lock()
			defer mu.Unlock()
			found[uuid] = use
		})
	}
	all.Wait()
	return found
}
