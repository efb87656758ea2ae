// Package kubelet has what the kubelet defines: the rules for names of extended resources, such as nvidia.com/gpu, and
// the file in which the kubelet records allocated devices, kubelet_internal_checkpoint. It opens no file.
package kubelet

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"
)

// CheckpointName is the name of the checkpoint in the kubelet's device plugin directory. Its mode is 0600.
const CheckpointName = "kubelet_internal_checkpoint"

// NoNode is the NUMA node of devices without topology.
const NoNode = -1

// ErrChecksum means that the file's checksum does not match its content.
var ErrChecksum = errors.New("the checksum does not match")

// Checkpoint is the content of the file. Fields and types have the kubelet's names: they are part of the file, and the
// checksum covers them.
type Checkpoint struct {
	PodDeviceEntries []Entry
	// RegisteredDevices are the IDs of the healthy devices by resource. The kubelet uses only the names of the
	// resources.
	RegisteredDevices map[string][]string
}

// Entry has a container's devices of one resource.
type Entry struct {
	PodUID        string
	ContainerName string
	ResourceName  string
	// DeviceIDs has the devices by NUMA node. A device that is close to several NUMA nodes is listed for each of them.
	DeviceIDs map[int64][]string
	// AllocResp is the plugin's ContainerAllocateResponse, in the encoding of protobuf.
	AllocResp []byte
}

// file is the whole file, with the checksum.
type file struct {
	Data     Checkpoint
	Checksum uint64
}

// ParseCheckpoint parses a checkpoint. If its checksum is wrong, the error wraps ErrChecksum. That of a kubelet before
// 1.11 has no checksum.
func ParseCheckpoint(data []byte) (*Checkpoint, error) {
	if err := checkSize(data); err != nil {
		return nil, fmt.Errorf("parse the kubelet's checkpoint: %w", err)
	}
	if bare, ok, err := parseBare(data); ok && err == nil {
		return bare, nil
	} else if ok {
		return nil, fmt.Errorf("parse the checkpoint of a kubelet before 1.11: %w", err)
	}
	current, err := parseV2(data)
	if err == nil {
		return current, nil
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

func parseV2(data []byte) (*Checkpoint, error) {
	// If a field is missing in the file, the kubelet has an empty value; if the field is null, it has nil.
	f := file{Data: Checkpoint{PodDeviceEntries: []Entry{}, RegisteredDevices: map[string][]string{}}}
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, err
	}
	if err := verify(f.Checksum, f.Data.dump()); err != nil {
		return nil, err
	}
	return &f.Data, nil
}

// ReadCheckpoint is ParseCheckpoint without a comparison of the checksum, since later kubelets may compute it in
// another way.
func ReadCheckpoint(data []byte) (*Checkpoint, error) {
	c, err := parseUnverified(data)
	if err != nil {
		return nil, fmt.Errorf("parse the kubelet's checkpoint: %w", err)
	}
	return c, nil
}

// IDs returns the IDs of an entry's devices, sorted, each once.
func (e *Entry) IDs() []string {
	var ids []string
	for _, list := range e.DeviceIDs {
		ids = append(ids, list...)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// maxObjects is how many JSON objects a file of the kubelet can have. In kubelet_internal_checkpoint a container has
// two for each resource. Small ones need a hundred times as much memory as in the file.
const maxObjects = 200_000

// checkSize returns an error if a file of the kubelet is too large to be parsed.
func checkSize(data []byte) error {
	if n := bytes.Count(data, []byte("{")); n > maxObjects {
		return fmt.Errorf("it has %d objects, the limit is %d", n, maxObjects)
	}
	return nil
}

// parseUnverified parses the formats of ParseCheckpoint without comparing the checksum.
func parseUnverified(data []byte) (*Checkpoint, error) {
	if err := checkSize(data); err != nil {
		return nil, err
	}
	if bare, ok, err := parseBare(data); ok {
		return bare, err
	}
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(data, &keys); err != nil {
		return nil, err
	}
	content, ok := keys["Data"]
	if !ok {
		return nil, errors.New("it has no Data")
	}
	var current Checkpoint
	err := json.Unmarshal(content, &current)
	if err == nil {
		return &current, nil
	}
	var old checkpointV1
	if json.Unmarshal(content, &old) == nil {
		return old.checkpoint(), nil
	}
	return nil, err
}

func verify(want uint64, dump []byte) error {
	if got := checksum(dump); got != want {
		return fmt.Errorf("%w: the file says %d, its content has %d", ErrChecksum, want, got)
	}
	return nil
}

// Marshal encodes the checkpoint like the kubelet, with the checksum.
func (c *Checkpoint) Marshal() ([]byte, error) {
	dump := c.dump()
	// JSON would replace bytes that are not UTF-8, and then the checksum would not match.
	if !utf8.Valid(dump) {
		return nil, errors.New("write the kubelet's checkpoint: a name in it is not valid UTF-8")
	}
	data, err := json.Marshal(file{Data: *c, Checksum: checksum(dump)})
	if err != nil {
		return nil, fmt.Errorf("write the kubelet's checkpoint: %w", err)
	}
	return data, nil
}
