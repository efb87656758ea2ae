package plugin

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/resource"
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

	mu   sync.RWMutex
	kept *fileid.Kept // the directory
}

// allocationSuffix ends the names of the files.
const allocationSuffix = ".json"

// allocationMounts are the mounts of a file for a container with devices of a resource; none if there is no file.
func allocationMounts(name, file string) []*v1beta1.Mount {
	if file == "" {
		return nil
	}
	return []*v1beta1.Mount{
		{ContainerPath: AllocationPath, HostPath: file, ReadOnly: true},
		{ContainerPath: allocationsPath(name), HostPath: file, ReadOnly: true},
	}
}

// allocationsPath is where a container finds the file of a resource.
func allocationsPath(name string) string {
	return AllocationsDir + "/" + strings.ReplaceAll(name, "/", "_") + allocationSuffix
}

// lookTime is for how long what was found by its path counts as there: only a look shows that what leads to the directory
// was moved, or that something was mounted there.
const lookTime = time.Second

// has reports whether a file is there. What is found is remembered for a while, as long as nothing comes to the directory
// or leaves it.
func (a *allocations) has(f *allocationFile) bool {
	if f.path == "" {
		return true
	}
	now := time.Now()
	a.mu.RLock()
	dir := a.kept.ID()
	a.mu.RUnlock()
	settled := dir.Settled(now)
	if last := f.seen.Load(); settled && last != nil && last.dir == dir && now.Sub(last.at) < lookTime {
		return true
	}
	if !dir.Same(fileid.Of(a.dir)) {
		a.keep()
		settled = false
	}
	if !renew(f.path, now) {
		return false
	}
	if settled {
		f.seen.Store(&fileSeen{dir, now})
	}
	return true
}

// keep keeps the directory that is there now.
func (a *allocations) keep() {
	kept, _ := fileid.Keep(a.dir) // without it, files are looked up each time
	a.mu.Lock()
	defer a.mu.Unlock()
	a.kept = kept
}

// allocationFile is one of the files; an empty path is none.
type allocationFile struct {
	path string
	seen atomic.Pointer[fileSeen]
}

// fileSeen is that a file was in its directory.
type fileSeen struct {
	dir fileid.ID // of then
	at  time.Time
}

// renew reports whether a file is there, and has it look new if it is about to look old: who removes old files does not
// know of an answer that the kubelet has not written down yet.
func renew(path string, now time.Time) bool {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return false
	}
	if now.Sub(time.Unix(st.Mtim.Unix())) < sweepAge/2 {
		return true
	}
	err := os.Chtimes(path, now, now)
	return err == nil || !errors.Is(err, fs.ErrNotExist) // what cannot be changed cannot be removed either
}

// write makes the file for the devices and extras, unless it is there and whole: to write it so that it outlives a power cut
// takes longer than all else. An empty directory in its place is what a runtime makes of a path that is missing. Without a
// directory there is no file.
func (a *allocations) write(name string, devices []*device, extras []*specs.Spec) (path string, err error) {
	if a.dir == "" {
		return "", nil
	}
	content := allocationOf(name, devices, extras)
	sum := sha256.Sum256(content)
	path = filepath.Join(a.dir, hex.EncodeToString(sum[:16])+allocationSuffix)
	a.writing.Lock()
	defer a.writing.Unlock()
	if err := os.MkdirAll(a.dir, 0o755); err != nil {
		return "", fmt.Errorf("make the directory of allocations: %w", err)
	}
	info, err := os.Lstat(path)
	if err == nil && info.IsDir() {
		if err := os.Remove(path); err != nil {
			return "", fmt.Errorf("make room for an allocation: %w", err)
		}
	}
	if err == nil && isWhole(path, info, content) && renew(path, time.Now()) {
		return path, nil
	}
	return path, atomicfile.Write(path, content, readableByAll)
}

// readableByAll is the mode of the files: not every container runs as root.
const readableByAll = 0o644

func isWhole(path string, info os.FileInfo, content []byte) bool {
	if info.Mode() != readableByAll || info.Size() != int64(len(content)) {
		return false
	}
	there, err := os.ReadFile(path)
	return err == nil && bytes.Equal(there, content)
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
