// Package kubelet has what the kubelet defines: the rules for names of extended resources, such as nvidia.com/gpu, and
// its record of allocated devices, the file kubelet_internal_checkpoint. It is pure.
package kubelet

import (
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"
)

// CheckpointName is the file's name in the kubelet's device plugin directory. The kubelet writes it with mode 0600.
const CheckpointName = "kubelet_internal_checkpoint"

// NoNode is the NUMA node of devices without topology.
const NoNode = -1

// ErrChecksum means that the file has another checksum than its content.
var ErrChecksum = errors.New("the checksum does not match")

// Checkpoint is the content of the file. Names of fields and types are those of the kubelet, since the file and its
// checksum are made of them.
type Checkpoint struct {
	PodDeviceEntries []Entry
	// RegisteredDevices are the IDs of the healthy devices by resource. The kubelet uses only the names.
	RegisteredDevices map[string][]string
}

// Entry is what a container has of a resource.
type Entry struct {
	PodUID        string
	ContainerName string
	ResourceName  string
	// DeviceIDs are by NUMA node. A device close to several nodes is in the list of each.
	DeviceIDs map[int64][]string
	// AllocResp is the plugin's ContainerAllocateResponse, in the encoding of protobuf.
	AllocResp []byte
}

// file is the whole file.
type file struct {
	Data     Checkpoint
	Checksum uint64
}

// ParseCheckpoint reads a checkpoint. If its checksum is wrong, the error wraps ErrChecksum.
func ParseCheckpoint(data []byte) (*Checkpoint, error) {
	// The kubelet takes a field that is not in the file as empty, and one that is null as nil.
	f := file{Data: Checkpoint{PodDeviceEntries: []Entry{}, RegisteredDevices: map[string][]string{}}}
	err := json.Unmarshal(data, &f)
	if err == nil {
		if err = verify(f.Checksum, f.Data.dump()); err == nil {
			return &f.Data, nil
		}
	}
	old, oldErr := parseV1(data)
	if oldErr == nil {
		return old, nil
	}
	if errors.Is(oldErr, ErrChecksum) {
		err = oldErr
	}
	return nil, fmt.Errorf("parse the kubelet's checkpoint: %w", err)
}

// DeviceIDs returns the IDs of the devices that pods have, from a file of kubelets since 1.20. It does not verify the
// checksum: a later kubelet may compute another one.
func DeviceIDs(data []byte) (map[string]bool, error) {
	var f file
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fmt.Errorf("parse the kubelet's checkpoint: %w", err)
	}
	allocated := map[string]bool{}
	for _, e := range f.Data.PodDeviceEntries {
		for _, ids := range e.DeviceIDs {
			for _, id := range ids {
				allocated[id] = true
			}
		}
	}
	return allocated, nil
}

func verify(want uint64, dump []byte) error {
	if got := checksum(dump); got != want {
		return fmt.Errorf("%w: the file says %d, its content has %d", ErrChecksum, want, got)
	}
	return nil
}

// Marshal returns the file's content as the kubelet would write it, with the checksum.
func (c *Checkpoint) Marshal() ([]byte, error) {
	dump := c.dump()
	// JSON would replace bytes that are not UTF-8, and the checksum would not match.
	if !utf8.Valid(dump) {
		return nil, errors.New("write the kubelet's checkpoint: a name in it is not valid UTF-8")
	}
	data, err := json.Marshal(file{Data: *c, Checksum: checksum(dump)})
	if err != nil {
		return nil, fmt.Errorf("write the kubelet's checkpoint: %w", err)
	}
	return data, nil
}
