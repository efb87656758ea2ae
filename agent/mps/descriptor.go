package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/resource"
)

const (
	descriptorSuffix = ".json"
	maxDescriptor    = 64 << 10 // in bytes
)

// readLimits returns the limits in a GPU's descriptor, or nil if MPS does not share the GPU. The service writes the
// descriptor for containers (node.Descriptor).
func readLimits(descriptors, uuid string) (*resource.MPSLimits, error) {
	path := filepath.Join(descriptors, uuid+descriptorSuffix)
	data, err := fileio.ReadFile(path, maxDescriptor)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // the GPU is not shared
	}
	if err != nil {
		return nil, fmt.Errorf("read the limits of %s: %w", uuid, err)
	}
	limits, err := parseLimits(data)
	if err != nil {
		return nil, fmt.Errorf("read the limits in %s: %w", path, err)
	}
	return limits, nil
}

func parseLimits(data []byte) (*resource.MPSLimits, error) {
	var d struct {
		Sharing struct {
			MPS *resource.MPSLimits `json:"mps"`
		} `json:"sharing"`
	}
	if err := json.Unmarshal(data, &d); err != nil {
		return nil, err
	}
	m := d.Sharing.MPS
	if m != nil && (m.MemoryBytes>>20 == 0 || m.ThreadPercent < 0 || m.ThreadPercent > 100) {
		return nil, fmt.Errorf("want at least 1 MiB and at most 100 %% of the threads, got %d bytes and %d %%",
			m.MemoryBytes, m.ThreadPercent)
	}
	return m, nil
}

// sharedGPUs returns the UUIDs of the GPUs that have a descriptor with limits. Descriptors that cannot be read are
// left out: the process that runs the GPU's daemon reports them.
func sharedGPUs(descriptors string) ([]string, error) {
	entries, err := os.ReadDir(descriptors)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the GPUs that MPS shares: %w", err)
	}
	var uuids []string
	for _, e := range entries {
		uuid, ok := strings.CutSuffix(e.Name(), descriptorSuffix)
		if !ok || !isUUID(uuid) {
			continue
		}
		if limits, err := readLimits(descriptors, uuid); limits != nil || err != nil {
			uuids = append(uuids, uuid)
		}
	}
	return uuids, nil
}
