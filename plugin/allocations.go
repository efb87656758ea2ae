package plugin

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/plugin/resource"
)

// Allocation is what the file at AllocationPath says.
type Allocation struct {
	// Version is 1. Fields may be added without another version.
	Version  int         `json:"version"`
	Resource string      `json:"resource"`
	Devices  []Allocated `json:"devices"`
}

// Allocated is a device that the container was given.
type Allocated struct {
	// ID is the kubelet's name of the device, as PodResources lists it.
	ID string `json:"id"`
	// UUID is the GPU's or MIG device's.
	UUID string `json:"uuid"`
	// Parent is the UUID of the GPU that a MIG device is on.
	Parent string `json:"parent,omitempty"`
	// Index is the driver's index on the node: "3", or "3:0" for a MIG device. In the container others may hold.
	Index string `json:"index"`
	// Model is the GPU's product name, and Profile the MIG device's profile.
	Model   string `json:"model,omitempty"`
	Profile string `json:"profile,omitempty"`
	// PCIBusID is the GPU's address as sysfs writes it.
	PCIBusID string `json:"pciBusID,omitempty"`
	// NUMANode is that of the GPU, or left out if it is unknown.
	NUMANode *int `json:"numaNode,omitempty"`
	// MemoryBytes is the memory of the GPU or of the MIG device.
	MemoryBytes uint64 `json:"memoryBytes,omitempty"`
	// Replica counts the replicas of a shared device from 0; it is left out if the container has the device for itself.
	Replica *int `json:"replica,omitempty"`
	// MPS is what the container may use of a GPU that is shared by MPS.
	MPS *AllocatedMPS `json:"mps,omitempty"`
}

// AllocatedMPS are the limits of a client of a GPU's MPS control daemon.
type AllocatedMPS struct {
	MemoryLimitBytes uint64 `json:"memoryLimitBytes"`
	// ActiveThreadPercentage is left out for a GPU that knows no such limit.
	ActiveThreadPercentage int `json:"activeThreadPercentage,omitempty"`
}

// allocations are the files that tell containers what they were given. A file's name is the sum of what it says, so the
// same devices share one.
type allocations struct {
	dir     string // empty: there are none
	writing sync.Mutex
}

// allocationSuffix ends the names of the files.
const allocationSuffix = ".json"

// mount is that of the file for the devices, which is written if need be, or nil if there are no such files.
func (a *allocations) mount(l *list, devices []*device) (*v1beta1.Mount, error) {
	if a.dir == "" {
		return nil, nil //nolint:nilnil // nothing to mount is an ordinary case
	}
	key := joinedIDs(devices)
	if known, ok := l.mounts.Load(key); ok && isFile(known.(*v1beta1.Mount).HostPath) {
		return known.(*v1beta1.Mount), nil
	}
	path, err := a.write(allocationOf(l.resource.Name, devices))
	if err != nil {
		return nil, err
	}
	mount := &v1beta1.Mount{ContainerPath: AllocationPath, HostPath: path, ReadOnly: true}
	l.mounts.Store(key, mount)
	return mount, nil
}

func joinedIDs(devices []*device) string {
	var b strings.Builder
	b.Grow(len(devices) * (resource.MaxID + 1))
	for _, d := range devices {
		b.WriteString(d.ID)
		b.WriteByte('\n')
	}
	return b.String()
}

func isFile(path string) bool {
	var st unix.Stat_t
	return unix.Lstat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG
}

// write makes the file for the content, also where a file of that name is there: it may be damaged. An empty directory
// in its place is what a runtime makes of a path that is missing.
func (a *allocations) write(content []byte) (path string, err error) {
	sum := sha256.Sum256(content)
	path = filepath.Join(a.dir, hex.EncodeToString(sum[:16])+allocationSuffix)
	a.writing.Lock()
	defer a.writing.Unlock()
	if err := os.MkdirAll(a.dir, 0o755); err != nil {
		return "", fmt.Errorf("make the directory of allocations: %w", err)
	}
	if info, err := os.Lstat(path); err == nil && info.IsDir() {
		if err := os.Remove(path); err != nil {
			return "", fmt.Errorf("make room for an allocation: %w", err)
		}
	}
	return path, atomicfile.Write(path, content, 0o644)
}

// allocationOf is the content of a file.
func allocationOf(name string, devices []*device) []byte {
	a := Allocation{Version: 1, Resource: name, Devices: make([]Allocated, len(devices))}
	for i, d := range devices {
		a.Devices[i] = allocatedOf(d)
	}
	content, err := json.MarshalIndent(a, "", "  ")
	if err != nil {
		panic(err) // strings and numbers can always be written
	}
	return append(content, '\n')
}

func allocatedOf(d *device) Allocated {
	a := Allocated{
		ID: d.ID, UUID: d.UUID, Index: strconv.Itoa(d.Index), Model: d.Model, Profile: d.Profile,
		PCIBusID: d.PCIBusID, MemoryBytes: d.MemoryBytes,
	}
	if d.MIGIndex != resource.NoMIG {
		a.Parent = d.Parent
		a.Index += ":" + strconv.Itoa(d.MIGIndex)
	}
	if d.NUMANode != gpu.NoNUMANode {
		a.NUMANode = &d.NUMANode
	}
	if d.Shared() {
		a.Replica = &d.Replica
	}
	if d.MPS != nil {
		a.MPS = &AllocatedMPS{MemoryLimitBytes: d.MPS.MemoryBytes, ActiveThreadPercentage: d.MPS.ThreadPercent}
	}
	return a
}
