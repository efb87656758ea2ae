package hook

import (
	"bytes"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/rootfs"
)

// paramsPath is where the driver tells its parameters, on the host and in every container's /proc.
const paramsPath = "/proc/driver/nvidia/params"

const maxParams = 1 << 20 // bytes; real ones have about 1,000

// maskParams turns off ModifyDeviceFiles, by which the driver's libraries would make device nodes in a container that
// was not given them. It returns nil where there is nothing to turn off.
func maskParams(data []byte) []byte {
	const on, off = "ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0"
	lines := bytes.Split(data, []byte("\n"))
	found := false
	for i, line := range lines {
		if string(line) == on {
			lines[i] = []byte(off)
			found = true
		}
	}
	if !found {
		return nil
	}
	return bytes.Join(lines, []byte("\n"))
}

// readParams reads the host's parameters; none without a driver.
func readParams(h host.Host) ([]byte, error) {
	data, err := rootfs.ReadHostFile(h.Proc("driver", "nvidia", "params"), maxParams)
	if isMissing(err) {
		return nil, nil
	}
	return data, err
}
