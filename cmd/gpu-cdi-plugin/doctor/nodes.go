package doctor

import (
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
)

// nodeFacts is a device node.
type nodeFacts struct {
	major, minor uint32
	mode         os.FileMode
	// link says that /dev/char has the link MAJOR:MINOR to a device node.
	link bool
}

// readNodes reads the numbers of the driver's device nodes, and those that the kernel gave the driver.
func (f *facts) readNodes() {
	d := &f.driver
	d.majors, d.nodes = map[string]uint32{}, map[string]nodeFacts{}
	text, _, _ := strings.Cut(string(f.read("/proc/devices")), "Block devices")
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			continue
		}
		if major, err := strconv.ParseUint(fields[0], 10, 32); err == nil {
			d.majors[fields[1]] = uint32(major)
		}
	}
	if d.files == nil {
		return
	}
	for _, n := range append(append([]driver.DeviceNode{}, d.files.Control...), d.files.Nodes...) {
		var st unix.Stat_t
		if err := unix.Lstat(n.HostPath, &st); err != nil {
			continue
		}
		major, minor := unix.Major(st.Rdev), unix.Minor(st.Rdev)
		_, err := os.Lstat(f.Host.Dev("char", fmt.Sprintf("%d:%d", major, minor)))
		d.nodes[n.Path] = nodeFacts{major, minor, n.Mode, err == nil}
	}
}

func checkNodes(f *facts) []Finding {
	d := &f.driver
	if d.files == nil || d.loaded == "" {
		return nil
	}
	var list []Finding
	if !d.uvm && f.Capabilities.Needs(driver.UsesCUDA) {
		list = append(list, newFinding("module-uvm", "nvidia_uvm", "the kernel module nvidia_uvm is not loaded"))
	}
	for _, found := range d.files.Findings {
		switch {
		case found.Kind != driver.KindNode || found.Used || !f.Capabilities.Needs(found.Capabilities):
		case found.Path != "": // it exists, and engines cannot use it
			list = append(list, newFinding("node-type", found.Name, found.Note))
		case found.Broken && d.uvm || found.Name == "/dev/nvidiactl": // without the module there can be no node
			list = append(list, newFinding("node-missing", found.Name, "the device node does not exist"))
		}
	}
	list = append(list, f.checkGPUNodes(list)...)
	return append(list, f.checkNumbers()...)
}

// checkGPUNodes returns findings about GPUs and MIG devices whose nodes are missing, except those in the list.
func (f *facts) checkGPUNodes(known []Finding) []Finding {
	d := &f.driver
	if d.devices == nil {
		return nil
	}
	var list []Finding
	for _, found := range cdi.FindDevices(d.devices, d.files) {
		if found.Kind != driver.KindDevice || !found.Broken || mentions(known, found.Note) {
			continue
		}
		list = append(list, newFinding("node-missing", found.Name, found.Note))
	}
	return list
}

// mentions reports whether a text has the subject of one of the findings.
func mentions(list []Finding, text string) bool {
	for _, finding := range list {
		if finding.ID == "node-type" && strings.Contains(text, finding.Subject+" ") {
			return true
		}
	}
	return false
}

// ownMajors are the names in /proc/devices of the drivers of device nodes, by the prefix of the nodes. The kernel
// chooses these numbers when the module is loaded.
var ownMajors = []struct{ prefix, driver, fix string }{
	{"/dev/nvidia-uvm", "nvidia-uvm", ""},
	{"/dev/nvidia-caps/", "nvidia-caps", "rm -r /dev/nvidia-caps, then gpu-cdi-plugin device make-nodes"},
}

// checkNumbers finds device nodes from before a reboot or a reload, which lead to no driver or to another one.
func (f *facts) checkNumbers() []Finding {
	var list []Finding
	for _, own := range ownMajors {
		want, known := f.driver.majors[own.driver]
		for _, name := range sortedKeys(f.driver.nodes) {
			n := f.driver.nodes[name]
			if known && strings.HasPrefix(name, own.prefix) && n.major != want {
				problem := fmt.Sprintf("the device node has the major number %d, and the driver %s has %d", n.major, own.driver,
					want)
				list = append(list, newFinding("node-number", name, problem).fixed(own.fix))
			}
		}
	}
	return list
}

// tmpfilesLinks returns the command that makes links in /dev/char, now and after each boot.
func tmpfilesLinks(nodes map[string]nodeFacts) string {
	var lines strings.Builder
	for _, name := range sortedKeys(nodes) {
		if n := nodes[name]; !n.link {
			fmt.Fprintf(&lines, `L+ /dev/char/%d:%d - - - - ..%s\n`, n.major, n.minor, strings.TrimPrefix(name, "/dev"))
		}
	}
	file := "/etc/tmpfiles.d/nvidia-dev-char.conf"
	return "printf '" + lines.String() + "' > " + file + " && systemd-tmpfiles --create " + path.Base(file)
}
