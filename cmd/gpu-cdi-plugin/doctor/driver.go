package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wording"
)

// driverFacts are the driver's kernel modules, files and devices.
type driverFacts struct {
	// loaded is the version of the loaded module, or empty.
	loaded string
	uvm    bool // the module nvidia_uvm is loaded
	// platform says that this kind of host is not supported, or is nil.
	platform error
	// nouveau says that the kernel's own driver is loaded.
	nouveau bool
	// onPCI has the kernel driver of each of NVIDIA's display devices on the bus, by address. It is empty without one.
	onPCI map[string]string
	// files is the installed driver, or nil because of filesErr.
	files    *driver.Driver
	filesErr error
	// devices is what the driver reports, or nil because of devicesErr. Both are nil if it was not asked.
	devices    *gpu.Snapshot
	devicesErr error
	// switches says that the machine has NVSwitches.
	switches bool
	// nodes are the driver's device nodes, by path.
	nodes map[string]nodeFacts
	// nodeMode is the mode that the kernel module wants device nodes to have.
	nodeMode os.FileMode
	// dangling are links beside the driver's libraries that lead nowhere.
	dangling []string
}

func (f *facts) readDriver(ctx context.Context) {
	d := &f.driver
	d.loaded = host.DriverVersion(f.Host)
	d.platform = host.CheckPlatform(f.Host)
	d.uvm = f.exists("/sys/module/nvidia_uvm")
	d.nouveau = f.exists("/sys/module/nouveau")
	f.readPCI()
	d.switches = d.switches || f.exists("/dev/nvidia-nvswitchctl")
	d.files, d.filesErr = driver.Discover(f.Host, d.loaded)
	f.readNodes()
	f.readDangling()
	if d.files != nil && d.loaded != "" && d.files.Check(driver.Utility) == nil {
		d.devices, d.devicesErr = f.Devices(ctx)
	}
}

// readPCI finds the GPUs on the bus, which need no driver, and NVSwitches.
func (f *facts) readPCI() {
	f.driver.onPCI = map[string]string{}
	for _, address := range f.names("/sys/bus/pci/devices") {
		dir := "/sys/bus/pci/devices/" + address
		if host.ReadLine(f.at(dir+"/vendor")) != "0x10de" {
			continue
		}
		switch class := host.ReadLine(f.at(dir + "/class")); {
		case strings.HasPrefix(class, "0x03"): // a display controller
			link, _ := os.Readlink(f.at(dir) + "/driver") // a device without a driver has no such link
			f.driver.onPCI[address] = strings.TrimPrefix(path.Base(link), ".")
		case strings.HasPrefix(class, "0x0680"): // another bridge
			f.driver.switches = true
		}
	}
}

func checkDriver(f *facts) []Finding {
	d := &f.driver
	if d.platform != nil && (d.filesErr != nil || d.loaded == "") {
		return []Finding{newFinding("platform", f.Host.Root(), wording.OneLine(d.platform))}
	}
	if d.filesErr != nil {
		return []Finding{d.checkInstalled(f.Host.DriverRoot())}
	}
	if d.loaded == "" {
		problem := "the kernel module nvidia is not loaded"
		if d.nouveau {
			problem += "; nouveau is, which takes the GPUs"
		}
		return []Finding{newFinding("driver-not-loaded", "nvidia", problem)}
	}
	list := d.checkFiles(f.Capabilities)
	switch {
	case d.devicesErr != nil:
		finding := newFinding("driver-fails", "driver "+d.loaded, wording.OneLine(d.devicesErr))
		list = append(list, finding.fixed(f.Advice(d.devicesErr)))
	case d.devices != nil && len(d.devices.Devices) == 0 && len(d.files.Unreported(d.devices)) == 0:
		list = append(list, newFinding("gpu-none", "driver "+d.loaded, "the driver has no GPU"))
	case d.devices != nil:
		for i := range d.devices.Devices {
			if g := &d.devices.Devices[i]; !g.Usable() {
				list = append(list, newFinding("gpu-unreadable", fmt.Sprintf("GPU %d", g.Index), g.Error))
			}
		}
	}
	return append(append(list, f.checkBus()...), f.checkFabric()...)
}

// readDangling finds links beside the driver's libraries by which programs on the host find them, such as libcuda.so.1,
// and that lead nowhere. Containers get links of their own.
func (f *facts) readDangling() {
	d := &f.driver
	if d.files == nil {
		return
	}
	seen := map[string]bool{}
	for _, library := range d.files.Libraries {
		dir := path.Dir(library.HostPath)
		if seen[dir] {
			continue
		}
		seen[dir] = true
		for _, pattern := range []string{"libcuda*.so*", "libnv*.so*"} {
			links, _ := filepath.Glob(filepath.Join(dir, pattern)) // the patterns are right
			for _, link := range links {
				if _, err := os.Stat(link); errors.Is(err, fs.ErrNotExist) {
					d.dangling = append(d.dangling, link)
				}
			}
		}
	}
}

// checkBus finds GPUs on the bus that the driver does not have. The indices of the others may have moved.
func (f *facts) checkBus() []Finding {
	var list []Finding
	for _, address := range sortedKeys(f.driver.onPCI) {
		switch has := f.driver.onPCI[address]; has {
		case "nvidia":
		case "vfio-pci":
			problem := "vfio-pci has the GPU, so that a virtual machine can have it, and this host cannot use it"
			finding := newFinding("gpu-unbound", address, problem).fixed(
				"nothing, if that is meant; otherwise remove its ID from the options of vfio-pci, and boot again")
			finding.Severity = Note
			list = append(list, finding)
		case "":
			list = append(list, newFinding("gpu-unbound", address, "the GPU has no kernel driver"))
		default:
			list = append(list, newFinding("gpu-unbound", address, "the kernel driver "+has+" has the GPU"))
		}
	}
	return list
}

// checkInstalled returns the finding about a driver whose files cannot be used.
func (d *driverFacts) checkInstalled(root string) Finding {
	problem := wording.OneLine(d.filesErr)
	switch {
	case errors.Is(d.filesErr, driver.ErrOtherVersion):
		return newFinding("driver-version", "driver "+d.loaded, problem)
	case errors.Is(d.filesErr, driver.ErrDamaged):
		return newFinding("driver-damaged", root, problem)
	case d.loaded != "":
		return newFinding("driver-missing", root, "the kernel module "+d.loaded+" is loaded, but: "+problem)
	case len(d.onPCI) == 0:
		return newFinding("gpu-none", root, "no NVIDIA GPU is on the PCI bus, and "+problem).fixed(
			"put a GPU into this host, or pass one through to it if it is a virtual machine, then install the NVIDIA driver")
	}
	return newFinding("driver-missing", root, problem)
}

// checkFiles returns findings about files that containers lack. Device nodes are another subject.
func (d *driverFacts) checkFiles(c driver.Capabilities) []Finding {
	var list []Finding
	if err := d.files.Check(c); err != nil && !errors.Is(err, driver.ErrNoControl) {
		list = append(list, newFinding("driver-damaged", "driver "+d.files.Version, wording.OneLine(err)))
	}
	for _, found := range d.files.Explain(c) {
		if found.Kind == driver.KindNode || found.Kind == driver.KindDevice || !found.Broken && found.Missing == "" {
			continue
		}
		text, advice := found.Lack()
		finding := newFinding("driver-files", found.Name, text).fixed(advice)
		list = append(list, finding)
	}
	for _, link := range d.dangling {
		list = append(list, newFinding("driver-link", link, "the link leads nowhere"))
	}
	if len(list) > 1 && list[0].ID == "driver-damaged" { // the same file again
		return list[:1]
	}
	return list
}

// services are what a machine with NVSwitches needs, with the names of their processes.
var services = []struct{ name, process, id string }{
	{"nvidia-fabricmanager", "nv-fabricmanage", "fabricmanager-missing"},
	{"nvidia-persistenced", "nvidia-persiste", "persistenced-missing"},
}

// checkFabric checks the services that a machine with NVSwitches needs. They may run in a container, beside the driver.
func (f *facts) checkFabric() []Finding {
	if !f.driver.switches {
		return nil
	}
	var list []Finding
	for _, service := range services {
		socket := service.name + "/socket"
		if f.driver.hasFile(socket) || f.exists("/run/"+socket) || f.processes[service.process] != 0 {
			continue
		}
		problem := "the machine has NVSwitches, and /run/" + socket + " does not exist"
		finding := newFinding(service.id, service.name, problem)
		if f.processes == nil {
			finding.Severity = Note
			finding.Problem += "; whether its process runs is unknown"
		}
		list = append(list, finding)
	}
	return list
}

// hasFile reports whether the driver's installation has a file.
func (d *driverFacts) hasFile(name string) bool {
	isUsed := func(found driver.Finding) bool { return found.Name == name && found.Used }
	return slices.ContainsFunc(d.files.Findings, isUsed)
}
