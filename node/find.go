package node

import (
	"errors"
	"fmt"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
)

// ErrUnknownDevice means that the host has no such device.
var ErrUnknownDevice = errors.New("the driver of this host has no device")

// FindDevice finds a GPU or a MIG device of a snapshot by its UUID or index. The title is the device's name for
// people, such as "GPU 3". The error is ErrUnknownDevice.
func FindDevice(s *gpu.Snapshot, name string) (d health.Device, title string, err error) {
	for i := range s.Devices {
		one := &s.Devices[i]
		index := fmt.Sprint(one.Index)
		if one.UUID != "" && (name == one.UUID || name == index) {
			return health.Device{
				UUID: one.UUID, GPU: one.UUID, GPUInstance: gpu.NoInstance, ComputeInstance: gpu.NoInstance,
			}, "GPU " + index, nil
		}
		for j := range one.MIG {
			m := &one.MIG[j]
			if index := fmt.Sprintf("%s:%d", index, m.Index); name == m.UUID || name == index {
				return health.Device{
					UUID: m.UUID, GPU: one.UUID, GPUInstance: m.GPUInstance, ComputeInstance: m.ComputeInstance,
				}, "MIG device " + index, nil
			}
		}
	}
	return d, "", fmt.Errorf("%w %q", ErrUnknownDevice, name)
}
