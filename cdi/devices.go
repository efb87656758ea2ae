package cdi

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
)

// nodePermissions are what the device cgroup allows: all but mknod, since the engine makes the nodes.
const nodePermissions = "rw"

// generator collects the devices of a spec.
type generator struct {
	driver   *Driver
	options  Options
	nodes    map[string]Node // of the driver, by path in the container
	offers   []offer
	taken    map[string]string // names of devices, and whose they are
	drm      map[string]bool   // PCI addresses of the GPUs that are given with their DRM nodes
	findings []Finding
}

// offer is a device with all its names.
type offer struct {
	names []string
	nodes []Node
}

func newGenerator(d *Driver, o Options) *generator {
	g := &generator{
		driver: d, options: o,
		nodes: map[string]Node{}, taken: map[string]string{}, drm: map[string]bool{},
	}
	for _, n := range d.Nodes {
		g.nodes[n.Path] = n
	}
	return g
}

// addGPU offers a GPU, or its MIG devices, or says why not.
func (g *generator) addGPU(d *gpu.Device) {
	what := "GPU " + strconv.Itoa(d.Index)
	switch {
	case !d.Usable():
		g.leaveOut(what, "cannot be read: "+d.Error)
	case d.MIGEnabled && len(d.MIG) == 0:
		g.leaveOut(what, "MIG is enabled and it has no MIG device")
	case d.MIGEnabled:
		for i := range d.MIG {
			g.addMIG(d, &d.MIG[i])
		}
	default:
		nodes, err := g.need("nvidia" + strconv.Itoa(d.Minor))
		g.add(what, []string{strconv.Itoa(d.Index), d.UUID}, d, nodes, true, err)
	}
}

func (g *generator) addMIG(d *gpu.Device, m *gpu.MIGDevice) {
	what := fmt.Sprintf("MIG device %d:%d (%s)", d.Index, m.Index, m.Profile)
	if m.GPUInstanceCap == gpu.NoMinor || m.ComputeInstanceCap == gpu.NoMinor {
		g.leaveOut(what, "the minor numbers of its nodes in /dev/nvidia-caps are not known")
		return
	}
	nodes, err := g.need(
		"nvidia"+strconv.Itoa(d.Minor),
		"nvidia-caps/nvidia-cap"+strconv.Itoa(m.GPUInstanceCap),
		"nvidia-caps/nvidia-cap"+strconv.Itoa(m.ComputeInstanceCap),
	)
	names := []string{fmt.Sprintf("%d:%d", d.Index, m.Index), m.UUID}
	g.add(what, names, d, nodes, hasGraphics(m.Profile), err)
}

// hasGraphics reports whether the attributes of a MIG profile, "1g.24gb+me,gfx", have graphics.
func hasGraphics(profile string) bool {
	_, attributes, _ := strings.Cut(profile, "+")
	return slices.Contains(strings.FieldsFunc(attributes, func(r rune) bool { return r == '+' || r == ',' || r == '.' }),
		graphicsAttribute)
}

// need is the nodes of those names under /dev, or the error of the first that is not there.
func (g *generator) need(names ...string) ([]Node, error) {
	var nodes []Node
	for _, name := range names {
		n, ok := g.nodes[path.Join("/dev", name)]
		if !ok {
			return nil, fmt.Errorf("no device node /dev/%s", name)
		}
		nodes = append(nodes, n)
	}
	return nodes, nil
}

// add offers a device unless something speaks against it.
func (g *generator) add(what string, names []string, d *gpu.Device, nodes []Node, graphics bool, err error) {
	if err == nil {
		err = g.checkNames(names)
	}
	if err != nil {
		g.leaveOut(what, err.Error())
		return
	}
	for _, name := range names {
		g.taken[name] = what
	}
	if drm := g.driver.DRM[d.PCIBusID]; graphics && len(drm) > 0 && g.options.Capabilities.serves(usesDRM) {
		nodes = append(nodes, drm...)
		g.drm[d.PCIBusID] = true
	}
	g.offers = append(g.offers, offer{names, nodes})
	g.findings = append(g.findings, Finding{Name: what, Kind: KindDevice, Path: nodes[0].HostPath, Used: true})
}

func (g *generator) checkNames(names []string) error {
	for _, name := range names {
		if err := parser.ValidateDeviceName(name); err != nil {
			return fmt.Errorf("its name %q cannot be used: %w", name, err)
		}
		if other, ok := g.taken[name]; ok {
			return fmt.Errorf("its name %s is that of %s", name, other)
		}
	}
	return nil
}

func (g *generator) leaveOut(what, why string) {
	g.findings = append(g.findings, Finding{Name: what, Kind: KindDevice, Note: why})
}

// devices are the devices of the spec: each name of each offer, then all of them as one.
func (g *generator) devices() []specs.Device {
	var list []specs.Device
	all := map[string]Node{}
	for _, o := range g.offers {
		for _, n := range o.nodes {
			all[n.Path] = n
		}
		for _, name := range o.names {
			list = append(list, specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{DeviceNodes: deviceNodes(o.nodes)}})
		}
	}
	nodes := slices.Collect(maps.Values(all))
	return append(list, specs.Device{
		Name: AllDevices, ContainerEdits: specs.ContainerEdits{DeviceNodes: deviceNodes(nodes)},
	})
}

// deviceNodes are the nodes sorted by path. Device numbers are not among their attributes: those of nvidia-uvm and
// nvidia-caps are dynamic, and a spec that holds them is wrong after a reboot.
func deviceNodes(nodes []Node) []*specs.DeviceNode {
	nodes = slices.Clone(nodes)
	slices.SortStableFunc(nodes, func(a, b Node) int { return strings.Compare(a.Path, b.Path) })
	var list []*specs.DeviceNode
	for _, n := range nodes {
		dn := &specs.DeviceNode{Path: n.Path, Permissions: nodePermissions, FileMode: n.containerMode()}
		if n.HostPath != n.Path {
			dn.HostPath = n.HostPath
		}
		list = append(list, dn)
	}
	return list
}

// containerMode is the mode of a node in the container if it must not be the host's.
//
// DRM nodes are for groups of the host ("video", "render") that a container does not have. Who was given the GPU may
// use them, as whatever user: the device cgroup is what grants or denies. Other than by an additional group this works
// with readers of CDI 0.5.0, such as podman 4.
func (n Node) containerMode() *fs.FileMode {
	const all = fs.FileMode(0o666)
	if n.Capabilities != usesDRM || n.Mode&all == all {
		return nil
	}
	return new(all)
}
