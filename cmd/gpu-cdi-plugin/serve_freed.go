package main

import (
	"context"
	"maps"
	"sync"
	"time"

	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/prestart"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/topology"
	"gpu-cdi-plugin/topology/holders"
)

// freed checks devices after their last container, so that one that is still in use is advertised as unhealthy before
// another container is to get it. It is an actor.
type freed struct {
	*preparer
	mu sync.Mutex
	// due has the devices that a container had and that were not found unused since: by UUID, what the last check found.
	due map[string]string
}

func (s *service) newFreed() *freed { return &freed{preparer: s.preparer, due: map[string]string{}} }

const (
	// freedInterval is how often the kubelet is asked which devices containers have.
	freedInterval = 5 * time.Second
	// freedLimit is how long the checks may take that follow.
	freedLimit = 10 * time.Second
)

func (f *freed) run(ctx context.Context) error {
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

// freedDevice is a device that may be checked, and the rules of its resource.
type freedDevice struct {
	*resource.Device
	rules prestart.Rules
}

// round asks the kubelet once which devices containers have, and checks those that they have no longer.
func (f *freed) round(ctx context.Context) {
	devices := f.devices()
	maps.DeleteFunc(f.due, func(uuid, _ string) bool { _, offered := devices[uuid]; return !offered })
	if len(devices) == 0 || f.releaser.reason() != nil {
		return
	}
	list, err := holders.List(ctx, f.podResources())
	if err != nil { // without a kubelet there are no containers
		f.app.log.Debug("devices are not checked after their containers: " + err.Error())
		return
	}
	for _, h := range list {
		for _, id := range h.Devices {
			if uuid := topology.UUIDOf(id); devices[uuid] != nil {
				delete(devices, uuid)
				f.due[uuid] = ""
				f.node.SetLeftInUse(uuid, "") // from now on it is for PreStartContainer to refuse it
			}
		}
	}
	known := f.node.State().Health
	maps.DeleteFunc(devices, func(uuid string, _ *freedDevice) bool {
		_, due := f.due[uuid]
		return !due && known[uuid].State != health.Suspect // as after a restart
	})
	f.check(ctx, devices)
}

// devices are those that are checked, by UUID. What was found on the others does not count.
func (f *freed) devices() map[string]*freedDevice {
	list := map[string]*freedDevice{}
	for _, r := range f.node.State().Resources {
		rules := f.app.plugin.PreStart.RulesOf(r.Name)
		for i := range r.Devices {
			d := &r.Devices[i]
			if rules.Policy == prestart.None {
				f.node.SetLeftInUse(d.UUID, "")
			} else if list[d.UUID] == nil {
				list[d.UUID] = &freedDevice{d, rules}
			}
		}
	}
	return list
}

// check checks devices that no container has, all at once.
func (f *freed) check(ctx context.Context, devices map[string]*freedDevice) {
	ctx, cancel := context.WithTimeout(ctx, freedLimit)
	defer cancel()
	var all sync.WaitGroup
	for uuid, d := range devices {
		all.Go(func() {
			found, err := f.runner.FindUse(ctx, f.deviceOf(d.Device), d.rules)
			if err != nil {
				f.app.log.Debug(uuid + " is not checked after its container: " + err.Error())
				return
			}
			f.judge(uuid, found)
		})
	}
	all.Wait()
}

// judge takes what was found on a device. What is found for the first time does not make it suspect: a container may
// take a moment to leave its devices, and a kubelet that has just started does not know its pods yet.
func (f *freed) judge(uuid, found string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if found == "" {
		delete(f.due, uuid)
		f.node.SetLeftInUse(uuid, "")
		return
	}
	if f.due[uuid] != "" || f.node.State().Health[uuid].State == health.Suspect {
		f.node.SetLeftInUse(uuid, found)
	}
	f.due[uuid] = found
}
