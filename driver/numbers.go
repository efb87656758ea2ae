package driver

import (
	"fmt"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
)

// NumberError means that a device node has another number than its device, so that opening it fails, or opens another
// GPU or the device of another driver. Such nodes are left where /dev outlives the driver: a module got another major
// number when it was loaded again, or a driver container has a directory of its own for nodes.
type NumberError struct {
	// Has and Want are numbers, such as "195:0". Want may have only the major number.
	Has, Want string
}

// Error names both numbers.
func (e *NumberError) Error() string {
	if e.Want == "" {
		return "its number is " + e.Has + ", which no driver has, since its kernel module is not loaded"
	}
	return "its number is " + e.Has + ", and that of its device is " + e.Want
}

// Numbers are the numbers that device nodes must have.
type Numbers struct {
	majors map[string]uint32 // by the names of the drivers in /proc/devices
}

// ReadNumbers reads the major numbers that the host's kernel has given to drivers. Without /proc/devices none is known.
func ReadNumbers(h host.Host) Numbers {
	n := Numbers{map[string]uint32{}}
	data, _ := fileio.ReadFile(h.Proc("devices"), 64<<10) // a file of the kernel
	text, _, _ := strings.Cut(string(data), "Block devices")
	for line := range strings.Lines(text) {
		number, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		if major, err := strconv.ParseUint(number, 10, 32); err == nil {
			n.majors[name] = uint32(major)
		}
	}
	return n
}

// Minor numbers in nodeDrivers.
const (
	anyMinor   = -1 // only the driver knows it
	itsMinor   = -2 // the number at the end of the node's name
	controlSub = 255
)

// nodeDrivers are the drivers of device nodes, by the name or prefix of the nodes. The drivers have their names of
// /proc/devices; that of GPUs had another one before driver 550.
var nodeDrivers = []struct {
	node    string
	drivers []string
	minor   int
}{
	{controlNode, []string{"nvidia", "nvidia-frontend"}, controlSub},
	{"nvidia-modeset", []string{"nvidia", "nvidia-frontend"}, 254},
	{"nvidia", []string{"nvidia", "nvidia-frontend"}, itsMinor},
	{"nvidia-uvm", []string{uvm}, 0},
	{"nvidia-uvm-tools", []string{uvm}, 1},
	{"nvidia-caps/nvidia-cap", []string{"nvidia-caps"}, itsMinor},
	{imexChannel, []string{"nvidia-caps-imex-channels"}, itsMinor},
	{"nvidia-nvswitchctl", []string{"nvidia-nvswitch"}, controlSub},
	{"nvidia-nvswitch", []string{"nvidia-nvswitch"}, itsMinor},
	{"gdrdrv", []string{"gdrdrv"}, anyMinor},
}

// uvm is the driver of unified memory, which has a kernel module of its own.
const uvm = "nvidia-uvm"

// Check returns a *NumberError if a device node under /dev, such as "nvidia0", has another number than its device.
// Nodes of drivers that have no number are not checked, except that of unified memory beside a driver that is loaded.
func (n Numbers) Check(name string, device uint64) error {
	drivers, minor := driversOf(name)
	if drivers == nil {
		return nil
	}
	e := &NumberError{Has: fmt.Sprintf("%d:%d", unix.Major(device), unix.Minor(device))}
	major, known := n.majorOf(drivers)
	_, loaded := n.majorOf(nodeDrivers[0].drivers)
	switch {
	case !known && loaded && drivers[0] == uvm:
		return e
	case !known || unix.Major(device) == major && (minor == anyMinor || unix.Minor(device) == uint32(minor)):
		return nil
	case minor == anyMinor:
		e.Want = strconv.Itoa(int(major))
	default:
		e.Want = fmt.Sprintf("%d:%d", major, minor)
	}
	return e
}

// CheckPath does what Check does, for the path of a node in any directory dev.
func (n Numbers) CheckPath(file string, device uint64) error {
	if i := strings.LastIndex(path.Clean(file), "/dev/"); i >= 0 {
		return n.Check(path.Clean(file)[i+len("/dev/"):], device)
	}
	return nil
}

func (n Numbers) majorOf(drivers []string) (uint32, bool) {
	for _, name := range drivers {
		if major, ok := n.majors[name]; ok {
			return major, true
		}
	}
	return 0, false
}

// driversOf returns the drivers of which one has a device node, and its minor number or anyMinor. It returns no drivers
// for nodes that are not in the table.
func driversOf(name string) (drivers []string, minor int) {
	for _, row := range nodeDrivers {
		number, isPrefix := strings.CutPrefix(name, row.node)
		minor, err := strconv.ParseUint(number, 10, 20)
		switch {
		case row.minor != itsMinor && name == row.node:
			return row.drivers, row.minor
		case row.minor == itsMinor && isPrefix && err == nil:
			return row.drivers, int(minor)
		}
	}
	return nil, anyMinor
}
