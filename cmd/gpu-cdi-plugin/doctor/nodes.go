package doctor

import (
	"fmt"
	"os"
	"path"
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

// readNodes reads the numbers of the driver's device nodes.
func (f *facts) readNodes() {
	d := &f.driver
	d.nodes = map[string]nodeFacts{}
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
		case found.Kind != driver.KindNode || found.Used:
		case found.OtherNumber: // also without need, since it may open another driver's device
			if d.uvm || !strings.HasPrefix(found.Name, uvmNode) {
				list = append(list, newFinding("node-number", found.Name, found.Note))
			}
		case !f.Capabilities.Needs(found.Capabilities):
		case found.Path != "": // it exists, and engines cannot use it
			list = append(list, newFinding("node-type", found.Name, found.Note))
		case found.Broken && d.uvm || found.Name == "/dev/nvidiactl": // without the module there can be no node
			list = append(list, newFinding("node-missing", found.Name, "the device node does not exist"))
		}
	}
	return append(list, f.checkGPUNodes(list)...)
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
		if (finding.ID == "node-type" || finding.ID == "node-number") && strings.Contains(text, finding.Subject+" ") {
			return true
		}
	}
	return false
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
