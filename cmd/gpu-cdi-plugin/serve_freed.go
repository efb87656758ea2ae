package main

import (
	"context"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/agent/prepare"
)

// newFreed returns what checks devices after their containers.
func (s *service) newFreed() *prepare.FreedChecker {
	return prepare.NewFreedChecker(prepare.FreedOptions{
		Runner: s.preparer.runner, State: s.node.Monitor(), Offered: s.preparer.offered, Held: s.held, Log: s.app.Log,
	})
}

// offered returns the devices that are offered, by UUID.
func (p *preparer) offered() map[string]prepare.FreedDevice {
	list := map[string]prepare.FreedDevice{}
	for _, r := range p.node.State().Resources {
		rules := p.app.plugin.PreStart.RulesOf(r.Name)
		for i := range r.Devices {
			d := &r.Devices[i]
			list[d.UUID] = prepare.FreedDevice{Device: p.deviceOf(d), Rules: rules} // of the replicas of a device, one
		}
	}
	return list
}

// held returns the UUIDs of the devices that containers have, as the kubelet says. While the driver is released no
// device can be checked, and the kubelet is not asked.
func (s *service) held(ctx context.Context) (map[string]bool, error) {
	if err := s.releaser.checkOpen(); err != nil {
		return nil, err
	}
	list, err := podresources.List(ctx, s.podResources())
	if err != nil { // without a kubelet there are no containers
		return nil, err
	}
	uuids := map[string]bool{}
	for _, h := range list {
		for _, uuid := range h.UUIDs() {
			uuids[uuid] = true
		}
	}
	return uuids, nil
}
