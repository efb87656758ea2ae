package nvml

import (
	"context"
	"fmt"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
)

// nvlink is an active NVLink of a GPU: where it leads to.
type nvlink struct {
	remote   string // PCI address, or empty if the driver does not say
	toSwitch bool
}

// nvlinks reads the GPU's NVLinks.
func (r *reader) nvlinks(dev nvml.Device) error {
	toSwitch := map[string]bool{} // by remote address
	for port := range nvml.NVLINK_MAX_LINKS {
		state, err := ask(r.d, r.t, "nvmlDeviceGetNvLinkState", func() (nvml.EnableState, nvml.Return) {
			return dev.GetNvLinkState(port)
		})
		switch {
		case hasCode(err, nvml.ERROR_INVALID_ARGUMENT): // the port behind the last
			return nil
		case hasCode(err, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND):
			if port == 0 {
				return nil // no NVLink at all
			}
			continue
		case err != nil:
			return err
		case state != nvml.FEATURE_ENABLED:
			continue
		}
		if err := r.nvlink(dev, port, toSwitch); err != nil {
			return fmt.Errorf("NVLink %d: %w", port, err)
		}
	}
	return nil
}

// nvlink reads where an active link leads to. What kind of device that is, is asked once for each device.
func (r *reader) nvlink(dev nvml.Device, port int, toSwitch map[string]bool) error {
	pci, err := optional(ask(r.d, r.t, "nvmlDeviceGetNvLinkRemotePciInfo", func() (nvml.PciInfo, nvml.Return) {
		return dev.GetNvLinkRemotePciInfo(port)
	}))
	if err != nil {
		return err
	}
	remote, err := busID(pci)
	if err != nil {
		remote = "" // some drivers fill in nothing where an NVSwitch cannot be seen
	}
	if _, known := toSwitch[remote]; !known || remote == "" {
		const function = "nvmlDeviceGetNvLinkRemoteDeviceType"
		kind, err := ask(r.d, r.t, function, func() (nvml.IntNvLinkDeviceType, nvml.Return) {
			return dev.GetNvLinkRemoteDeviceType(port)
		})
		if _, err := optional(kind, err); err != nil {
			return err
		}
		toSwitch[remote] = err == nil && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH
	}
	link := nvlink{remote: remote, toSwitch: toSwitch[remote]}
	r.note(func(got *reading) { got.nvlinks = append(got.nvlinks, link) })
	return nil
}

// pair is two GPUs by index, a < b.
type pair struct{ a, b int }

// pathAnswer is what the driver said about the PCIe path between two GPUs.
type pathAnswer struct {
	path gpu.PCIePath
	err  error
}

// readPaths asks for the PCIe path of each pair of the GPUs with handles (nil for those to leave out).
//
// As many calls as there are GPUs are under way at a time. A GPU that hangs holds up one call with each other GPU, so
// one place is left on which all other pairs are read.
func (d *driver) readPaths(ctx context.Context, handles []nvml.Device) map[pair]pathAnswer {
	pairs := pairsOf(handles)
	answers := make([]pathAnswer, len(pairs))
	places := make(chan struct{}, len(handles))
	var all sync.WaitGroup
	for i, p := range pairs {
		all.Go(func() { answers[i] = d.readPath(ctx, p, handles, places) })
	}
	all.Wait()
	byPair := map[pair]pathAnswer{}
	for i, p := range pairs {
		byPair[p] = answers[i]
	}
	return byPair
}

// readPath takes a place, which is free again when the call is over, not when it is given up.
func (d *driver) readPath(ctx context.Context, p pair, handles []nvml.Device, places chan struct{}) pathAnswer {
	const function = "nvmlDeviceGetTopologyCommonAncestor"
	var level nvml.GpuTopologyLevel
	var err error
	work := func(t *task) {
		t.calling(function)
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			err = t.noAnswer()
			return
		}
		defer func() { <-places }()
		level, err = ask(d, t, function, func() (nvml.GpuTopologyLevel, nvml.Return) {
			return handles[p.a].GetTopologyCommonAncestor(handles[p.b])
		})
	}
	if gaveUp := d.tasks.do(ctx, fmt.Sprintf("GPUs %d and %d", p.a, p.b), work, nil); gaveUp != nil {
		return pathAnswer{err: gaveUp}
	}
	return answerOf(level, err)
}

// answerOf takes a driver that cannot tell, as under a hypervisor, for an answer.
func answerOf(level nvml.GpuTopologyLevel, err error) pathAnswer {
	if err != nil {
		_, err = optional(level, err)
		return pathAnswer{path: gpu.PathUnknown, err: err}
	}
	return pathAnswer{path: pathOf(level)}
}

// pairsOf lists the pairs of GPUs that have a handle.
func pairsOf(handles []nvml.Device) []pair {
	var pairs []pair
	for a := range handles {
		for b := a + 1; b < len(handles); b++ {
			if handles[a] != nil && handles[b] != nil {
				pairs = append(pairs, pair{a, b})
			}
		}
	}
	return pairs
}

func pathOf(level nvml.GpuTopologyLevel) gpu.PCIePath {
	switch level {
	case nvml.TOPOLOGY_INTERNAL:
		return gpu.PathSameBoard
	case nvml.TOPOLOGY_SINGLE:
		return gpu.PathSingleSwitch
	case nvml.TOPOLOGY_MULTIPLE:
		return gpu.PathMultipleSwitches
	case nvml.TOPOLOGY_HOSTBRIDGE:
		return gpu.PathHostBridge
	case nvml.TOPOLOGY_NODE:
		return gpu.PathNode
	case nvml.TOPOLOGY_SYSTEM:
		return gpu.PathSystem
	}
	return gpu.PathUnknown
}
