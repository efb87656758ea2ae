// Package checkpoint reads and writes the kubelet's record of allocated devices, the file kubelet_internal_checkpoint,
// byte for byte with its checksum. It is pure.
//
// Kubelets before 1.20 wrote device IDs without NUMA nodes. Parse reads that format too, with all devices on NUMA node
// 0, as the kubelets up to 1.30 did.
package checkpoint

import (
	"errors"

	"gpu-cdi-plugin/manager/model"
)

// Name is the file's name in the kubelet's device plugin directory. The kubelet writes it with mode 0600.
const Name = "kubelet_internal_checkpoint"

// NoNode is the NUMA node of devices without topology.
const NoNode = -1

// ErrChecksum means that the file has another checksum than its content.
var ErrChecksum = errors.New("the checksum does not match")

// Checkpoint is the content of the file. Names of fields and types are those of the kubelet, since the file and its
// checksum are made of them.
type Checkpoint struct {
	PodDeviceEntries []Entry
	// RegisteredDevices are the IDs of the healthy devices by resource. The kubelet uses the names alone.
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

// Parse reads a checkpoint. If its checksum is wrong, the error wraps ErrChecksum.
func Parse(data []byte) (*Checkpoint, error) { return nil, errors.ErrUnsupported }

// Marshal returns the file's content as the kubelet would write it, with the checksum.
func (c *Checkpoint) Marshal() ([]byte, error) { return nil, errors.ErrUnsupported }

// New returns the checkpoint of placements and of the healthy device IDs by resource.
func New(placements []model.Placement, registered map[string][]string) *Checkpoint { return nil }

// Placements returns the entries by pod, in the order of the first entry of each. Of a pod only the UID and the
// containers that have devices are known, with the numbers of their devices as limits.
func (c *Checkpoint) Placements() []model.Placement { return nil }
