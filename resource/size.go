package resource

import (
	"fmt"
	"strconv"
	"strings"
)

// maxID is the maximum length of a device ID, in bytes. The device plugin API states it in the comment on Device.
const maxID = 63

// MaxList is the maximum size of a list of devices, in bytes. The kubelet uses the default limit of gRPC for messages.
const MaxList = 4 << 20

// maxReplicas is how many replicas of one GPU fit in a list.
const maxReplicas = MaxList / 80

// replicaID returns the device ID of a replica.
func replicaID(uuid string, n int) string { return uuid + "::" + strconv.Itoa(n) }

// UUIDOf returns the UUID in a device plugin ID: that of a GPU or MIG device, which can be followed by "::" and the
// number of a replica.
func UUIDOf(id string) string {
	uuid, _, _ := strings.Cut(id, "::")
	return uuid
}

// deviceBytes is the size of a device in a ListAndWatchResponse, without its ID: at most 15 bytes with the health
// "Unhealthy", and 10 for the topology.
const deviceBytes = 25

// listSize returns the maximum size of the device in a ListAndWatchResponse, in bytes.
func (p *plan) listSize() int {
	id := len(p.device.UUID)
	if p.replicas > 0 {
		id = len(replicaID(p.device.UUID, p.replicas-1))
	}
	return max(1, p.replicas) * (id + deviceBytes)
}

// TooManyDevicesError means that a resource has more devices than the kubelet can receive.
type TooManyDevicesError struct {
	// Resource is the name of the resource.
	Resource string
	// Devices is the number of devices, and Bytes the size of their list.
	Devices, Bytes int
	// Shared is the number of GPUs and MIG devices that have replicas because of the configuration key Rules. About
	// Replicas replicas of each would fit. All three are empty if no device is shared.
	Shared, Replicas int
	Rules            string
}

func (e *TooManyDevicesError) Error() string {
	return fmt.Sprintf("resource %s: a list of %d devices takes %d bytes, but the kubelet reads at most %d",
		e.Resource, e.Devices, e.Bytes, MaxList)
}

// checkSize returns an error if the kubelet could not read the list: it would close the connection and have no
// devices.
func checkSize(name string, plans []plan) error {
	bytes, count, shared, key := 0, 0, 0, ""
	for i := range plans {
		bytes += plans[i].listSize()
		count += max(1, plans[i].replicas)
		if plans[i].replicas > 0 {
			shared++
			key = plans[i].method.key
		}
	}
	if bytes <= MaxList {
		return nil
	}
	err := &TooManyDevicesError{Resource: name, Devices: count, Bytes: bytes, Shared: shared, Rules: key}
	if shared > 0 {
		err.Replicas = max(2, MaxList/(bytes/count)/shared)
	}
	return err
}
