package agent

import (
	"context"
	"errors"
	"slices"
	"strings"

	"gpu-cdi-plugin/agent/control"
)

// allocation returns the CDI names that Allocate gave a container: the names of the devices that the container has
// according to the kubelet, and those of the extras.
func (a *administrator) allocation(ctx context.Context, r control.Request) (string, error) {
	state := a.node.State()
	if state.Snapshot == nil {
		return "", errors.New("the GPUs have not been read yet")
	}
	list, err := a.ledger.Read(ctx)
	if err != nil {
		return "", err
	}
	var uuids []string
	for _, h := range list {
		if h.Namespace == r.Namespace && h.Pod == r.Pod && h.Container == r.Container {
			uuids = append(uuids, h.UUIDs()...)
		}
	}
	var names []string
	for _, res := range state.Resources {
		for i := range res.Devices {
			if d := &res.Devices[i]; slices.Contains(uuids, d.UUID) {
				names = append(names, d.Grant.CDIDevices...)
				names = append(names, res.Grant.CDIDevices...)
			}
		}
	}
	if len(names) == 0 {
		return "", errors.New("the kubelet gave the container no device of this plugin")
	}
	slices.Sort(names)
	return strings.Join(slices.Compact(names), ","), nil
}
