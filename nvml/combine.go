package nvml

import (
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// blame finds the GPUs that failing pairs are owed to, with an error of theirs: those that were answered for in no
// pair, while other pairs were answered. Where that tells nothing (of two GPUs, or if all pairs fail) nobody is
// blamed, and the path is unknown.
func blame(answers map[pair]pathAnswer) map[int]error {
	answered := map[int]bool{}
	anyone := false
	for p, a := range answers {
		if a.err == nil {
			answered[p.a], answered[p.b], anyone = true, true, true
		}
	}
	blamed := map[int]error{}
	if !anyone {
		return blamed
	}
	for p, a := range answers {
		for _, i := range []int{p.a, p.b} {
			if !answered[i] {
				blamed[i] = firstError(blamed[i], a.err)
			}
		}
	}
	return blamed
}

// firstError makes the choice between errors not depend on the order in which they are met.
func firstError(a, b error) error {
	if a == nil || b.Error() < a.Error() {
		return b
	}
	return a
}

// combineLinks makes the link of each pair of GPUs that could be read, in order. A path that the driver does not say is
// taken from sysfs.
func combineLinks(devices []gpu.Device, nvlinks [][]nvlink, paths map[pair]pathAnswer, h host.Host) []gpu.Link {
	var links []gpu.Link
	for a := range devices {
		for b := a + 1; b < len(devices); b++ {
			if !devices[a].Usable() || !devices[b].Usable() {
				continue
			}
			link := gpu.Link{A: a, B: b, PCIe: paths[pair{a, b}].path}
			if link.PCIe == gpu.PathUnknown {
				link.PCIe = sysfsPath(h, &devices[a], &devices[b])
			}
			link.NVLinks, link.Switched = joined(end{devices[a].PCIBusID, nvlinks[a]}, end{devices[b].PCIBusID, nvlinks[b]})
			links = append(links, link)
		}
	}
	return links
}

// end is a GPU of a link: its PCI address and its NVLinks.
type end struct {
	bus     string
	nvlinks []nvlink
}

// joined counts the NVLinks that join two GPUs: those that lead from one to the other, and where there are none, those
// that both have to NVSwitches, all of which are one fabric in a node. A link counts if both ends are active.
func joined(a, b end) (count int, switched bool) {
	if n := min(a.linksTo(b.bus), b.linksTo(a.bus)); n > 0 {
		return n, false
	}
	n := min(a.linksToSwitches(), b.linksToSwitches())
	return n, n > 0
}

func (e end) linksTo(bus string) int {
	n := 0
	for _, l := range e.nvlinks {
		if l.remote == bus {
			n++
		}
	}
	return n
}

func (e end) linksToSwitches() int {
	n := 0
	for _, l := range e.nvlinks {
		if l.toSwitch {
			n++
		}
	}
	return n
}
