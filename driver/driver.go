package driver

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"gpu-cdi-plugin/gpu"
)

// Known reasons why a driver cannot be used. Errors that wrap one of these also wrap gpu.ErrNoDriver.
var (
	// ErrOtherVersion means that the installed libraries have another version than the loaded driver.
	ErrOtherVersion = errors.New("the libraries are of another version than the loaded driver")
	// ErrDamaged means that a library which a driver must have cannot be used.
	ErrDamaged = errors.New("a library is damaged")
	// ErrNoCUDA means that there is no libcuda.
	ErrNoCUDA = errors.New("no libcuda")
	// ErrNoControl means that there is no device node /dev/nvidiactl, which every program opens that uses the driver.
	ErrNoControl = errors.New("no device node nvidiactl")
)

// Driver is a driver that is installed on a host: its files and device nodes. Lists are sorted by path. Host paths are
// absolute, with all links resolved below the driver's root; container paths are the same without that root.
type Driver struct {
	// Version is the driver's version, such as "580.126.09".
	Version   string
	Libraries []Library
	// Files are the driver's other files: programs, configuration, firmware, sockets.
	Files []File
	// Control are the device nodes under /dev that belong to no GPU. Nodes are the device nodes of GPUs and MIG
	// devices, except DRM nodes.
	Control, Nodes []DeviceNode
	// DRM has the device nodes under /dev/dri of each GPU. A key is a PCI address as in sysfs.
	DRM map[string][]DeviceNode
	// Findings has everything that was searched for, found or not, in the order of the search.
	Findings []Finding

	shortcomings []shortcoming
	kernel       kernelDevices
}

// shortcoming is a capability that the driver cannot serve, with the reason.
type shortcoming struct {
	capability Capabilities
	err        error
}

// Check returns an error if the driver cannot serve the capabilities: all need /dev/nvidiactl, compute needs libcuda,
// and utility needs an undamaged libnvidia-ml. The error wraps gpu.ErrNoDriver, and ErrNoControl, ErrNoCUDA or
// ErrDamaged.
func (d *Driver) Check(c Capabilities) error {
	for _, s := range d.shortcomings {
		switch {
		case s.capability == All:
			return fmt.Errorf("%w: %w", gpu.ErrNoDriver, s.err)
		case c.Needs(s.capability):
			return fmt.Errorf("%w for %s: %w", gpu.ErrNoDriver, s.capability, s.err)
		}
	}
	return nil
}

// Explain returns the findings for a spec with the given capabilities. Files that the spec leaves out are marked as
// not used.
func (d *Driver) Explain(c Capabilities) []Finding {
	list := slices.Clone(d.Findings)
	for i := range list {
		f := &list[i]
		if f.Used && f.Capabilities != 0 && !c.Needs(f.Capabilities) {
			f.Used, f.Note = false, fmt.Sprintf("for %s, left out for %s", f.Capabilities, c)
		}
		if !c.Needs(f.Capabilities) {
			f.Broken, f.Missing = false, ""
		}
	}
	return list
}

// Library is a shared library of the driver.
type Library struct {
	// Path is the library's path in the container, HostPath its path on the host.
	Path, HostPath string
	// SONAME is the name by which programs load the library. It is empty for a module of the X server, which is loaded
	// by its path.
	SONAME string
	// Links are symlinks that a container needs in addition to the library, sorted by path.
	Links []Link
	// Capabilities are the capabilities that the library serves.
	Capabilities Capabilities
}

// Link is a symlink at Path with the content Target, which may be relative.
type Link struct{ Path, Target string }

// File is a file, directory or socket of the driver other than a library.
type File struct {
	Path, HostPath string
	Kind           Kind
	Capabilities   Capabilities
}

// DeviceNode is a character device.
type DeviceNode struct {
	Path, HostPath string
	// Mode is the node's permission bits on the host.
	Mode         fs.FileMode
	Capabilities Capabilities
}

// Kind is the subject of a finding.
type Kind string

// The kinds of findings.
const (
	KindLibrary  Kind = "library"
	KindBinary   Kind = "binary"
	KindConfig   Kind = "config"
	KindFirmware Kind = "firmware"
	KindSocket   Kind = "socket"
	KindNode     Kind = "node"
	KindDevice   Kind = "device" // a GPU or MIG device
	KindRoot     Kind = "root"   // the directory in which the driver is installed
)

// Finding is the result of one search. The findings together explain a spec.
type Finding struct {
	// Name is what was searched for, such as "libcuda.so.1", "nvidia-smi", "/dev/nvidia-uvm" or "GPU 3".
	Name string `json:"name"`
	Kind Kind   `json:"kind"`
	// Capabilities are the capabilities that the file serves; 0 for GPUs and MIG devices, which serve all.
	Capabilities Capabilities `json:"capabilities,omitempty"`
	// Path is the path on the host, or empty if nothing was found.
	Path string `json:"path,omitempty"`
	// UUID is the UUID of a GPU or MIG device.
	UUID string `json:"uuid,omitempty"`
	// Used reports whether containers can get the file or device.
	Used bool `json:"used"`
	// Broken says that containers lack what they need, because it is damaged or missing: a library, a device node, or a
	// device that is left out.
	Broken bool `json:"broken,omitempty"`
	// Missing says that it was not found, or cannot be used, although its sibling was, the file of that name.
	Missing string `json:"missing,omitempty"`
	// OtherNumber says that it is a device node with another number than its device.
	OtherNumber bool `json:"otherNumber,omitempty"`
	// Note says why it is not used, or what is unusual about it.
	Note string `json:"note,omitempty"`
}

// Lack says, of a finding that is broken or missing, what containers lack and what to do about it.
func (f *Finding) Lack() (text, advice string) {
	switch {
	case f.Missing != "" && !f.Broken && f.Path != "":
		return "containers do not get " + f.Name + ", since " + f.Path + " cannot be used: " + f.Note,
			"remove it, and install the NVIDIA driver again"
	case f.Missing != "" && !f.Broken:
		return "containers do not get " + f.Name + ", which was not found although " + f.Missing + " was",
			"install it, or name the directory that it is in with driver-dirs"
	case f.Kind == KindDevice:
		return f.Name + " is left out: " + f.Note,
			"gpu-cdi-plugin device make-nodes makes device nodes of GPUs and MIG devices that are missing or wrong"
	case f.Kind == KindNode:
		return "containers do not get the device node " + f.Name + ", without which CUDA does not start: " + f.Note,
			"gpu-cdi-plugin device make-nodes loads the kernel module nvidia_uvm and makes its device node"
	default:
		return "containers do not get the driver library " + cmp.Or(f.Path, f.Name) + ", which cannot be used: " + f.Note,
			"install the NVIDIA driver again"
	}
}
