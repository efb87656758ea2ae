package sim

import "gpu-cdi-plugin/gpu"

// Machine is a simulated machine, without what depends on its driver's version.
type Machine struct {
	// Name is the name of the machine file without its extension. UUIDs and serial numbers are derived from it.
	Name string
	// Description describes the machine in one line.
	Description string
	// Driver is the default driver version of a node; empty means DefaultDriver.
	Driver string
	// GPUs are in the order in which the driver enumerates them.
	GPUs []GPU
	// Pairs has the connections between the GPUs, with A < B, sorted by A then B.
	Pairs []Pair
	// NVSwitches are the PCI addresses of the NVSwitches, in the order of their device nodes.
	NVSwitches []string
	// CPUs has the list of CPUs of each NUMA node in the format of sysfs, like "0-55,112-167".
	CPUs map[int]string

	source []byte // the machine file, a copy of which is in the node
}

// Model has what all GPUs of a product have in common.
type Model struct {
	// Name is the product's name in NVML.
	Name string
	// Device and Subsystem are PCI ids in NVML's form: the device in the upper, the vendor in the lower 16 bits.
	Device, Subsystem uint32
	// Class is the PCI class: 0x030000 for a GPU that can drive a display, 0x030200 for one that cannot.
	Class uint32
	// Architecture is a name such as "hopper".
	Architecture string
	// ComputeCapability is "major.minor", such as "9.0".
	ComputeCapability string
	// MemoryBytes is the memory in bytes.
	MemoryBytes uint64
	// SMs is the number of streaming multiprocessors.
	SMs int
	// PowerWatts is the default power limit in watts.
	PowerWatts int
	// Brand is a name such as "nvidia", "tesla" or "geforce".
	Brand string
	// VBIOS and BoardPart are the version of the video BIOS and the board's part number.
	VBIOS, BoardPart string
	// MIG is the name of the table of MIG profiles, empty without MIG.
	MIG string
}

// GPU is one GPU of a machine.
type GPU struct {
	Model
	// Index is the driver's enumeration index.
	Index int
	// Minor is the N of /dev/nvidiaN.
	Minor int
	// UUID is "GPU-" and a UUID, derived from the machine's name and the index.
	UUID string
	// Serial is the board's serial number.
	Serial string
	// Bus is the PCI address in the format of sysfs.
	Bus string
	// NUMANode is the NUMA node, or gpu.NoNUMANode.
	NUMANode int
	// Upstream has the bridges above the GPU, from the root down: the host bridge ("pci0000:15"), then the PCIe
	// switches.
	Upstream []string
	// Card and Render are the names of the device files in /dev/dri, such as "card1" and "renderD128".
	Card, Render string
	// NVLinks are the active NVLinks.
	NVLinks []NVLink
	// MIGMode is the GPU's MIG mode. MIG has its MIG devices by index.
	MIGMode MIGMode
	MIG     []MIGDevice
}

// NVLink is one active link of a GPU.
type NVLink struct {
	// Port is the number of the link on its GPU.
	Port int
	// Remote is the PCI address of the other end. Switch is true if that is an NVSwitch.
	Remote string
	Switch bool
	// Version is the version of the link, SpeedMBps its speed in megabytes per second in each direction.
	Version, SpeedMBps int
}

// Pair is the connection between two GPUs, given by their indices.
type Pair struct {
	A, B int
	PCIe gpu.PCIePath
}

// MIGMode is the MIG mode of a GPU.
type MIGMode string

// The MIG modes.
const (
	MIGUnsupported MIGMode = "unsupported"
	MIGDisabled    MIGMode = "disabled"
	MIGEnabled     MIGMode = "enabled"
)

// MIGDevice is a MIG device: a compute instance in a GPU instance.
type MIGDevice struct {
	gpu.MIGDevice
	// GPUProfile and ComputeProfile are the driver's ids of the two instances' profiles, such as 19 and 0.
	GPUProfile, ComputeProfile int
	// GPUSlices and ComputeSlices are the numbers of compute slices of the two instances.
	GPUSlices, ComputeSlices int
	// Start and Size are the GPU instance's placement in memory slices.
	Start, Size int
	// SMs is the number of multiprocessors of the compute instance.
	SMs int
	// Engines are the GPU instance's engines.
	Engines Engines
}

// Engines counts the engines other than multiprocessors.
type Engines struct{ Copy, Decoder, Encoder, JPEG, OFA int }
