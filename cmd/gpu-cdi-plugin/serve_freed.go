package main

import (
	"context"
	"maps"
	"sync"
	"time"

	"gpu-cdi-plugin/prestart"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/topology"
	"gpu-cdi-plugin/topology/holders"
)

// freed checks devices after their last container, so that one that is still in use is advertised as unhealthy before
// another container is to get it. It is an actor.
type freed struct {
	*preparer
	mu sync.Mutex // held by checks, which run at once
	// toCheck has the devices to check, by UUID: those that a container had. The value is what the last check found.
	toCheck map[string]string
}

func (s *service) newFreed() *freed {
	return &freed{preparer: s.preparer, toCheck: map[string]string{}}
}

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
	for uuid, d := range devices {
		if d.rules.Policy == prestart.None { // it is not checked, so a finding of before a reload would stay
			f.node.SetLeftInUse(uuid, "")
			delete(devices, uuid)
		}
	}
	maps.DeleteFunc(f.toCheck, func(uuid, _ string) bool { return devices[uuid] == nil })
	if len(devices) == 0 || f.releaser.checkOpen() != nil {
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
				f.toCheck[uuid] = ""
				f.node.SetLeftInUse(uuid, "") // from now on it is for PreStartContainer to refuse it
			}
		}
	}
	maps.DeleteFunc(devices, func(uuid string, _ *freedDevice) bool {
		_, had := f.toCheck[uuid]
		return !had && !f.node.LeftInUse(uuid) // as it was found before a restart
	})
	f.check(ctx, devices)
}

// devices are those that are offered, by UUID.
func (f *freed) devices() map[string]*freedDevice {
	list := map[string]*freedDevice{}
	for _, r := range f.node.State().Resources {
		rules := f.app.plugin.PreStart.RulesOf(r.Name)
		for i := range r.Devices {
			d := &r.Devices[i]
			list[d.UUID] = &freedDevice{d, rules} // of the replicas of a device, one
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
		delete(f.toCheck, uuid)
		f.node.SetLeftInUse(uuid, "")
		return
	}
	if f.toCheck[uuid] != "" || f.node.LeftInUse(uuid) {
		f.node.SetLeftInUse(uuid, found)
	}
	f.toCheck[uuid] = found
}
