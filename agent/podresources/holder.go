package podresources

import (
	"fmt"
	"strings"

	"gpu-cdi-plugin/resource"
)

// Holder is a container that holds devices, of a device plugin or by a ResourceClaim.
type Holder struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Devices are device plugin IDs: the UUID of a GPU or MIG device, or "UUID::n" for a replica.
	Devices []string `json:"devices"`
	// ByResource has the same IDs by resource.
	ByResource map[string][]string `json:"-"`
	// Claims are the ResourceClaims of the container, sorted by name.
	Claims []Claim `json:"-"`
}

// Claim is a ResourceClaim of a container.
type Claim struct {
	Name string // like "default/claim-1"
	// Devices are the names of the devices in the API by DRA driver, sorted.
	Devices map[string][]string
}

// DRADriver is the name of our DRA driver.
const DRADriver = "gpu.nvidia.com"

// DeviceName returns the name that our DRA driver gives a device in the API, where names are lower case.
func DeviceName(uuid string) string { return strings.ToLower(uuid) }

// String names the container, like "container main of pod default/train".
func (h *Holder) String() string {
	return fmt.Sprintf("container %s of pod %s/%s", h.Container, h.Namespace, h.Pod)
}

// UUIDs returns the UUIDs of the devices that the container holds. If it holds several replicas of a device, the UUID
// occurs once for each.
func (h *Holder) UUIDs() []string {
	uuids := make([]string, len(h.Devices))
	for i, id := range h.Devices {
		uuids[i] = resource.UUIDOf(id)
	}
	return uuids
}
