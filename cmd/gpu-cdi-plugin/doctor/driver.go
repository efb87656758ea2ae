package doctor

import (
	"context"
	"errors"
	"fmt"
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
	// nouveau says that the kernel's own driver is loaded.
	nouveau bool
	// onPCI is the number of NVIDIA's display devices on the bus.
	onPCI int
	// files is the installed driver, or nil because of filesErr.
	files    *driver.Driver
	filesErr error
	// devices is what the driver reports, or nil because of devicesErr. Both are nil if it was not asked.
	devices    *gpu.Snapshot
	devicesErr error
	// switches says that the machine has NVSwitches.
	switches bool
	// nodes are the numbers of the driver's device nodes, by path.
	nodes map[string]nodeFacts
}

func (f *facts) readDriver(ctx context.Context) {
	d := &f.driver
	d.loaded = host.DriverVersion(f.Host)
	d.uvm = f.exists("/sys/module/nvidia_uvm")
	d.nouveau = f.exists("/sys/module/nouveau")
	f.readPCI()
	d.switches = d.switches || f.exists("/dev/nvidia-nvswitchctl")
	d.files, d.filesErr = driver.Discover(f.Host, d.loaded)
	f.readNodes()
	if d.files != nil && d.loaded != "" && d.files.Check(driver.Utility) == nil {
		d.devices, d.devicesErr = f.Devices(ctx)
	}
}

// readPCI counts the GPUs on the bus, which need no driver, and finds NVSwitches.
func (f *facts) readPCI() {
	for _, address := range f.names("/sys/bus/pci/devices") {
		dir := "/sys/bus/pci/devices/" + address
		if host.ReadLine(f.at(dir+"/vendor")) != "0x10de" {
			continue
		}
		switch class := host.ReadLine(f.at(dir + "/class")); {
		case strings.HasPrefix(class, "0x03"): // a display controller
			f.driver.onPCI++
		case strings.HasPrefix(class, "0x0680"): // another bridge
			f.driver.switches = true
		}
	}
}

func checkDriver(f *facts) []Finding {
	d := &f.driver
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
	return append(list, f.checkFabric()...)
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
	case d.onPCI == 0:
		return newFinding("driver-missing", root, "no NVIDIA GPU is on the PCI bus, and "+problem)
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
