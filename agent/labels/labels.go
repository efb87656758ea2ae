// Package labels has the labels of a node with GPUs, under the names and with the values of NVIDIA's
// gpu-feature-discovery, and writes them for the worker of node feature discovery (NFD), which sets them.
//
// Labels say what a node has and offers, never whether it is healthy: a pod that waits for a repaired GPU must not lose
// its node.
package labels

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
)

// Node is what the labels depend on.
type Node struct {
	Snapshot *gpu.Snapshot
	// Resources are what Config offers of the snapshot's devices.
	Resources []resource.Resource
	Config    resource.Config
	// Machine is the machine's product name, or empty if unknown.
	Machine string
}

const (
	vendor      = "nvidia.com/"
	fullGPU     = "gpu"
	unknown     = "unknown"
	maxValue    = 63 // of Kubernetes, for values and for the name in a key
	longestName = ".sharing-strategy"
)

// labels are the labels by name.
type labels map[string]string

// Labels returns the labels of a node. A node without GPUs, or with none that the configuration selects, has no labels.
func (n *Node) Labels() map[string]string {
	l := labels{}
	gpus := n.gpus()
	if len(gpus) == 0 {
		return l
	}
	l.set("gpu.machine", sanitise(n.Machine), unknown)
	l.set("gpu.mode", modeOf(gpus))
	l.setVersions(n.Snapshot)
	capable := slices.ContainsFunc(gpus, func(d *gpu.Device) bool { return d.MIGCapable })
	l.set("mig.capable", capable)
	l.set("mps.capable", slices.ContainsFunc(n.Resources, func(r resource.Resource) bool {
		return slices.ContainsFunc(r.Devices, func(d resource.Device) bool { return d.MPS != nil })
	}))
	l.setKnown("gpu.clique", cliqueOf(gpus))
	n.setGPU(l, gpus)
	switch n.Config.MIGStrategy {
	case resource.MIGSingle:
		n.setSingle(l, gpus)
	case resource.MIGMixed:
		n.setMixed(l, gpus)
	case resource.MIGNone:
	}
	return l
}

// gpus returns the GPUs that the configuration selects, healthy or not, and also those in MIG mode that it does not
// offer.
func (n *Node) gpus() []*gpu.Device {
	var list []*gpu.Device
	for i := range n.Snapshot.Devices {
		if d := &n.Snapshot.Devices[i]; n.Config.GPUs.Selects(d) {
			list = append(list, d)
		}
	}
	return list
}

// setVersions sets the versions of the driver and of CUDA, also under their older names.
func (l labels) setVersions(s *gpu.Snapshot) {
	parts := strings.SplitN(s.DriverVersion, ".", 3)
	parts = append(parts, "", "")
	for i, names := range [][2]string{{"major", "major"}, {"minor", "minor"}, {"rev", "revision"}} {
		l.set("cuda.driver."+names[0], parts[i])
		l.set("cuda.driver-version."+names[1], parts[i])
	}
	l.set("cuda.driver-version.full", s.DriverVersion)
	major, minor, known := strings.Cut(s.CUDAVersion, ".")
	if !known {
		return
	}
	for name, value := range map[string]string{"major": major, "minor": minor} {
		l.set("cuda.runtime."+name, value)
		l.set("cuda.runtime-version."+name, value)
	}
	l.set("cuda.runtime-version.full", s.CUDAVersion)
}

// setGPU sets the labels of whole GPUs. If there are several products, they are those of the most frequent one.
func (n *Node) setGPU(l labels, gpus []*gpu.Device) {
	counts := map[string]int{}
	for _, d := range gpus {
		counts[d.Name]++
	}
	one := slices.MaxFunc(gpus, func(a, b *gpu.Device) int { return counts[a.Name] - counts[b.Name] })
	l.set("gpu.count", counts[one.Name])
	of := n.sharingOf(func(d *resource.Device) bool { return d.MIGIndex == resource.NoMIG && d.Model == one.Name })
	l.setOffered(fullGPU, one.Name, "", of)
	for _, d := range gpus { // an unreadable GPU may have no such properties
		if d.Name != one.Name {
			continue
		}
		if d.MemoryBytes > 0 {
			l.set("gpu.memory", d.MemoryBytes>>20)
		}
		if major, minor, known := strings.Cut(d.ComputeCapability, "."); known {
			l.set("gpu.compute.major", major)
			l.set("gpu.compute.minor", minor)
			l.set("gpu.family", familyOf(d))
		}
	}
}

// setSingle sets the labels of MIG devices that are offered as GPUs, in place of those of whole GPUs.
func (n *Node) setSingle(l labels, gpus []*gpu.Device) {
	l.set("mig.strategy", resource.MIGSingle)
	inMIGMode := slices.IndexFunc(gpus, func(d *gpu.Device) bool { return d.MIGEnabled })
	profiles := profilesOf(gpus)
	whole := slices.ContainsFunc(gpus, func(d *gpu.Device) bool { return d.Usable() && !d.MIGEnabled })
	switch {
	case inMIGMode < 0, whole && len(profiles) == 0: // GPUs without a MIG device are not offered
	case len(profiles) == 1 && !whole:
		n.setProfile(l, fullGPU, &profiles[0])
	default: // no device can be allocated
		l.setOffered(fullGPU, gpus[inMIGMode].Name, "-MIG-INVALID", sharing{})
		l.set("gpu.count", 0)
		l.set("gpu.memory", 0)
		l.set("gpu.sharing-strategy", "")
	}
}

// setMixed sets the labels of each profile of MIG devices.
func (n *Node) setMixed(l labels, gpus []*gpu.Device) {
	l.set("mig.strategy", resource.MIGMixed)
	profiles := profilesOf(gpus)
	for i := range profiles {
		n.setProfile(l, "mig-"+profiles[i].name, &profiles[i])
	}
}

// profile are the MIG devices of one profile.
type profile struct {
	name  string // as it is in labels
	model string // of the GPU of the first device
	first *gpu.MIGDevice
	count int
}

// profilesOf returns the profiles of the MIG devices of GPUs.
func profilesOf(gpus []*gpu.Device) []profile {
	var list []profile
	for _, d := range gpus {
		for i := range d.MIG {
			m := &d.MIG[i]
			at := slices.IndexFunc(list, func(p profile) bool { return p.first.Profile == m.Profile })
			if at < 0 {
				at = len(list)
				name := sanitise(strings.NewReplacer("+", ".", ",", ".").Replace(m.Profile))
				list = append(list, profile{name: name, model: d.Name, first: m})
			}
			list[at].count++
		}
	}
	return list
}

func (n *Node) setProfile(l labels, name string, p *profile) {
	if len(name+longestName) > maxValue {
		return
	}
	of := n.sharingOf(func(d *resource.Device) bool {
		return d.MIGIndex != resource.NoMIG && d.Profile == p.first.Profile
	})
	l.setOffered(name, p.model, "-MIG-"+p.name, of)
	a := &p.first.Attributes
	for suffix, value := range map[string]int{
		"count": p.count, "multiprocessors": a.Multiprocessors, "slices.gi": a.GPUSlices, "slices.ci": a.ComputeSlices,
		"engines.copy": a.CopyEngines, "engines.decoder": a.Decoders, "engines.encoder": a.Encoders,
		"engines.jpeg": a.JPEGEngines, "engines.ofa": a.OFAEngines,
	} {
		l.set(name+"."+suffix, value)
	}
	l.set(name+".memory", p.first.MemoryBytes>>20)
}

// sharing says how devices are shared.
type sharing struct {
	replicas int // of each device: 0 if none is offered, 1 if they are not shared
	strategy string
	suffix   string // of the product
}

// sharingOf says how the offered devices are shared for which `matches` returns true. If they differ, those count that
// are not shared, and otherwise the first one. Shared devices have a suffix if their resource has the name of unshared
// ones.
func (n *Node) sharingOf(matches func(*resource.Device) bool) sharing {
	found := sharing{}
	for i := range n.Resources {
		r := &n.Resources[i]
		for j := range r.Devices {
			d := &r.Devices[j]
			switch {
			case !matches(d):
			case !d.Shared():
				return sharing{replicas: 1}
			case found.replicas == 0:
				found = n.sharingIn(r, d)
			}
		}
	}
	return found
}

func (n *Node) sharingIn(r *resource.Resource, of *resource.Device) sharing {
	s := sharing{strategy: "time-slicing"}
	if of.MPS != nil {
		s.strategy = "mps"
	}
	for i := range r.Devices {
		if r.Devices[i].UUID == of.UUID {
			s.replicas++
		}
	}
	rules := slices.Concat(n.Config.Sharing.TimeSlicing.Resources, n.Config.Sharing.MPS.Resources)
	if slices.ContainsFunc(rules, func(rule resource.SharingRule) bool { return rule.Name == r.Name }) {
		s.suffix = "-SHARED"
	}
	return s
}

// setOffered sets the product with a suffix, and how it is shared. A product whose name is too long loses its end, and
// no suffix.
func (l labels) setOffered(name, model, suffix string, s sharing) {
	if model = sanitise(model); model != "" {
		suffix += s.suffix
		l.set(name+".product", model[:min(len(model), max(0, maxValue-len(suffix)))]+suffix)
	}
	l.set(name+".replicas", s.replicas)
	l.set(name+".sharing-strategy", s.strategy, "none")
}

// set sets a label to the first value that is not empty.
func (l labels) set(name string, values ...any) {
	text := ""
	for _, v := range values {
		if text == "" {
			text = sanitise(fmt.Sprint(v))
		}
	}
	text = text[:min(len(text), maxValue)]
	l[vendor+name] = strings.Trim(text, "-_.")
}

// setKnown sets a label unless its value is empty.
func (l labels) setKnown(name, value string) {
	if value != "" {
		l.set(name, value)
	}
}

var unwanted = regexp.MustCompile(`[^A-Za-z0-9-_. ]`)

// sanitise returns a text without the characters that the values of labels cannot have, and with hyphens for spaces.
func sanitise(text string) string {
	return strings.Join(strings.Fields(unwanted.ReplaceAllString(text, "")), "-")
}

// modeOf returns what GPUs are for by their PCI class, if all have the same.
func modeOf(gpus []*gpu.Device) string {
	class := gpus[0].PCIClass
	for _, d := range gpus {
		if d.PCIClass != class {
			return unknown
		}
	}
	switch class {
	case "0x030000":
		return "graphics"
	case "0x030200":
		return "compute"
	}
	return unknown
}

// cliqueOf returns the clique of the GPUs that have one, if all of these have the same.
func cliqueOf(gpus []*gpu.Device) string {
	clique := ""
	for _, d := range gpus {
		switch {
		case d.FabricClique == "", d.FabricClique == clique:
		case clique != "":
			return ""
		default:
			clique = d.FabricClique
		}
	}
	return clique
}

// familyOf returns the name of a GPU's architecture as in gpu-feature-discovery, such as "ada-lovelace".
func familyOf(d *gpu.Device) string {
	name := cmp.Or(d.Architecture(), "undefined")
	return strings.ToLower(strings.ReplaceAll(name, " ", "-"))
}
