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
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/plugin/resource"
)

// Where a container finds what it was given, as JSON: an Allocation.
const (
	// AllocationPath is for the usual container, which has devices of one resource. Of several resources the kubelet
	// mounts one here, and nobody knows which.
	AllocationPath = "/run/gpu/allocation.json"
	// AllocationsDir has a file for each resource that the container has devices of: nvidia.com_gpu.json is for
	// nvidia.com/gpu.
	AllocationsDir = "/run/gpu/allocations"
)

// Allocation is what the files at AllocationPath and in AllocationsDir say.
type Allocation struct {
	// Version is 1. Fields may be added without another version.
	Version  int         `json:"version"`
	Resource string      `json:"resource"`
	Devices  []Allocated `json:"devices"`
	// Extras are what the container was given besides.
	Extras []AllocatedExtra `json:"extras,omitempty"`
}

// AllocatedExtra are CDI devices that a container was given beside its GPUs.
type AllocatedExtra struct {
	// Kind is such as "nvidia.com/gds".
	Kind string `json:"kind"`
	// Names are the devices' names, such as "all", or the numbers of IMEX channels.
	Names []string `json:"names"`
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

// mounts are those of the file for the devices and extras, which is written if need be, or none if there are no such
// files.
func (a *allocations) mounts(l *list, devices []*device, extras []*specs.Spec) ([]*v1beta1.Mount, error) {
	if a.dir == "" {
		return nil, nil
	}
	key := joinedNames(devices, extras)
	if known, ok := l.mounts.Load(key); ok && isFile(known.([]*v1beta1.Mount)[0].HostPath) {
		return known.([]*v1beta1.Mount), nil
	}
	path, err := a.write(allocationOf(l.resource.Name, devices, extras))
	if err != nil {
		return nil, err
	}
	mounts := []*v1beta1.Mount{
		{ContainerPath: AllocationPath, HostPath: path, ReadOnly: true},
		{ContainerPath: allocationsPath(l.resource.Name), HostPath: path, ReadOnly: true},
	}
	l.mounts.Store(key, mounts)
	return mounts, nil
}

// allocationsPath is where a container finds the file of a resource.
func allocationsPath(name string) string {
	return AllocationsDir + "/" + strings.ReplaceAll(name, "/", "_") + allocationSuffix
}

// joinedNames tells allocations of a list apart.
func joinedNames(devices []*device, extras []*specs.Spec) string {
	var b strings.Builder
	b.Grow(len(devices) * (resource.MaxID + 1))
	for _, d := range devices {
		b.WriteString(d.ID)
		b.WriteByte('\n')
	}
	for _, name := range extraNames(extras) {
		b.WriteString(name)
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
func allocationOf(name string, devices []*device, extras []*specs.Spec) []byte {
	a := Allocation{Version: 1, Resource: name, Devices: make([]Allocated, len(devices))}
	for i, d := range devices {
		a.Devices[i] = allocatedOf(d)
	}
	for _, s := range extras {
		extra := AllocatedExtra{Kind: s.Kind}
		for i := range s.Devices {
			extra.Names = append(extra.Names, s.Devices[i].Name)
		}
		a.Extras = append(a.Extras, extra)
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
