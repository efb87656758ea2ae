package nvml

import (
	"context"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// identify finds out which GPUs those are that did not say it, from what the kernel's module shows without them.
func (l *Library) identify(ctx context.Context, devices []gpu.Device, h host.Host) {
	if !slices.ContainsFunc(devices, func(d gpu.Device) bool { return d.UUID == "" || d.PCIBusID == "" }) {
		return
	}
	fillAddresses(devices, gpuAddresses(h))
	ctx, cancel := context.WithTimeout(ctx, l.patience())
	defer cancel()
	for i := range devices {
		d := &devices[i]
		if d.PCIBusID == "" || d.Usable() {
			continue
		}
		if d.NUMANode == gpu.NoNUMANode {
			d.NUMANode = numaNode(h, d.PCIBusID)
		}
		if d.UUID == "" {
			l.readInformation(ctx, d, h)
		}
	}
}

// gpuUUID is a UUID as the driver writes it. One that it does not know yet has question marks in the place of digits.
var gpuUUID = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// readInformation fills in what /proc/driver/nvidia/gpus/ADDRESS/information has of a GPU's name and numbers. It is
// written by the same module whose calls hang, so it is read in a task too.
func (l *Library) readInformation(ctx context.Context, d *gpu.Device, h host.Host) {
	path := h.Proc("driver", "nvidia", "gpus", d.PCIBusID, "information")
	text, err := read(ctx, l, "information about "+d.PCIBusID, func(t *task) (string, error) {
		t.calling("read")
		return readShort(path), nil
	})
	if err != nil {
		return
	}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch {
		case key == "GPU UUID" && gpuUUID.MatchString(value):
			d.UUID = value
		case key == "Model" && d.Name == "":
			d.Name = value
		case key == "Device Minor" && d.Minor == gpu.NoMinor:
			if minor, err := strconv.Atoi(value); err == nil && minor >= 0 {
				d.Minor = minor
			}
		}
	}
}
