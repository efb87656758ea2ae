package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/proc"
)

// kernelFacts are what the kernel limits or denies.
type kernelFacts struct {
	// enforcing says that SELinux enforces, and devicesAllowed that a boolean lets containers use devices.
	enforcing, devicesAllowed bool
	cgroups                   cgroupMode
	// inotifyMax is how many inotify instances a user may have, and inotifyUsed how many root has. 0 means unknown.
	inotifyMax, inotifyUsed int
}

// cgroupMode is the version of control groups that the host has.
type cgroupMode string

const (
	cgroupV1     cgroupMode = "v1"
	cgroupV2     cgroupMode = "v2"
	cgroupHybrid cgroupMode = "hybrid"
)

// deviceBooleans are SELinux booleans of which one must be on for containers to use NVIDIA's device nodes, whose type
// is xserver_misc_device_t or device_t.
var deviceBooleans = []string{"container_use_devices", "container_use_xserver_devices"}

func (f *facts) readKernel() {
	k := &f.kernel
	k.enforcing = host.ReadLine(f.at("/sys/fs/selinux/enforce")) == "1"
	for _, name := range deviceBooleans {
		if strings.HasPrefix(host.ReadLine(f.at("/sys/fs/selinux/booleans/"+name)), "1") {
			k.devicesAllowed = true
		}
	}
	switch {
	case f.exists("/sys/fs/cgroup/cgroup.controllers"):
		k.cgroups = cgroupV2
	case f.exists("/sys/fs/cgroup/devices") && f.exists("/sys/fs/cgroup/unified/cgroup.controllers"):
		k.cgroups = cgroupHybrid
	case f.exists("/sys/fs/cgroup/devices"):
		k.cgroups = cgroupV1
	}
	k.inotifyMax, _ = strconv.Atoi(host.ReadLine(f.at("/proc/sys/fs/inotify/max_user_instances")))
	f.readProcesses()
}

// readProcesses reads the names of all processes, and counts the inotify instances of root's. If this process does not
// see the host's processes, that is noted.
func (f *facts) readProcesses() {
	procfs := f.Host.Proc()
	if !f.exists("/proc/thread-self") && f.Host.Root() != "/" {
		return // a tree of files, such as a simulated node: it has no processes
	}
	if err := proc.SeesAll(procfs); err != nil {
		f.unread("processes", fmt.Errorf("the kubelet's options and the use of inotify are unknown: %w", err))
		return
	}
	pids, err := proc.PIDs(procfs)
	if err != nil {
		f.unread(procfs, err)
		return
	}
	f.processes = map[string]int{}
	for _, pid := range pids {
		dir := f.Host.Proc(strconv.Itoa(pid))
		f.processes[host.ReadLine(filepath.Join(dir, "comm"))] = pid
		if isRoots(dir) {
			f.kernel.inotifyUsed += countInotify(filepath.Join(dir, "fd"))
		}
	}
}

// countInotify counts the inotify instances among a process's open files.
func countInotify(dir string) int {
	count := 0
	fds, _ := os.ReadDir(dir) // the process may have ended
	for _, fd := range fds {
		if target, err := os.Readlink(filepath.Join(dir, fd.Name())); err == nil && target == "anon_inode:inotify" {
			count++
		}
	}
	return count
}

// isRoots reports whether a process in /proc has root's real user ID.
func isRoots(dir string) bool {
	for line := range strings.Lines(host.ReadLine(filepath.Join(dir, "status"))) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "Uid:" {
			return fields[1] == "0"
		}
	}
	return false
}

func checkKernel(f *facts) []Finding {
	k := &f.kernel
	list := f.checkSELinux()
	switch {
	case k.inotifyMax == 0:
	case k.inotifyMax < leastInotify || k.inotifyUsed*10 >= k.inotifyMax*9:
		problem := fmt.Sprintf("a user may have %d inotify instances, and root has %d", k.inotifyMax, k.inotifyUsed)
		list = append(list, newFinding("inotify", "fs.inotify.max_user_instances", problem))
	}
	return append(append(list, f.checkCgroups()...), f.checkCharLinks()...)
}

// leastInotify is the kernel's default.
const leastInotify = 128

// labels reports whether an engine gives its containers SELinux labels. podman does by default, others if they are
// configured to.
func (e *engine) labels() bool {
	if e.settings == nil {
		return false
	}
	if s := e.settings.SELinux; s != nil {
		return *s
	}
	return e.name == "podman"
}

func (f *facts) checkSELinux() []Finding {
	k := &f.kernel
	if !k.enforcing || k.devicesAllowed {
		return nil
	}
	var names []string
	for i := range f.engines.list {
		if e := &f.engines.list[i]; e.labels() {
			names = append(names, e.name)
		}
	}
	if names == nil {
		return nil
	}
	problem := "SELinux enforces, and container_use_devices is off, for containers of " + strings.Join(names, ", ")
	return []Finding{newFinding("selinux", "container_use_devices", problem)}
}

func (f *facts) checkCgroups() []Finding {
	crun := f.program("crun") != ""
	switch {
	case f.kernel.cgroups == cgroupHybrid && crun && f.hasEngine("podman", "crio"):
		problem := "the control groups are of both versions, and crun is installed"
		return []Finding{newFinding("cgroup-hybrid", "/sys/fs/cgroup", problem)}
	case f.kernel.cgroups == cgroupV1 && f.kubelet.present && f.kubelet.failsOnV1():
		return []Finding{newFinding("cgroup-v1", "/sys/fs/cgroup", "the control groups are of version 1, and the kubelet "+
			"refuses that")}
	}
	return nil
}

func (f *facts) hasEngine(names ...string) bool {
	return slices.ContainsFunc(f.engines.list, func(e engine) bool { return slices.Contains(names, e.name) })
}

// checkCharLinks checks the links by which systemd allows devices. It matters where a kubelet has systemd manage its
// control groups.
func (f *facts) checkCharLinks() []Finding {
	if !f.kubelet.present || f.kubelet.config.CgroupDriver != "systemd" {
		return nil
	}
	var missing []string
	for _, name := range sortedKeys(f.driver.nodes) {
		if n := f.driver.nodes[name]; !n.link {
			missing = append(missing, fmt.Sprintf("/dev/char/%d:%d", n.major, n.minor))
		}
	}
	if len(missing) == 0 {
		return nil
	}
	problem := fmt.Sprintf("%d links to device nodes are missing, such as %s", len(missing), missing[0])
	return []Finding{newFinding("dev-char", "/dev/char", problem).fixed(tmpfilesLinks(f.driver.nodes))}
}
