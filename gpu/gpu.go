// Package gpu is the model of a host's GPUs, their MIG devices and the links between the GPUs.
//
// It has only data and names. It imports no other package of this project, makes no system calls and needs no cgo, so
// that every other package can work on devices without a driver.
package gpu

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

// NoNUMANode is the NUMA node of a device that has none, or whose node is unknown. sysfs uses the same number.
const NoNUMANode = -1

// NoMinor is the minor number of a device node whose number is unknown.
const NoMinor = -1

// Snapshot has the GPUs of a host at one time. A host without GPUs has a snapshot without devices.
type Snapshot struct {
	// DriverVersion is the version of the driver, such as "580.126.09".
	DriverVersion string
	// CUDAVersion is the newest CUDA version that the driver supports, such as "13.0". It is empty if that is unknown.
	CUDAVersion string
	// Devices has each GPU once, by Index.
	Devices []Device
	// Links has one link for each pair of usable devices, sorted by A and then by B. It is empty if links were not
	// read.
	Links []Link
}

// Device is one physical GPU. A GPU that could not be read has an Error, and the properties that are known.
type Device struct {
	// Index is the driver's enumeration index, from 0.
	Index int `json:"index"`
	// UUID is "GPU-" and a UUID in lower case, or empty if unknown.
	UUID string `json:"uuid"`
	// Name is the product name, such as "NVIDIA H100 80GB HBM3", or empty if unknown.
	Name string `json:"name"`
	// Minor is the number N of the device node /dev/nvidiaN, or NoMinor. It may differ from Index.
	Minor int `json:"minor"`
	// PCIBusID is the PCI address as in sysfs: domain:bus:device.function in lower case, such as "0000:1b:00.0". It is
	// empty if unknown.
	PCIBusID string `json:"pciBusID"`
	// NUMANode is the NUMA node to which the GPU is attached, or NoNUMANode.
	NUMANode int `json:"numaNode"`
	// MemoryBytes is the size of the GPU's memory in bytes. It is 0 if unknown, or if the GPU has no memory.
	MemoryBytes uint64 `json:"memoryBytes"`
	// ComputeCapability is "major.minor", such as "9.0", or empty if unknown.
	ComputeCapability string `json:"computeCapability"`
	// PCIClass is the class of the PCI device as in sysfs, "0x030200" for a 3D controller or "0x030000" for a VGA
	// controller. It is empty if unknown.
	PCIClass string `json:"pciClass"`
	// FabricClique is "CLUSTER-UUID.CLIQUE-ID" of a GPU that has joined an NVLink fabric of several hosts: GPUs of one
	// clique can share memory. It is empty for all other GPUs.
	FabricClique string `json:"fabricClique"`
	// MIGCapable says whether the GPU has a MIG mode.
	MIGCapable bool `json:"migCapable"`
	// MIGEnabled says whether MIG mode is on. In MIG mode only the GPU's MIG devices can be used; there may be none.
	MIGEnabled bool `json:"migEnabled"`
	// MIG has the GPU's MIG devices, by Index.
	MIG []MIGDevice `json:"mig"`
	// Error says why the GPU could not be read. It is empty for a usable GPU.
	Error string `json:"error,omitempty"`
}

// Usable reports whether the device was read without an error.
func (d *Device) Usable() bool { return d.Error == "" }

// MIGDevice is a part of a GPU with its own UUID: a compute instance in a GPU instance.
type MIGDevice struct {
	// Index is the device's index on its GPU, from 0. Indices can have gaps.
	Index int `json:"index"`
	// UUID is "MIG-" and a UUID in lower case.
	UUID string `json:"uuid"`
	// Profile is the name of the device's profile, such as "1g.10gb", "1c.3g.40gb" or "1g.10gb+me".
	Profile string `json:"profile"`
	// GPUInstance and ComputeInstance are the driver's IDs of the device's GPU instance and compute instance.
	GPUInstance     int `json:"gpuInstance"`
	ComputeInstance int `json:"computeInstance"`
	// GPUInstanceCap and ComputeInstanceCap are the numbers N of the device nodes /dev/nvidia-caps/nvidia-capN that
	// grant access to the two instances, or NoMinor.
	GPUInstanceCap     int `json:"gpuInstanceCap"`
	ComputeInstanceCap int `json:"computeInstanceCap"`
	// MemoryBytes is the size of the device's memory in bytes.
	MemoryBytes uint64 `json:"memoryBytes"`
	// Attributes is what else the device has of its GPU.
	Attributes MIGAttributes `json:"attributes"`
}

// MIGAttributes are numbers of nvmlDeviceAttributes_t. MIG devices of one GPU instance share its engines.
type MIGAttributes struct {
	Multiprocessors int `json:"multiprocessors"`
	GPUSlices       int `json:"gpuSlices"`
	ComputeSlices   int `json:"computeSlices"`
	CopyEngines     int `json:"copyEngines"`
	Decoders        int `json:"decoders"`
	Encoders        int `json:"encoders"`
	JPEGEngines     int `json:"jpegEngines"`
	OFAEngines      int `json:"ofaEngines"`
}

// PCIePath says how far apart two GPUs are on PCIe. A larger value means nearer. The short names are those of
// `nvidia-smi topo -m`, except PSB.
type PCIePath int

// The paths on PCIe, which are the levels of NVML's nvmlGpuTopologyLevel_t.
const (
	PathUnknown          PCIePath = iota
	PathSystem                    // SYS: across the link between sockets
	PathNode                      // NODE: across host bridges of one NUMA node
	PathHostBridge                // PHB: through one host bridge
	PathMultipleSwitches          // PXB: through several PCIe switches
	PathSingleSwitch              // PIX: through one PCIe switch
	PathSameBoard                 // PSB: on one board
)

var pathNames = [...]string{"unknown", "SYS", "NODE", "PHB", "PXB", "PIX", "PSB"}

// String returns the path's short name.
func (p PCIePath) String() string {
	if p < 0 || int(p) >= len(pathNames) {
		return "PCIePath(" + strconv.Itoa(int(p)) + ")"
	}
	return pathNames[p]
}

// MarshalText returns the path's short name.
func (p PCIePath) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText parses a short name.
func (p *PCIePath) UnmarshalText(text []byte) error {
	i := slices.Index(pathNames[:], string(text))
	if i < 0 {
		return fmt.Errorf("unknown PCIe path %q; known are %s", text, strings.Join(pathNames[:], ", "))
	}
	*p = PCIePath(i)
	return nil
}

// Link is the connection between two GPUs.
type Link struct {
	// A and B are the indices of the GPUs, with A < B.
	A int `json:"a"`
	B int `json:"b"`
	// PCIe is the PCIe path between the two GPUs.
	PCIe PCIePath `json:"pcie"`
	// NVLinks is the number of active NVLinks that join the two GPUs, directly or through NVSwitches.
	NVLinks int `json:"nvlinks"`
	// Switched says whether the NVLinks run through NVSwitches. The links to other GPUs then use the same NVLinks.
	Switched bool `json:"switched"`
}

// String returns what a matrix of the GPUs has for the link: "NV18", or the PCIe path if no NVLink joins the two GPUs.
func (l Link) String() string {
	if l.NVLinks > 0 {
		return "NV" + strconv.Itoa(l.NVLinks)
	}
	return l.PCIe.String()
}

// Link returns the link between the GPUs with the indices a and b, in either order, and whether it exists.
func (s *Snapshot) Link(a, b int) (Link, bool) {
	if a > b {
		a, b = b, a
	}
	i, ok := slices.BinarySearchFunc(s.Links, Link{A: a, B: b}, func(x, y Link) int {
		return cmp.Or(cmp.Compare(x.A, y.A), cmp.Compare(x.B, y.B))
	})
	if !ok {
		return Link{}, false
	}
	return s.Links[i], true
}

// NormalizePCIBusID returns a PCI address, such as NVML's "00000000:1B:00.0", as it is in sysfs: "0000:1b:00.0". The
// domain can have 4 to 8 hexadecimal digits; leading zeros beyond 4 digits are dropped.
func NormalizePCIBusID(id string) (string, error) {
	digits, address, _ := strings.Cut(strings.ToLower(strings.TrimSpace(id)), ":")
	domain, err := strconv.ParseUint(digits, 16, 32)
	valid, _ := path.Match("[0-9a-f][0-9a-f]:[01][0-9a-f].[0-7]", address)
	if err != nil || len(digits) < 4 || len(digits) > 8 || !valid {
		return "", fmt.Errorf("PCI address %q: want DOMAIN:BUS:DEVICE.FUNCTION", id)
	}
	return fmt.Sprintf("%04x:%s", domain, address), nil
}

// IsUUID reports whether a text consists of 8, 4, 4, 4 and 12 hexadecimal digits with hyphens between them.
func IsUUID(text string) bool {
	groups := strings.Split(text, "-")
	return slices.EqualFunc(groups, []int{8, 4, 4, 4, 12}, func(group string, length int) bool {
		return len(group) == length && strings.Trim(group, "0123456789abcdefABCDEF") == ""
	})
}

// Find returns the GPU with a UUID, or nil.
func (s *Snapshot) Find(uuid string) *Device {
	if s == nil || uuid == "" {
		return nil
	}
	i := slices.IndexFunc(s.Devices, func(d Device) bool { return d.UUID == uuid })
	if i < 0 {
		return nil
	}
	return &s.Devices[i]
}

// Unreadable returns an error that names the GPUs that could not be read, or nil.
func (s *Snapshot) Unreadable() error {
	var which []string
	for i := range s.Devices {
		if d := &s.Devices[i]; !d.Usable() {
			address := cmp.Or(d.PCIBusID, "PCI address unknown")
			which = append(which, fmt.Sprintf("GPU %d (%s): %s", d.Index, address, d.Error))
		}
	}
	if len(which) == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d GPUs could not be read: %s", len(which), len(s.Devices), strings.Join(which, "; "))
}
