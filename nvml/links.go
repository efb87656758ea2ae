package nvml

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// readLinks returns the link of each pair of GPUs with handles, in order. It also returns errors, by index, for GPUs
// whose links could not all be read. If the driver does not return a PCIe path, the path is taken from sysfs.
func (s *Session) readLinks(
	ctx context.Context, snapshot *gpu.Snapshot, handles []nvml.Device,
) (links []gpu.Link, unread map[int]error) {
	ctx, cancel := context.WithTimeout(ctx, s.wait())
	defer cancel()
	nvlinks, errs := make([][]nvlink, len(handles)), make([]error, len(handles))
	var paths map[pair]pathReading
	var all sync.WaitGroup
	for i, handle := range handles {
		if handle != nil {
			all.Go(func() { nvlinks[i], errs[i] = s.readNVLinks(ctx, i, handle) })
		}
	}
	all.Go(func() { paths = s.readPaths(ctx, handles) })
	all.Wait()
	unread = failingGPUs(paths)
	for i, err := range errs {
		if err != nil {
			unread[i] = err
		}
	}
	return combineLinks(snapshot.Devices, nvlinks, paths, s.opts.Host), unread
}

// nvlink is the remote end of an active NVLink.
type nvlink struct {
	remote   string // PCI address, or empty if the driver does not return it
	toSwitch bool
}

// readNVLinks reads the NVLinks of a GPU until ctx ends.
func (s *Session) readNVLinks(ctx context.Context, index int, dev nvml.Device) ([]nvlink, error) {
	l := s.library
	return ask(ctx, &l.calls, fmt.Sprintf("NVLinks of GPU %d", index), s.tolerated(), func(c *call) ([]nvlink, error) {
		return l.nvlinks(c, dev)
	})
}

func (l *library) nvlinks(c *call, dev nvml.Device) ([]nvlink, error) {
	links := []nvlink{}
	toSwitch := map[string]bool{} // by remote address
	for port := range nvml.NVLINK_MAX_LINKS {
		state, err := invoke(l, c, "nvmlDeviceGetNvLinkState", func() (nvml.EnableState, nvml.Return) {
			return dev.GetNvLinkState(port)
		})
		switch {
		case hasCode(err, nvml.ERROR_INVALID_ARGUMENT): // there are no more ports
			return links, nil
		case isNotSupported(err):
			if port == 0 {
				return links, nil // the GPU has no NVLinks
			}
			continue
		case err != nil:
			return nil, err
		case state != nvml.FEATURE_ENABLED:
			continue
		}
		link, err := l.nvlink(c, dev, port, toSwitch)
		if err != nil {
			return nil, fmt.Errorf("NVLink %d: %w", port, err)
		}
		links = append(links, link)
	}
	return links, nil
}

// nvlink reads the remote end of an active NVLink. For each remote device, it reads only once what kind of device that
// is.
func (l *library) nvlink(c *call, dev nvml.Device, port int, toSwitch map[string]bool) (nvlink, error) {
	pci, err := optional(invoke(l, c, "nvmlDeviceGetNvLinkRemotePciInfo", func() (nvml.PciInfo, nvml.Return) {
		return dev.GetNvLinkRemotePciInfo(port)
	}))
	if err != nil {
		return nvlink{}, err
	}
	remote, err := busID(pci)
	if err != nil {
		remote = "" // some drivers return an empty address if no NVSwitch is visible
	}
	if _, known := toSwitch[remote]; !known || remote == "" {
		const function = "nvmlDeviceGetNvLinkRemoteDeviceType"
		kind, err := invoke(l, c, function, func() (nvml.IntNvLinkDeviceType, nvml.Return) {
			return dev.GetNvLinkRemoteDeviceType(port)
		})
		if _, err := optional(kind, err); err != nil {
			return nvlink{}, err
		}
		toSwitch[remote] = err == nil && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH
	}
	return nvlink{remote: remote, toSwitch: toSwitch[remote]}, nil
}

// pair has the indices of two GPUs, a < b.
type pair struct{ a, b int }

// pathReading is what the driver returned about the PCIe path between two GPUs.
type pathReading struct {
	path gpu.PCIePath
	err  error
}

// errNotRead means that a pair was not read because calls about other pairs hang.
var errNotRead = errors.New("not read in time")

// readPaths reads the PCIe path of each pair of GPUs with handles, as many pairs at a time as there are GPUs. A GPU
// that hangs blocks at most one pair with each other GPU, so all other pairs can still be read.
func (s *Session) readPaths(ctx context.Context, handles []nvml.Device) map[pair]pathReading {
	var mu sync.Mutex
	paths := map[pair]pathReading{}
	turns := make(chan struct{}, len(handles))
	var all sync.WaitGroup
	for b := range handles {
		for a := range b {
			if handles[a] == nil || handles[b] == nil {
				continue
			}
			all.Go(func() {
				turns <- struct{}{}
				got := s.readPath(ctx, pair{a, b}, handles)
				<-turns
				mu.Lock()
				defer mu.Unlock()
				paths[pair{a, b}] = got
			})
		}
	}
	all.Wait()
	return paths
}

func (s *Session) readPath(ctx context.Context, p pair, handles []nvml.Device) pathReading {
	if ctx.Err() != nil {
		return pathReading{err: errNotRead}
	}
	const function = "nvmlDeviceGetTopologyCommonAncestor"
	l, subject := s.library, fmt.Sprintf("GPUs %d and %d", p.a, p.b)
	path, err := ask(ctx, &l.calls, subject, s.tolerated(), func(c *call) (gpu.PCIePath, error) {
		level, err := invoke(l, c, function, func() (nvml.GpuTopologyLevel, nvml.Return) {
			return handles[p.a].GetTopologyCommonAncestor(handles[p.b])
		})
		if err != nil { // an unknown path, for example under a hypervisor, is an answer too
			return optional(gpu.PathUnknown, err)
		}
		return pathOf(level), nil
	})
	return pathReading{path, err}
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

// failingGPUs returns the GPUs that make pairs fail, each with the error of one of its pairs: all pairs of such a GPU
// fail, while pairs of other GPUs succeed. If no pair succeeds, it returns none.
func failingGPUs(paths map[pair]pathReading) map[int]error {
	good := map[int]bool{}
	for p, r := range paths {
		if r.err == nil {
			good[p.a], good[p.b] = true, true
		}
	}
	failing := map[int]error{}
	if len(good) == 0 {
		return failing
	}
	for p, r := range paths {
		for _, i := range []int{p.a, p.b} {
			// Of several errors the first by text counts, so that the result does not depend on the order of the map.
			if !good[i] && (failing[i] == nil || r.err.Error() < failing[i].Error()) {
				failing[i] = r.err
			}
		}
	}
	return failing
}

// combineLinks returns the links of the pairs of GPUs that could be read, in order.
func combineLinks(devices []gpu.Device, nvlinks [][]nvlink, paths map[pair]pathReading, h host.Host) []gpu.Link {
	var links []gpu.Link
	for a := range devices {
		for b := a + 1; b < len(devices); b++ {
			x, y := &devices[a], &devices[b]
			if !x.Usable() || !y.Usable() {
				continue
			}
			link := gpu.Link{A: a, B: b, PCIe: paths[pair{a, b}].path}
			if link.PCIe == gpu.PathUnknown {
				link.PCIe = sysfsPath(h, x, y)
			}
			link.NVLinks, link.Switched = countNVLinks(x.PCIBusID, nvlinks[a], y.PCIBusID, nvlinks[b])
			links = append(links, link)
		}
	}
	return links
}

// countNVLinks counts the NVLinks that join two GPUs: those between the two or, if there are none, those that both
// have to NVSwitches. All NVSwitches of a host form one fabric. A link counts only if it is active at both ends.
func countNVLinks(busA string, a []nvlink, busB string, b []nvlink) (n int, switched bool) {
	count := func(links []nvlink, counts func(nvlink) bool) (n int) {
		for _, l := range links {
			if counts(l) {
				n++
			}
		}
		return n
	}
	toA, toB := func(l nvlink) bool { return l.remote == busA }, func(l nvlink) bool { return l.remote == busB }
	if n := min(count(a, toB), count(b, toA)); n > 0 {
		return n, false
	}
	toSwitch := func(l nvlink) bool { return l.toSwitch }
	n = min(count(a, toSwitch), count(b, toSwitch))
	return n, n > 0
}
