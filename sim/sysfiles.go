package sim

import (
	"encoding/binary"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
)

// pciDevice is a device on the PCI bus as in sysfs.
type pciDevice struct {
	bus           string
	id, subsystem uint32 // device in the upper, vendor in the lower 16 bits
	class         uint32
	numa          int
	driver        string
	boot          bool
	cpus, irq     string
}

// sysFiles plans /sys: the devices below their bridges, and the links to them by address.
func sysFiles(m *Machine) plan {
	p := plan{}
	for i := range m.GPUs {
		p.addGPU(m, &m.GPUs[i], i)
	}
	for _, bus := range m.NVSwitches {
		d := pciDevice{bus: bus, id: switchID(m), subsystem: switchID(m), class: 0x068000, driver: "nvidia-nvswitch"}
		d.cpus = m.CPUs[0]
		p.addPCI("sys/devices/pci"+bus[:5]+"00/"+bus, d)
	}
	for node, cpus := range m.CPUs {
		p.file(fmt.Sprintf("sys/devices/system/node/node%d/cpulist", node), cpus+"\n")
	}
	return p
}

// cpusWithoutNUMA are the CPUs of a machine that has no NUMA nodes.
const cpusWithoutNUMA = "0-31"

// maxCPU is the largest number of a CPU in Linux.
const maxCPU = 8191

// cpusOf returns the numbers of the machine's CPUs, ascending. Parts of a list that are no numbers are left out.
func cpusOf(m *Machine) []int {
	lists := slices.Collect(maps.Values(m.CPUs))
	if len(lists) == 0 {
		lists = []string{cpusWithoutNUMA}
	}
	var all []int
	for part := range strings.SplitSeq(strings.Join(lists, ","), ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, fromErr := strconv.Atoi(first)
		to, toErr := strconv.Atoi(last)
		if fromErr != nil || toErr != nil {
			continue
		}
		for cpu := from; cpu <= min(to, maxCPU); cpu++ {
			all = append(all, cpu)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// addGPU plans a GPU and the bridges above it.
func (p plan) addGPU(m *Machine, g *GPU, i int) {
	cpus, ok := m.CPUs[g.NUMANode]
	if !ok {
		cpus = cpusWithoutNUMA
	}
	dir := "sys/devices/" + g.Upstream[0]
	for _, bridge := range g.Upstream[1:] {
		dir += "/" + bridge
		p.addPCI(dir, pciDevice{
			bus: bridge, id: 0xc0101000, subsystem: 0xa0961000, class: 0x060400, numa: g.NUMANode,
			driver: "pcieport", cpus: cpus,
		})
	}
	dir += "/" + g.Bus
	p.addPCI(dir, pciDevice{
		bus: g.Bus, id: g.Device, subsystem: g.Subsystem, class: g.Class, numa: g.NUMANode, driver: "nvidia",
		cpus: cpus, boot: g.Class == 0x030000 && i == 0, irq: fmt.Sprint(100 + i),
	})
	for _, name := range []string{g.Card, g.Render} {
		drm := path.Join(dir, "drm", name)
		p.file(drm+"/dev", fmt.Sprintf("%d:%d\n", majorDRM, driMinor(name)))
		p.file(drm+"/uevent", fmt.Sprintf("MAJOR=%d\nMINOR=%d\nDEVNAME=dri/%s\nDEVTYPE=drm_minor\n",
			majorDRM, driMinor(name), name))
		p.link("sys/class/drm/"+name, relative("sys/class/drm", drm))
	}
}

func (p plan) addPCI(dir string, d pciDevice) {
	text := func(name, format string, args ...any) { p.file(dir+"/"+name, fmt.Sprintf(format+"\n", args...)) }
	text("vendor", "0x%04x", d.id&0xffff)
	text("device", "0x%04x", d.id>>16)
	text("subsystem_vendor", "0x%04x", d.subsystem&0xffff)
	text("subsystem_device", "0x%04x", d.subsystem>>16)
	text("class", "0x%06x", d.class)
	text("revision", "0xa1")
	text("numa_node", "%d", d.numa)
	text("local_cpulist", "%s", d.cpus)
	text("enable", "1")
	if d.irq != "" {
		text("irq", "%s", d.irq)
		text("boot_vga", "%d", map[bool]int{true: 1}[d.boot])
		text("reset_method", "flr bus")
		p[dir+"/reset"] = entry{mode: 0o200}
	}
	text("uevent", "DRIVER=%s\nPCI_CLASS=%X\nPCI_ID=%04X:%04X\nPCI_SUBSYS_ID=%04X:%04X\nPCI_SLOT_NAME=%s",
		d.driver, d.class, d.id&0xffff, d.id>>16, d.subsystem&0xffff, d.subsystem>>16, d.bus)
	text("resource", "%s", strings.TrimSuffix(strings.Repeat(
		"0x0000000000000000 0x0000000000000000 0x0000000000000000\n", 13), "\n"))
	p[dir+"/config"] = entry{mode: 0o644, data: d.config()}
	driver := "sys/bus/pci/drivers/" + d.driver
	p.link(driver+"/"+d.bus, relative(driver, dir))
	p.link(dir+"/driver", relative(dir, driver))
	p.link("sys/bus/pci/devices/"+d.bus, relative("sys/bus/pci/devices", dir))
}

// config returns the PCI configuration space with the device's ids (PCI Local Bus Specification 3.0, section 6.1).
func (d *pciDevice) config() []byte {
	c := make([]byte, 256)
	binary.LittleEndian.PutUint16(c[0x00:], uint16(d.id))
	binary.LittleEndian.PutUint16(c[0x02:], uint16(d.id>>16))
	binary.LittleEndian.PutUint32(c[0x08:], d.class<<8|0xa1)
	binary.LittleEndian.PutUint16(c[0x2c:], uint16(d.subsystem))
	binary.LittleEndian.PutUint16(c[0x2e:], uint16(d.subsystem>>16))
	return c
}

// switchID returns the PCI id of the NVSwitches for the machine's GPUs, from the PCI ID repository.
func switchID(m *Machine) uint32 {
	switch m.GPUs[0].Architecture {
	case "volta":
		return 0x1ac210de
	case "ampere":
		return 0x1af110de
	case "hopper":
		return 0x22a310de
	default:
		return 0x290110de
	}
}

// relative returns the target of a symlink in dir that leads to a path. Both are relative to the root.
func relative(dir, to string) string {
	return strings.Repeat("../", strings.Count(dir, "/")+1) + to
}
