package sim

import (
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Major numbers of the device nodes. 10, 195, 226 and 231 are assigned (Documentation/admin-guide/devices.txt in the
// kernel); the kernel allocates the others when a module is loaded, from 511 downwards.
const (
	majorMisc       = 10
	majorNVIDIA     = 195
	majorDRM        = 226
	majorInfiniBand = 231
	majorUVM        = 511
	majorCaps       = 510
	majorIMEX       = 509
	majorNVSwitch   = 508
	majorNVLink     = 507
	majorGDS        = 506
	majorGDRCopy    = 505
)

// Groups of the DRM nodes, as Debian numbers them.
const (
	groupVideo  = 44
	groupRender = 106
)

// deviceNodes plans /dev.
func deviceNodes(m *Machine) plan {
	p := plan{}
	p.node("dev/nvidiactl", majorNVIDIA, 255, 0o666)
	p.node("dev/nvidia-modeset", majorNVIDIA, 254, 0o666)
	p.node("dev/nvidia-uvm", majorUVM, 0, 0o666)
	p.node("dev/nvidia-uvm-tools", majorUVM, 1, 0o666)
	p.node(capPath(capConfig), majorCaps, capConfig, 0o400)
	p.node(capPath(capMonitor), majorCaps, capMonitor, 0o444)
	for i := range m.GPUs {
		g := &m.GPUs[i]
		p.node("dev/nvidia"+strconv.Itoa(g.Minor), majorNVIDIA, uint32(g.Minor), 0o666)
		p.dri(g.Card, groupVideo)
		p.dri(g.Render, groupRender)
		p.link("dev/dri/by-path/pci-"+g.Bus+"-card", "../"+g.Card)
		p.link("dev/dri/by-path/pci-"+g.Bus+"-render", "../"+g.Render)
	}
	if hasNVSwitch(m) {
		p.node("dev/nvidia-nvlink", majorNVLink, 0, 0o666)
		p.node("dev/nvidia-nvswitchctl", majorNVSwitch, 255, 0o666)
	}
	for i := range m.NVSwitches {
		p.node("dev/nvidia-nvswitch"+strconv.Itoa(i), majorNVSwitch, uint32(i), 0o666)
	}
	return p
}

// dri plans a device node of the direct rendering manager. Its minor number is the number at the end of its name.
func (p plan) dri(name string, gid int) {
	path := "dev/dri/" + name
	p.node(path, majorDRM, driMinor(name), 0o660)
	e := p[path]
	e.gid = gid
	p[path] = e
}

func driMinor(name string) uint32 {
	n, _ := strconv.Atoi(strings.TrimLeft(name, "cardenD")) // every name ends in a number
	return uint32(n)
}

func capPath(minor int) string { return "dev/nvidia-caps/nvidia-cap" + strconv.Itoa(minor) }

// migNodes plans the files in /dev and /proc for the MIG instances of one GPU.
func migNodes(g *GPU) plan {
	p := plan{}
	for _, d := range g.MIG {
		for path, minor := range map[string]int{
			fmt.Sprintf("gi%d/access", d.GPUInstance):                         d.GPUInstanceCap,
			fmt.Sprintf("gi%d/ci%d/access", d.GPUInstance, d.ComputeInstance): d.ComputeInstanceCap,
		} {
			p.node(capPath(minor), majorCaps, uint32(minor), 0o444)
			p.capability(fmt.Sprintf("gpu%d/mig/%s", g.Minor, path), minor, 0o444)
		}
	}
	return p
}

// capability plans the /proc file and the device node of a capability.
func (p plan) capability(name string, minor int, mode fs.FileMode) {
	p.file("proc/driver/nvidia/capabilities/"+name,
		fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: %d\nDeviceFileModify: 1\n", minor, mode))
}

// migMinors returns /proc/driver/nvidia-caps/mig-minors. It lists all possible instances.
func migMinors() string {
	var b strings.Builder
	fmt.Fprintf(&b, "config %d\nmonitor %d\n", capConfig, capMonitor)
	for gpu := range capGPUs {
		for gi := range capGPUInstances {
			fmt.Fprintf(&b, "gpu%d/gi%d/access %d\n", gpu, gi, gpuInstanceCap(gpu, gi))
			for ci := range capComputeInstances {
				fmt.Fprintf(&b, "gpu%d/gi%d/ci%d/access %d\n", gpu, gi, ci, computeInstanceCap(gpu, gi, ci))
			}
		}
	}
	return b.String()
}

const (
	uverbsMinor      = 192 // for the user-space verbs of the first InfiniBand adapter
	rdmaCMMinor      = 58  // dynamic, like those of most misc devices
	infiniBandCount  = 2
	imexChannelCount = 2
)

// extras are the devices that a node may have besides its GPUs. NVSwitches belong to the machine.
var extras = map[string]func(plan){
	"gdrcopy": func(p plan) { p.node("dev/gdrdrv", majorGDRCopy, 0, 0o666) },
	"gds": func(p plan) {
		for i := range 16 {
			p.node("dev/nvidia-fs"+strconv.Itoa(i), majorGDS, uint32(i), 0o666)
		}
		p.dir("run/udev/data")
		p.file("etc/cufile.json", "{\"properties\": {\"use_compat_mode\": true}}\n")
	},
	"imex": func(p plan) {
		for i := range imexChannelCount {
			p.node("dev/nvidia-caps-imex-channels/channel"+strconv.Itoa(i), majorIMEX, uint32(i), 0o666)
		}
	},
	"mofed": func(p plan) {
		for i := range infiniBandCount {
			p.node("dev/infiniband/uverbs"+strconv.Itoa(i), majorInfiniBand, uverbsMinor+uint32(i), 0o666)
		}
		p.node("dev/infiniband/rdma_cm", majorMisc, rdmaCMMinor, 0o666)
	},
}

// Extras returns the values for Options.Extras: "gdrcopy", "gds", "imex", "mofed".
func Extras() []string { return slices.Sorted(maps.Keys(extras)) }

func checkExtras(names []string) error {
	for _, name := range names {
		if extras[name] == nil {
			return invalid("unknown extra %q; known are %s", name, strings.Join(Extras(), ", "))
		}
	}
	return nil
}

func extraFiles(names []string) plan {
	p := plan{}
	for _, name := range names {
		extras[name](p)
	}
	return p
}
