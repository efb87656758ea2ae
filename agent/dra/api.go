package dra

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"
)

// The objects of the API group resource.k8s.io/v1, with the fields that this package needs.
const (
	apiVersion = "resource.k8s.io/v1"
	apiPath    = "/apis/" + apiVersion
)

// Slice is a ResourceSlice.
type Slice struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Metadata   Metadata  `json:"metadata"`
	Spec       SliceSpec `json:"spec"`
}

// Metadata is an ObjectMeta.
type Metadata struct {
	Name            string  `json:"name"`
	UID             string  `json:"uid,omitempty"`
	ResourceVersion string  `json:"resourceVersion,omitempty"`
	Owners          []Owner `json:"ownerReferences,omitempty"`
}

// Owner is an OwnerReference.
type Owner struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Name       string `json:"name"`
	UID        string `json:"uid"`
	Controller bool   `json:"controller,omitempty"`
}

// SliceSpec is a ResourceSliceSpec.
type SliceSpec struct {
	Driver   string          `json:"driver"`
	NodeName string          `json:"nodeName"`
	Pool     Pool            `json:"pool"`
	Devices  bounded[Device] `json:"devices,omitempty"`
}

// Pool is a ResourcePool: all slices of a node. Consumers use the slices of the highest generation once there are
// SliceCount of them.
type Pool struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	SliceCount int    `json:"resourceSliceCount"`
}

// Device is a device of a slice.
type Device struct {
	// Name is a DNS label, unique in the pool.
	Name       string               `json:"name"`
	Attributes map[string]Attribute `json:"attributes,omitempty"`
	Capacity   map[string]Capacity  `json:"capacity,omitempty"`
	Taints     []Taint              `json:"taints,omitempty"`
	// Shared says that several claims can have parts of the capacity.
	Shared bool `json:"allowMultipleAllocations,omitempty"`
}

// Attribute is a DeviceAttribute, which has one value.
type Attribute struct {
	String  *string `json:"string,omitempty"`
	Int     *int64  `json:"int,omitempty"`
	Version *string `json:"version,omitempty"` // of semver.org
}

// Capacity is a DeviceCapacity. Quantities are texts such as "80Gi".
type Capacity struct {
	Value  string         `json:"value"`
	Policy *RequestPolicy `json:"requestPolicy,omitempty"`
}

// RequestPolicy is a CapacityRequestPolicy: how much of a capacity a claim can have.
type RequestPolicy struct {
	Default string `json:"default"` // for a claim that does not say how much it needs
	Range   Range  `json:"validRange"`
}

// Range is a CapacityRequestPolicyRange. Amounts are rounded up to Min plus a number of Steps.
type Range struct {
	Min  string `json:"min"`
	Step string `json:"step"`
}

// Taint is a DeviceTaint. Without TimeAdded the API server adds the present time.
type Taint struct {
	Key       string     `json:"key"`
	Value     string     `json:"value,omitempty"`
	Effect    string     `json:"effect"`
	TimeAdded *time.Time `json:"timeAdded,omitempty"`
}

// noSchedule is the effect of all taints. NoExecute would evict pods that may be able to finish or to save their work.
const noSchedule = "NoSchedule"

// bounded is a list of the API server. A longer one than maxItems is an error, before it takes memory: an object of 16
// MB can have 5 million items.
type bounded[T any] []T

// maxItems is far above the limits of the API, which are at most 256.
const maxItems = 1_000

// UnmarshalJSON implements json.Unmarshaler.
func (l *bounded[T]) UnmarshalJSON(data []byte) error {
	*l = nil
	if string(data) == "null" {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if begin, err := d.Token(); err != nil || begin != json.Delim('[') {
		return fmt.Errorf("want a list, got %.20s", data)
	}
	for d.More() {
		if len(*l) == maxItems {
			return fmt.Errorf("a list has more than %d items", maxItems)
		}
		var item T
		if err := d.Decode(&item); err != nil {
			return err
		}
		*l = append(*l, item)
	}
	return nil
}

// The limits of the API.
const (
	maxDevices = 64 // in a slice in which a device has taints; without any it is 128
	maxName    = 63 // of a device, in bytes
	maxValue   = 64 // of an attribute, in bytes
	maxLabel   = 63 // of the value of a taint, in bytes
	maxObject  = 253
)
