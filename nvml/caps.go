package nvml

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
)

// maxMinors bounds the file of minors, in bytes. For eight GPUs with seven GPU instances of seven compute instances
// each, it has less than 20 KB.
const maxMinors = 1 << 20

// capMinors maps the name of a capability, such as "gpu0/gi1/ci0/access", to the minor number of its device node
// /dev/nvidia-caps/nvidia-capN.
type capMinors map[string]int

// readCapMinors reads the host's minors. A host without the file has none.
func readCapMinors(h host.Host) (capMinors, error) {
	path := h.Proc("driver", "nvidia-caps", "mig-minors")
	data, err := fileio.ReadFile(path, maxMinors)
	if errors.Is(err, os.ErrNotExist) {
		return capMinors{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read MIG capabilities: %w", err)
	}
	minors, err := parseCapMinors(string(data))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return minors, nil
}

// parseCapMinors parses lines that have a name and a number.
func parseCapMinors(text string) (capMinors, error) {
	minors := capMinors{}
	for i, line := range strings.Split(text, "\n") {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 2 {
			return nil, fmt.Errorf("line %d: want a name and a number", i+1)
		}
		minor, err := strconv.ParseUint(fields[1], 10, 20) // the kernel's minors have 20 bits
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		minors[fields[0]] = int(minor)
	}
	return minors, nil
}

// minor returns the minor number of a capability, or gpu.NoMinor.
func (c capMinors) minor(format string, ids ...any) int {
	if n, ok := c[fmt.Sprintf(format, ids...)]; ok {
		return n
	}
	return gpu.NoMinor
}

// addCapMinors adds to the MIG devices of each GPU the minors of the device nodes that grant access to them. If the
// minors cannot be read, GPUs with MIG devices get an error.
func addCapMinors(h host.Host, devices []gpu.Device) {
	if !slices.ContainsFunc(devices, func(d gpu.Device) bool { return len(d.MIG) > 0 }) {
		return
	}
	caps, err := readCapMinors(h)
	for i := range devices {
		d := &devices[i]
		if len(d.MIG) > 0 && d.Error == "" && err != nil {
			d.Error = err.Error()
		}
		for j := range d.MIG {
			m := &d.MIG[j]
			m.GPUInstanceCap = caps.minor("gpu%d/gi%d/access", d.Minor, m.GPUInstance)
			m.ComputeInstanceCap = caps.minor("gpu%d/gi%d/ci%d/access", d.Minor, m.GPUInstance, m.ComputeInstance)
		}
	}
}
