package nvml

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
)

// maxMinors is how much of the file with the capabilities' minors is read. Eight GPUs with seven devices of seven
// instances each make less than 20 KB.
const maxMinors = 1 << 20

// capMinors maps the name of a capability, such as "gpu0/gi1/ci0/access", to the minor number of its device node
// /dev/nvidia-caps/nvidia-capN.
type capMinors map[string]int

// readCapMinors reads the minors of the host. A host without the file has none.
func readCapMinors(h host.Host) (capMinors, error) {
	f, err := os.Open(h.Proc("driver", "nvidia-caps", "mig-minors"))
	if errors.Is(err, os.ErrNotExist) {
		return capMinors{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read MIG capabilities: %w", err)
	}
	defer f.Close()
	minors, err := parseCapMinors(io.LimitReader(f, maxMinors))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	return minors, nil
}

// parseCapMinors reads lines of a name and a number.
func parseCapMinors(r io.Reader) (capMinors, error) {
	minors := capMinors{}
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		fields := strings.Fields(lines.Text())
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 2 {
			return nil, fmt.Errorf("line %d: want a name and a number", n)
		}
		minor, err := strconv.ParseUint(fields[1], 10, 20) // the kernel's minors have 20 bits
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		minors[fields[0]] = int(minor)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	return minors, nil
}

// gpuInstance is the minor for a GPU instance of the GPU with that device minor, or gpu.NoMinor.
func (c capMinors) gpuInstance(minor, gi int) int {
	return c.minor(fmt.Sprintf("gpu%d/gi%d/access", minor, gi))
}

// computeInstance is the minor for a compute instance, or gpu.NoMinor.
func (c capMinors) computeInstance(minor, gi, ci int) int {
	return c.minor(fmt.Sprintf("gpu%d/gi%d/ci%d/access", minor, gi, ci))
}

func (c capMinors) minor(name string) int {
	if n, ok := c[name]; ok {
		return n
	}
	return gpu.NoMinor
}
