package driver

import (
	"fmt"
	"io/fs"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/exit"
)

// Driver is what a host has of a driver: its files and device nodes. Lists are sorted; host paths are absolute, with
// all links resolved inside the driver's root, and container paths are the same without that root.
type Driver struct {
	// Version is the driver's version, such as "580.126.09".
	Version   string
	Libraries []Library
	// Files are the driver's other files: programs, configuration, firmware, sockets.
	Files []File
	// Control are the device nodes under /dev that belong to no GPU, and Nodes those of the GPUs and MIG devices, those of
	// DRM excepted.
	Control, Nodes []Node
	// DRM has the nodes under /dev/dri of each GPU, by PCI address as sysfs writes it.
	DRM map[string][]Node
	// Looked is everything that was looked for, found or not, in the order of the search.
	Looked []Finding

	unusable []shortcoming
}

// shortcoming is a capability that the driver cannot serve at all, and why.
type shortcoming struct {
	capability Capabilities
	hint       string
	err        error
}

// Check returns an error if the driver cannot serve what is asked for: without libcuda there is no compute, with a
// damaged libnvidia-ml no utility. The error wraps gpu.ErrNoDriver and has exit status 10 and a hint.
func (d *Driver) Check(c Capabilities) error {
	for _, u := range d.unusable {
		if c.Needs(u.capability) {
			return exit.With(exit.NoDriver, u.hint, fmt.Errorf("%w for %s: %w", gpu.ErrNoDriver, u.capability, u.err))
		}
	}
	return nil
}

// Library is a shared library of the driver.
type Library struct {
	// Path is the file in the container, HostPath on the host.
	Path, HostPath string
	// SONAME is the name that programs ask for. It is empty for modules of the X server, which are loaded by path.
	SONAME string
	// Links are symlinks that a container needs beside the library, by their path; the target may be relative.
	Links []Link
	// Capabilities are what the library serves.
	Capabilities Capabilities
}

// Link is a symlink at Path with the content Target.
type Link struct{ Path, Target string }

// File is a file, directory or socket of the driver that is not a library.
type File struct {
	Path, HostPath string
	Kind           Kind
	Capabilities   Capabilities
}

// Node is a character device.
type Node struct {
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

// Finding is a row of the table that explains a spec: something that was looked for, and what came of it.
type Finding struct {
	// Name is what was looked for, such as "libcuda.so.1", "nvidia-smi", "/dev/nvidia-uvm" or "GPU 3".
	Name string `json:"name"`
	Kind Kind   `json:"kind"`
	// Capabilities are what it serves; 0 where that makes no sense.
	Capabilities Capabilities `json:"capabilities,omitempty"`
	// Path is where it was found on the host, or empty.
	Path string `json:"path,omitempty"`
	// UUID is that of a GPU or MIG device.
	UUID string `json:"uuid,omitempty"`
	// Used tells whether it is offered to containers.
	Used bool `json:"used"`
	// Broken is set for a library of the driver that is damaged or missing, so that containers do not get it.
	Broken bool `json:"broken,omitempty"`
	// Note says why it is not used, or what is odd about it.
	Note string `json:"note,omitempty"`
}
