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
	"gpu-cdi-plugin/internal/wording"
)

// nodeFacts is a device node.
type nodeFacts struct {
	path         string // in this process
	major, minor uint32
	mode         os.FileMode
	// link says that /dev/char has the link MAJOR:MINOR to a device node.
	link bool
}

// readNodes reads the numbers of the driver's device nodes.
func (f *facts) readNodes() {
	d := &f.driver
	d.nodes = map[string]nodeFacts{}
	d.nodeMode = 0o666
	for line := range strings.Lines(string(f.read("/proc/driver/nvidia/params"))) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		if mode, err := strconv.ParseUint(value, 10, 32); err == nil && name == "DeviceFileMode" {
			d.nodeMode = os.FileMode(mode)
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
		d.nodes[n.Path] = nodeFacts{n.HostPath, major, minor, n.Mode, err == nil}
	}
}

func checkNodes(f *facts) []Finding {
	d := &f.driver
	if d.files == nil || d.loaded == "" {
		return nil
	}
	var list []Finding
	if !d.uvm && f.Capabilities.Needs(driver.UsesCUDA) {
		problem := "the kernel module nvidia_uvm is not loaded"
		list = append(list, newFinding("module-uvm", "nvidia_uvm", problem).fixed(f.makeNodes()))
	}
	for _, found := range d.files.Findings {
		switch {
		case found.Kind != driver.KindNode || found.Used:
		case found.OtherNumber: // also without need, since it may open another driver's device
			if d.uvm || !strings.HasPrefix(found.Name, uvmNode) {
				list = append(list, newFinding("node-number", found.Name, found.Note).fixed(f.makeNodes()))
			}
		case !f.Capabilities.Needs(found.Capabilities):
		case found.Path != "": // it exists, and engines cannot use it
			fix := "rm " + wording.Quote(found.Path) + " && " + f.makeNodes()
			list = append(list, newFinding("node-type", found.Name, found.Note).fixed(fix))
		case found.Broken && d.uvm || found.Name == "/dev/nvidiactl": // without the module there can be no node
			problem := "the device node does not exist"
			list = append(list, newFinding("node-missing", found.Name, problem).fixed(f.makeNodes()))
		}
	}
	return append(append(list, f.checkGPUNodes(list)...), f.checkModes()...)
}

// makeNodes returns the command that makes device nodes, and then our spec, which lacks them.
func (f *facts) makeNodes() string {
	const nodes = "gpu-cdi-plugin device make-nodes"
	if driver.FindProgram(f.Host, "nvidia-modprobe") == "" {
		return "install the driver's nvidia-modprobe, in Debian a package of its own, then run: " + nodes
	}
	for i := range f.specs.files {
		if s := &f.specs.files[i]; s.ours {
			return nodes + " && " + f.write(s.path)
		}
	}
	return nodes
}

// checkModes finds device nodes that only root can open. Those of MIG's settings are for root only.
func (f *facts) checkModes() []Finding {
	const readWrite = 0o006
	var list []Finding
	for _, name := range sortedKeys(f.driver.nodes) {
		n := f.driver.nodes[name]
		if strings.HasPrefix(name, "/dev/nvidia-caps/") || n.mode&readWrite == readWrite {
			continue
		}
		finding := newFinding("node-private", name, fmt.Sprintf("its mode is %#o", n.mode)).fixed(
			"chmod a+rw " + wording.Quote(n.path))
		if mode := f.driver.nodeMode; mode&readWrite != readWrite {
			finding.Problem += fmt.Sprintf(", as the parameter NVreg_DeviceFileMode of the module nvidia says (%#o)", mode)
			finding.Fix = "set NVreg_DeviceFileMode=0666 for the module nvidia in /etc/modprobe.d, and load it again"
		}
		list = append(list, finding)
	}
	return list
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
		list = append(list, newFinding("node-missing", found.Name, found.Note).fixed(f.makeNodes()))
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
