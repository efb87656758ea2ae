package plugin

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/resource"
)

// usedSlices returns how many compute slices of each GPU, by UUID, pods hold as MIG devices of resources other than
// `except`. The kubelet's request does not have the devices of other resources, so they are read from the kubelet's
// checkpoint. Until its next allocation, the checkpoint may contain a pod that has ended. If there is no checkpoint,
// the result is empty.
func (p *Plugin) usedSlices(except string) (map[string]int, error) {
	allocated, err := allocatedDevices(filepath.Join(cmp.Or(p.opts.Dir, v1beta1.DevicePluginPath), kubelet.CheckpointName))
	if err != nil {
		return nil, fmt.Errorf("read which devices pods have: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	used := map[string]int{}
	for name, e := range p.endpoints {
		if name == except {
			continue
		}
		counted := map[string]bool{} // UUIDs of MIG devices: pods may hold several replicas of one
		devices := e.server.list.Load().resource.Devices
		for i := range devices {
			if d := &devices[i]; allocated[d.ID] && !counted[d.UUID] {
				counted[d.UUID] = true
				used[d.Parent] += computeSlices(d)
			}
		}
	}
	return used, nil
}

// computeSlices returns the number with which the profile's name of a MIG device begins, which is its number of
// compute slices: "1c.3g.40gb" has 1, "2g.20gb" has 2. For a whole GPU it returns 0.
func computeSlices(d *resource.Device) int {
	number := d.Profile[:len(d.Profile)-len(strings.TrimLeft(d.Profile, "0123456789"))]
	n, _ := strconv.Atoi(number) // 0 if there is no number
	return n
}

// maxCheckpoint bounds a checkpoint, in bytes. The entry of a pod has a few kilobytes.
const maxCheckpoint = 64 << 20

// allocatedDevices reads from a kubelet's checkpoint the IDs of the devices that pods hold. If there is no checkpoint,
// the result is empty.
func allocatedDevices(path string) (map[string]bool, error) {
	content, err := fileio.ReadFile(path, maxCheckpoint)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]bool{}, nil
	}
	if err != nil {
		return nil, err
	}
	allocated, err := kubelet.DeviceIDs(content)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return allocated, nil
}
