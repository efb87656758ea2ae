package prepare

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"
)

// FreedChecker checks devices after their last container, so that one that is still in use is advertised as unhealthy
// before another container is to get it. It is an actor.
type FreedChecker struct {
	opts FreedOptions
	mu   sync.Mutex // held by checks, which run at once
	// toCheck has the devices to check, by UUID: those that a container had. The value is what the last check found.
	toCheck map[string]string
}

// FreedOptions are what a FreedChecker works with. All are needed.
type FreedOptions struct {
	Runner *Runner
	State  FreedState
	// Offered returns the devices that containers can get, by UUID.
	Offered func() map[string]FreedDevice
	// Held returns the UUIDs of the devices that containers have now.
	Held func(context.Context) (map[string]bool, error)
	Log  *slog.Logger
}

// FreedState is what is known of devices after their containers. UUIDs name them. node.Monitor implements it.
type FreedState interface {
	// SetLeftInUse marks a device as in use after its last container, for a reason, or with an empty reason no longer.
	SetLeftInUse(uuid, reason string)
	// LeftInUse reports whether a device is marked, also by the previous run of the program.
	LeftInUse(uuid string) bool
}

// FreedDevice is a device that may be checked, and the rules of its resource.
type FreedDevice struct {
	Device Device
	Rules  Rules
}

// NewFreedChecker returns a FreedChecker.
func NewFreedChecker(opts FreedOptions) *FreedChecker {
	return &FreedChecker{opts: opts, toCheck: map[string]string{}}
}

const (
	// freedInterval is the time between two checks of which devices containers have.
	freedInterval = 5 * time.Second
	// freedLimit is how long the checks may take that follow.
	freedLimit = 10 * time.Second
)

// Run checks devices until ctx ends.
func (f *FreedChecker) Run(ctx context.Context) error {
	timer := time.NewTicker(freedInterval)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
			f.round(ctx)
		}
	}
}

// round asks once which devices containers have, and checks those that they have no longer.
func (f *FreedChecker) round(ctx context.Context) {
	devices := f.opts.Offered()
	for uuid, d := range devices {
		if d.Rules.Policy == None { // it is not checked, so a finding from before a reload would stay
			f.opts.State.SetLeftInUse(uuid, "")
			delete(devices, uuid)
		}
	}
	maps.DeleteFunc(f.toCheck, func(uuid, _ string) bool { _, offered := devices[uuid]; return !offered })
	if len(devices) == 0 {
		return
	}
	held, err := f.opts.Held(ctx)
	if err != nil {
		f.opts.Log.Debug("devices are not checked after their containers: " + err.Error())
		return
	}
	maps.DeleteFunc(devices, func(uuid string, _ FreedDevice) bool {
		if held[uuid] {
			f.toCheck[uuid] = ""
			f.opts.State.SetLeftInUse(uuid, "") // from now on it is for Runner.Run to refuse it
			return true
		}
		_, had := f.toCheck[uuid]
		return !had && !f.opts.State.LeftInUse(uuid) // as it was found before a restart
	})
	f.check(ctx, devices)
}

// check checks devices that no container has, all at once.
func (f *FreedChecker) check(ctx context.Context, devices map[string]FreedDevice) {
	ctx, cancel := context.WithTimeout(ctx, freedLimit)
	defer cancel()
	var all sync.WaitGroup
	for uuid, d := range devices {
		all.Go(func() {
			found, err := f.opts.Runner.FindUse(ctx, d.Device, d.Rules)
			if err != nil {
				f.opts.Log.Debug(uuid + " is not checked after its container: " + err.Error())
				return
			}
			f.judge(uuid, found)
		})
	}
	all.Wait()
}

// judge records what a check found on a device. Only the second finding in a row makes the device suspect: a container
// may take a moment to leave its devices, and a kubelet that has just started does not know its pods yet.
func (f *FreedChecker) judge(uuid, found string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if found == "" {
		delete(f.toCheck, uuid)
		f.opts.State.SetLeftInUse(uuid, "")
		return
	}
	if f.toCheck[uuid] != "" || f.opts.State.LeftInUse(uuid) {
		f.opts.State.SetLeftInUse(uuid, found)
	}
	f.toCheck[uuid] = found
}
