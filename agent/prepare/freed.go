package prepare

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"
)

// FreedChecker checks a device after its last container has ended. If the device is still in use, it is advertised as
// unhealthy before another container gets it. FreedChecker is an actor.
type FreedChecker struct {
	opts FreedOptions
	mu   sync.Mutex // held by checks, which run concurrently
	// toCheck has, by UUID, the devices that must be checked, since a container had them. The value is what the last
	// check found.
	toCheck map[string]string
}

// FreedOptions are the parameters of a FreedChecker. All are required.
type FreedOptions struct {
	Runner *Runner
	State  FreedState
	// Offered returns the devices that containers can get, by UUID.
	Offered func() map[string]FreedDevice
	// Held returns the UUIDs of the devices that containers hold.
	Held func(context.Context) (map[string]bool, error)
	Log  *slog.Logger
}

// FreedState records the state of devices after their last container, by UUID. node.Monitor implements it.
type FreedState interface {
	// SetLeftInUse marks a device as still in use after its last container has ended. An empty reason removes the
	// mark.
	SetLeftInUse(uuid, reason string)
	// LeftInUse reports whether a device is marked. Marks survive a restart of the program.
	LeftInUse(uuid string) bool
}

// FreedDevice is a device to check, with the rules of its resource.
type FreedDevice struct {
	Device Device
	Rules  Rules
}

// NewFreedChecker returns a FreedChecker; call Run.
func NewFreedChecker(opts FreedOptions) *FreedChecker {
	return &FreedChecker{opts: opts, toCheck: map[string]string{}}
}

const (
	// freedInterval is how often the devices that containers hold are read from the kubelet.
	freedInterval = 5 * time.Second
	// freedLimit bounds the checks that follow the reading.
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

// round reads once from the kubelet which devices containers hold, and checks those that no container holds any more.
func (f *FreedChecker) round(ctx context.Context) {
	devices := f.opts.Offered()
	for uuid, d := range devices {
		if d.Rules.Policy == None { // since no check would clear a mark that it had before a reload
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
		f.opts.Log.Debug("devices that containers have released are not checked: " + err.Error())
		return
	}
	maps.DeleteFunc(devices, func(uuid string, _ FreedDevice) bool {
		if held[uuid] {
			f.toCheck[uuid] = ""
			f.opts.State.SetLeftInUse(uuid, "") // from now on, Runner.Run refuses the device if it is in use
			return true
		}
		_, had := f.toCheck[uuid]
		return !had && !f.opts.State.LeftInUse(uuid) // it was marked before a restart
	})
	f.check(ctx, devices)
}

// check checks the devices that no container holds, concurrently.
func (f *FreedChecker) check(ctx context.Context, devices map[string]FreedDevice) {
	ctx, cancel := context.WithTimeout(ctx, freedLimit)
	defer cancel()
	var all sync.WaitGroup
	for uuid, d := range devices {
		all.Go(func() {
			found, err := f.opts.Runner.FindUse(ctx, d.Device, d.Rules)
			if err != nil {
				f.opts.Log.Debug(uuid + " was released by its container, but cannot be checked: " + err.Error())
				return
			}
			f.judge(uuid, found)
		})
	}
	all.Wait()
}

// judge records what the check of a device found. Only if two checks in a row find something, the device becomes
// suspect: a container may take a moment to leave its devices, and a kubelet that has just started does not know its
// pods yet.
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
