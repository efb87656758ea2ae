package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"gpu-cdi-plugin/gpu"
)

// Why a driver cannot be used, where that is known. Errors that wrap one of these wrap gpu.ErrNoDriver too.
var (
	// ErrOtherVersion is that the installed libraries are of another version than the driver that is loaded.
	ErrOtherVersion = errors.New("the libraries are of another version than the loaded driver")
	// ErrDamaged is that a library which a driver must have cannot be used.
	ErrDamaged = errors.New("a library is damaged")
	// ErrNoCUDA is that there is no libcuda.
	ErrNoCUDA = errors.New("no libcuda")
)

// Driver is what a host has of a driver: its files and device nodes. Lists are sorted by path. Host paths are absolute,
// with all links resolved below the driver's root; container paths are the same without that root.
type Driver struct {
	// Version is the driver's version, such as "580.126.09".
	Version   string
	Libraries []Library
	// Files are the driver's other files: programs, configuration, firmware, sockets.
	Files []File
	// Control are the device nodes under /dev that belong to no GPU, Nodes those of GPUs and MIG devices without DRM's.
	Control, Nodes []DeviceNode
	// DRM has the nodes under /dev/dri of each GPU, by PCI address as sysfs writes it.
	DRM map[string][]DeviceNode
	// Findings are everything that was searched for, found or not, in the order of the search.
	Findings []Finding

	shortcomings []shortcoming
}

// shortcoming is a capability that the driver cannot serve, and why.
type shortcoming struct {
	capability Capabilities
	err        error
}

// Check returns an error if the driver cannot serve the capabilities: compute needs libcuda, and a damaged libnvidia-ml
// serves no utility. The error wraps gpu.ErrNoDriver, and ErrNoCUDA or ErrDamaged.
func (d *Driver) Check(c Capabilities) error {
	for _, s := range d.shortcomings {
		if c.Needs(s.capability) {
			return fmt.Errorf("%w for %s: %w", gpu.ErrNoDriver, s.capability, s.err)
		}
	}
	return nil
}

// Explain returns the findings for a spec with the given capabilities. Files that they leave out are not used.
func (d *Driver) Explain(c Capabilities) []Finding {
	list := slices.Clone(d.Findings)
	for i := range list {
		f := &list[i]
		if f.Used && f.Capabilities != 0 && !c.Needs(f.Capabilities) {
			f.Used, f.Note = false, fmt.Sprintf("for %s, left out for %s", f.Capabilities, c)
		}
		f.Broken = f.Broken && c.Needs(f.Capabilities)
	}
	return list
}

// Library is a shared library of the driver.
type Library struct {
	// Path is the file in the container, HostPath on the host.
	Path, HostPath string
	// SONAME is the name that programs load it by. It is empty for modules of the X server, which are loaded by path.
	SONAME string
	// Links are symlinks that a container needs beside the library, sorted by path.
	Links []Link
	// Capabilities are those that the library serves.
	Capabilities Capabilities
}

// Link is a symlink at Path with the content Target, which may be relative.
type Link struct{ Path, Target string }

// File is a file, directory or socket of the driver that is not a library.
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

// Kind is what a finding is about.
type Kind string

// The kinds.
const (
	KindLibrary  Kind = "library"
	KindBinary   Kind = "binary"
	KindConfig   Kind = "config"
	KindFirmware Kind = "firmware"
	KindSocket   Kind = "socket"
	KindNode     Kind = "node"
	KindDevice   Kind = "device" // a GPU or MIG device
)

// Finding is something that was searched for, and the result. The findings together explain a spec.
type Finding struct {
	// Name is what was searched for, such as "libcuda.so.1", "nvidia-smi", "/dev/nvidia-uvm" or "GPU 3".
	Name string `json:"name"`
	Kind Kind   `json:"kind"`
	// Capabilities are those that it serves; 0 for GPUs and MIG devices, which serve all.
	Capabilities Capabilities `json:"capabilities,omitempty"`
	// Path is where it was found on the host, or empty.
	Path string `json:"path,omitempty"`
	// UUID is that of a GPU or MIG device.
	UUID string `json:"uuid,omitempty"`
	// Used reports whether containers can get it.
	Used bool `json:"used"`
	// Broken is set for a library of the driver that is damaged or missing, so that containers do not get it.
	Broken bool `json:"broken,omitempty"`
	// Note is why it is not used, or what is unusual about it.
	Note string `json:"note,omitempty"`
}
