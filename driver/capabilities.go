package driver

import (
	"fmt"
	"slices"
	"strings"
)

// Capabilities is a set of purposes that a driver serves. A spec leaves out the files of the driver that serve none of
// the set. The names are those of NVIDIA_DRIVER_CAPABILITIES. It is a flag value, see Set.
type Capabilities uint8

// The capabilities.
const (
	Compute  Capabilities = 1 << iota // CUDA and OpenCL
	Utility                           // nvidia-smi and NVML
	Graphics                          // OpenGL, EGL, Vulkan, OptiX
	Video                             // encoding and decoding
	Display                           // an X server on the GPU
	NGX                               // DLSS and the like
	All      = Compute | Utility | Graphics | Video | Display | NGX
)

// capabilityNames are the names of the bits, from the lowest.
var capabilityNames = [...]string{"compute", "utility", "graphics", "video", "display", "ngx"}

const allName = "all"

// CapabilityNames are the names that ParseCapabilities accepts.
func CapabilityNames() []string { return append(slices.Clone(capabilityNames[:]), allName) }

// ParseCapabilities reads a list such as "compute,utility". An error lists the known names.
func ParseCapabilities(list string) (Capabilities, error) {
	var c Capabilities
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		i := slices.Index(capabilityNames[:], name)
		switch {
		case name == allName:
			c = All
		case i >= 0:
			c |= 1 << i
		default:
			return 0, fmt.Errorf("unknown capability %q; known are %s", name, strings.Join(CapabilityNames(), ", "))
		}
	}
	return c, nil
}

// Names are the names of the capabilities in the set; all of them together are "all".
func (c Capabilities) Names() []string {
	if c&All == All {
		return []string{allName}
	}
	var names []string
	for i, name := range capabilityNames {
		if c&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// String is the list in the form that ParseCapabilities reads.
func (c Capabilities) String() string { return strings.Join(c.Names(), ",") }

// MarshalText returns the list in the form that ParseCapabilities reads.
func (c Capabilities) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// Set is ParseCapabilities for a flag.
func (c *Capabilities) Set(list string) error {
	parsed, err := ParseCapabilities(list)
	if err == nil {
		*c = parsed
	}
	return err
}

// Type is the name of the value in a flag's help.
func (c *Capabilities) Type() string { return "capabilities" }

// Needs reports whether a container with the capabilities c needs a file that serves those in of. The zero value needs
// every file.
func (c Capabilities) Needs(of Capabilities) bool { return c == 0 || c&of != 0 }
