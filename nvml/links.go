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

// readNVLinks reads the NVLinks of a GPU, and waits for them until ctx ends.
func (l *Library) readNVLinks(ctx context.Context, index int, dev nvml.Device) ([]nvlink, error) {
	return read(ctx, l, fmt.Sprintf("NVLinks of GPU %d", index), func(t *task) ([]nvlink, error) {
		return l.driver.nvlinks(t, dev)
	})
}

func (d *driver) nvlinks(t *task, dev nvml.Device) ([]nvlink, error) {
	links := []nvlink{}
	toSwitch := map[string]bool{} // by remote address
	for port := range nvml.NVLINK_MAX_LINKS {
		state, err := ask(d, t, "nvmlDeviceGetNvLinkState", func() (nvml.EnableState, nvml.Return) {
			return dev.GetNvLinkState(port)
		})
		switch {
		case hasCode(err, nvml.ERROR_INVALID_ARGUMENT): // the port behind the last
			return links, nil
		case hasCode(err, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND):
			if port == 0 {
				return links, nil // no NVLink at all
			}
			continue
		case err != nil:
			return nil, err
		case state != nvml.FEATURE_ENABLED:
			continue
		}
		link, err := d.nvlink(t, dev, port, toSwitch)
		if err != nil {
			return nil, fmt.Errorf("NVLink %d: %w", port, err)
		}
		links = append(links, link)
	}
	return links, nil
}

// nvlink reads where an active link leads to. What kind of device that is, is asked once for each device.
func (d *driver) nvlink(t *task, dev nvml.Device, port int, toSwitch map[string]bool) (nvlink, error) {
	pci, err := optional(ask(d, t, "nvmlDeviceGetNvLinkRemotePciInfo", func() (nvml.PciInfo, nvml.Return) {
		return dev.GetNvLinkRemotePciInfo(port)
	}))
	if err != nil {
		return nvlink{}, err
	}
	remote, err := busID(pci)
	if err != nil {
		remote = "" // some drivers fill in nothing where an NVSwitch cannot be seen
	}
	if _, known := toSwitch[remote]; !known || remote == "" {
		const function = "nvmlDeviceGetNvLinkRemoteDeviceType"
		kind, err := ask(d, t, function, func() (nvml.IntNvLinkDeviceType, nvml.Return) {
			return dev.GetNvLinkRemoteDeviceType(port)
		})
		if _, err := optional(kind, err); err != nil {
			return nvlink{}, err
		}
		toSwitch[remote] = err == nil && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH
	}
	return nvlink{remote: remote, toSwitch: toSwitch[remote]}, nil
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
// one turn is left in which all other pairs are read.
func (l *Library) readPaths(ctx context.Context, handles []nvml.Device) map[pair]pathAnswer {
	pairs := pairsOf(handles)
	answers := make([]pathAnswer, len(pairs))
	turns := make(chan struct{}, len(handles))
	var all sync.WaitGroup
	for i, p := range pairs {
		all.Go(func() { answers[i] = l.readPath(ctx, p, handles, turns) })
	}
	all.Wait()
	byPair := map[pair]pathAnswer{}
	for i, p := range pairs {
		byPair[p] = answers[i]
	}
	return byPair
}

// readPath takes a turn, which ends when the call is over, not when it is abandoned.
func (l *Library) readPath(ctx context.Context, p pair, handles []nvml.Device, turns chan struct{}) pathAnswer {
	const function = "nvmlDeviceGetTopologyCommonAncestor"
	path, err := read(ctx, l, fmt.Sprintf("GPUs %d and %d", p.a, p.b), func(t *task) (gpu.PCIePath, error) {
		select {
		case turns <- struct{}{}:
		case <-ctx.Done():
			return gpu.PathUnknown, errNoTurn
		}
		defer func() { <-turns }()
		level, err := ask(l.driver, t, function, func() (nvml.GpuTopologyLevel, nvml.Return) {
			return handles[p.a].GetTopologyCommonAncestor(handles[p.b])
		})
		if err != nil { // a driver that cannot tell, as under a hypervisor, has answered too
			return optional(gpu.PathUnknown, err)
		}
		return pathOf(level), nil
	})
	return pathAnswer{path, err}
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
