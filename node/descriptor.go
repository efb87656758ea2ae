package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/resource"
)

// DescriptorsPath is the directory in which a container finds a file for each of its devices, UUID.json, which
// contains a Descriptor.
const DescriptorsPath = "/run/gpu/devices"

// Descriptor describes a device to the container that has it.
type Descriptor struct {
	// Version is 1. Adding fields does not change the version.
	Version int `json:"version"`
	// UUID is the UUID of the GPU or of the MIG device.
	UUID string `json:"uuid"`
	// Parent is the UUID of the GPU to which a MIG device belongs.
	Parent string `json:"parent,omitempty"`
	// Resource is the extended resource that offers the device, such as "nvidia.com/gpu".
	Resource string `json:"resource"`
	// Index is the driver's index on the host: "3", or "3:0" for a MIG device. The index in a container may differ.
	Index string `json:"index"`
	// Model is the GPU's product name, and Profile the MIG device's profile.
	Model   string `json:"model,omitempty"`
	Profile string `json:"profile,omitempty"`
	// PCIBusID is the GPU's PCI address as in sysfs.
	PCIBusID string `json:"pciBusID,omitempty"`
	// NUMANode is the NUMA node of the GPU, left out if unknown.
	NUMANode *int `json:"numaNode,omitempty"`
	// MemoryBytes is the memory of the GPU or of the MIG device.
	MemoryBytes uint64 `json:"memoryBytes,omitempty"`
	// Sharing is left out if only one container can have the device.
	Sharing *Sharing `json:"sharing,omitempty"`
}

// Sharing describes how containers share a device.
type Sharing struct {
	// Replicas is the number of containers that may have the device at the same time.
	Replicas int `json:"replicas"`
	// MPS has the limits of each container if CUDA's multi-process service shares the device. It is left out for
	// time-slicing.
	MPS *resource.MPSLimits `json:"mps,omitempty"`
}

// descriptors writes the descriptor files. If no directory is configured, it writes none.
type descriptors struct {
	dir  string
	lock fileLock
}

const (
	descriptorSuffix = ".json"
	useSuffix        = ".use"
	useMode          = 0o600 // unlike descriptors, it is for the host only
	descriptorMode   = 0o644 // not every container runs as root
)

func newDescriptors(dir string) *descriptors {
	if dir == "" {
		return &descriptors{}
	}
	return &descriptors{dir, fileLock{
		path:    filepath.Join(dir, ".lock"),
		makeDir: func(dir string) error { return os.MkdirAll(dir, 0o755) },
		wrap:    func(err error) error { return fmt.Errorf("write the device descriptors: %w", err) },
	}}
}

func (d *descriptors) path(uuid string) string { return filepath.Join(d.dir, uuid+descriptorSuffix) }

// addMount adds the mount of a device's descriptor.
func (d *descriptors) addMount(to *specs.ContainerEdits, uuid string) {
	if d.dir != "" {
		to.Mounts = append(to.Mounts, &specs.Mount{
			HostPath: d.path(uuid), ContainerPath: DescriptorsPath + "/" + uuid + descriptorSuffix,
			Options: []string{"ro"},
		})
	}
}

// write writes the descriptors of the devices and removes those of devices that are not present. It returns by UUID
// why devices have no descriptor, and the same as one error.
func (d *descriptors) write(wanted map[string]*Descriptor, present map[string]bool) (map[string]error, error) {
	if d.dir == "" {
		return nil, nil //nolint:nilnil // no errors
	}
	failed := map[string]error{}
	if err := d.lock.hold(); err != nil {
		for uuid := range wanted {
			failed[uuid] = err
		}
		return failed, err
	}
	errs := []error{d.removeOthers(present)}
	for _, uuid := range slices.Sorted(maps.Keys(wanted)) {
		if err := writeDescriptor(d.path(uuid), wanted[uuid]); err != nil {
			failed[uuid] = fmt.Errorf("write the descriptor of %s: %w", uuid, err)
			errs = append(errs, failed[uuid])
		}
	}
	return failed, errors.Join(errs...)
}

// describe returns the descriptors of the devices, by UUID.
func describe(resources []resource.Resource) map[string]*Descriptor {
	all := map[string]*Descriptor{}
	for i := range resources {
		for j := range resources[i].Devices {
			dev := &resources[i].Devices[j]
			if all[dev.UUID] == nil {
				all[dev.UUID] = newDescriptor(dev, resources[i].Name)
			}
			if s := all[dev.UUID].Sharing; s != nil {
				s.Replicas++
			}
		}
	}
	return all
}

func newDescriptor(d *resource.Device, resourceName string) *Descriptor {
	desc := &Descriptor{
		Version: 1, UUID: d.UUID, Resource: resourceName, Index: d.IndexName, Model: d.Model,
		Profile: d.Profile, PCIBusID: d.PCIBusID, MemoryBytes: d.MemoryBytes,
	}
	if d.MIGIndex != resource.NoMIG {
		desc.Parent = d.Parent
	}
	if d.NUMANode != gpu.NoNUMANode {
		desc.NUMANode = &d.NUMANode
	}
	if d.Shared() {
		desc.Sharing = &Sharing{MPS: d.MPS}
	}
	return desc
}

// writeDescriptor writes a descriptor unless the file has this content already. In place of the file there may be an
// empty directory: a runtime that had to mount a missing file may have made it.
func writeDescriptor(path string, want *Descriptor) error {
	content, err := json.MarshalIndent(want, "", "  ")
	if err != nil {
		return err
	}
	content = append(content, '\n')
	info, err := os.Lstat(path)
	switch {
	case err == nil && info.IsDir():
		if err := os.Remove(path); err != nil {
			return err
		}
	case err == nil && info.Mode() == descriptorMode && info.Size() == int64(len(content)) && !othersCanChange(path):
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
			return nil
		}
	}
	return fileio.Replace(path, content, descriptorMode)
}

// deviceUse is what uses a device that is unhealthy for no other reason.
type deviceUse struct {
	Reason string `json:"reason"`
	PIDs   []int  `json:"pids,omitempty"` // as far as they are known
}

// writeUse writes into a file beside a device's descriptor, UUID.use, what uses the device, or removes the file if the
// reason is empty. The file tells a device manager why the device is unhealthy. It is not a part of the descriptor,
// since it names processes and users of the host, and a container that has the device must not know them.
func (d *descriptors) writeUse(uuid string, use deviceUse) error {
	if d.dir == "" {
		return nil
	}
	path := filepath.Join(d.dir, uuid+useSuffix)
	if use.Reason == "" {
		if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	content, err := json.Marshal(use)
	if err != nil {
		return err
	}
	content = append(content, '\n')
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
		return nil
	}
	return fileio.Replace(path, content, useMode)
}

// removeOthers removes the files of devices that are not present. A present device that is no longer offered
// keeps its descriptor and its entry in the spec, since a container that has the device may have to restart.
func (d *descriptors) removeOthers(present map[string]bool) error {
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		return fmt.Errorf("list the device descriptors: %w", err)
	}
	var errs []error
	for _, e := range entries {
		uuid, isOurs := strings.CutSuffix(e.Name(), descriptorSuffix)
		if !isOurs {
			uuid, isOurs = strings.CutSuffix(e.Name(), useSuffix)
		}
		isDevice := strings.HasPrefix(uuid, "GPU-") || strings.HasPrefix(uuid, "MIG-")
		if isOurs && isDevice && e.Type().IsRegular() && !present[uuid] {
			errs = append(errs, os.Remove(filepath.Join(d.dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// uuidsOf returns the UUIDs of the GPUs and MIG devices of a snapshot.
func uuidsOf(s *gpu.Snapshot) map[string]bool {
	uuids := map[string]bool{}
	for i := range s.Devices {
		uuids[s.Devices[i].UUID] = true
		for j := range s.Devices[i].MIG {
			uuids[s.Devices[i].MIG[j].UUID] = true
		}
	}
	return uuids
}
