// Package gpu is the pure model of what a node has: its GPUs, their MIG devices and how they are linked.
//
// It holds data and the names of things, nothing else: it imports nothing of this project, makes no system call and
// needs no cgo, so that every other package can speak of devices without a driver.
package gpu

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// NoNUMANode is the NUMA node of a device whose node is unknown or that belongs to none, as sysfs writes it.
const NoNUMANode = -1

// NoMinor is the minor number of a device node that could not be learned.
const NoMinor = -1

// Snapshot is one consistent look at a node.
//
// Devices are sorted by Index; an index occurs once. Links has one entry for each unordered pair of devices that
// could be read, with A < B, sorted by A then B.
type Snapshot struct {
	// DriverVersion is the driver's own version, such as "580.126.09".
	DriverVersion string
	// CUDAVersion is the newest CUDA version that the driver supports, such as "13.0".
	CUDAVersion string
	Devices     []Device
	Links       []Link
}

// Device is one physical GPU. A GPU that could not be read whole is present too: Error says why, and whatever was
// read before that is filled in.
type Device struct {
	// Index is the driver's enumeration index, from 0.
	Index int `json:"index"`
	// UUID is "GPU-" and a UUID in lower case. Empty where the GPU did not even say that.
	UUID string `json:"uuid"`
	// Name is the product name, such as "NVIDIA H100 80GB HBM3".
	Name string `json:"name"`
	// Minor is the N of /dev/nvidiaN; it need not equal Index. NoMinor if unknown.
	Minor int `json:"minor"`
	// PCIBusID is the address as sysfs writes it: domain:bus:device.function in lower case, such as "0000:1b:00.0".
	PCIBusID string `json:"pciBusID"`
	// NUMANode is the NUMA node the GPU is attached to, or NoNUMANode.
	NUMANode int `json:"numaNode"`
	// MemoryBytes is the size of the GPU's memory in bytes.
	MemoryBytes uint64 `json:"memoryBytes"`
	// ComputeCapability is "major.minor", such as "9.0".
	ComputeCapability string `json:"computeCapability"`
	// MIGEnabled tells whether MIG mode is on now. Then only MIG devices can be used, and there may be none.
	MIGEnabled bool `json:"migEnabled"`
	// MIG lists the GPU's MIG devices by Index.
	MIG []MIGDevice `json:"mig"`
	// Error says what could not be read, or is empty.
	Error string `json:"error,omitempty"`
}

// Usable reports whether the device was read without an error.
func (d *Device) Usable() bool { return d.Error == "" }

// MIGDevice is a slice of a GPU with its own UUID: a compute instance in a GPU instance.
type MIGDevice struct {
	// Index is the device's index on its parent, from 0.
	Index int `json:"index"`
	// UUID is "MIG-" and a UUID in lower case.
	UUID string `json:"uuid"`
	// Profile is the profile's name, such as "1g.10gb", "1c.3g.40gb" or "1g.10gb+me".
	Profile string `json:"profile"`
	// GPUInstance and ComputeInstance are the driver's ids of the two instances.
	GPUInstance     int `json:"gpuInstance"`
	ComputeInstance int `json:"computeInstance"`
	// GPUInstanceCap and ComputeInstanceCap are the N of /dev/nvidia-caps/nvidia-capN that grant access, or NoMinor.
	GPUInstanceCap     int `json:"gpuInstanceCap"`
	ComputeInstanceCap int `json:"computeInstanceCap"`
	// MemoryBytes is the memory of the device in bytes.
	MemoryBytes uint64 `json:"memoryBytes"`
}

// PCIePath is how far apart two GPUs are on PCIe, from unknown and far to near. The text forms are the ones that
// `nvidia-smi topo -m` prints, except for the board.
type PCIePath int

// The levels, as NVML's nvmlGpuTopologyLevel_t tells them apart.
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

// String is the level's short name.
func (p PCIePath) String() string {
	if p < 0 || int(p) >= len(pathNames) {
		return "PCIePath(" + strconv.Itoa(int(p)) + ")"
	}
	return pathNames[p]
}

// MarshalText writes the level's short name.
func (p PCIePath) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads what MarshalText writes.
func (p *PCIePath) UnmarshalText(text []byte) error {
	i := slices.Index(pathNames[:], string(text))
	if i < 0 {
		return fmt.Errorf("unknown PCIe path %q; known are %s", text, strings.Join(pathNames[:], ", "))
	}
	*p = PCIePath(i)
	return nil
}

// Link is the connection between two GPUs, named by their indices.
type Link struct {
	A int `json:"a"`
	B int `json:"b"`
	// PCIe is the nearest common point of the two on PCIe.
	PCIe PCIePath `json:"pcie"`
	// NVLinks counts the active NVLinks that join the two, directly or through NVSwitches.
	NVLinks int `json:"nvlinks"`
	// Switched tells that the NVLinks run through NVSwitches, so that they are shared with the links to other GPUs.
	Switched bool `json:"switched"`
}

// String is the cell of a link matrix: "NV18", or the PCIe path where no NVLink joins the two.
func (l Link) String() string {
	if l.NVLinks > 0 {
		return "NV" + strconv.Itoa(l.NVLinks)
	}
	return l.PCIe.String()
}

// Link returns the link between the GPUs with indices a and b, in either order.
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

var pciBusID = regexp.MustCompile(`^([0-9a-f]{4,8}):([0-9a-f]{2}:[01][0-9a-f]\.[0-7])$`)

// NormalizePCIBusID turns any of the spellings in use ("00000000:1B:00.0", "0000:1b:00.0") into that of sysfs.
// The domain may have 4 to 8 hexadecimal digits; it is cut to 4 where its higher digits are zero.
func NormalizePCIBusID(id string) (string, error) {
	parts := pciBusID.FindStringSubmatch(strings.ToLower(strings.TrimSpace(id)))
	if parts == nil {
		return "", fmt.Errorf("PCI address %q: want DOMAIN:BUS:DEVICE.FUNCTION", id)
	}
	domain, err := strconv.ParseUint(parts[1], 16, 32)
	if err != nil {
		return "", fmt.Errorf("PCI address %q: domain: %w", id, err)
	}
	return fmt.Sprintf("%04x:%s", domain, parts[2]), nil
}
