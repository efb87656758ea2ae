package driver

import (
	"fmt"
	"slices"
	"strings"
)

// Capabilities is a set of purposes for which containers use the driver. A spec leaves out driver files that serve
// none of them. The names are those of NVIDIA_DRIVER_CAPABILITIES. It is a flag value, see Set.
type Capabilities uint8

// The capabilities, by the purposes that they serve.
const (
	Compute  Capabilities = 1 << iota // CUDA and OpenCL
	Utility                           // nvidia-smi and NVML
	Graphics                          // OpenGL, EGL, Vulkan, OptiX
	Video                             // encoding and decoding
	Display                           // an X server on the GPU
	NGX                               // DLSS and the like
	All      = Compute | Utility | Graphics | Video | Display | NGX
)

// capabilityNames are the names of the bits, the lowest first.
var capabilityNames = [...]string{"compute", "utility", "graphics", "video", "display", "ngx"}

const allName = "all"

// CapabilityNames returns the names that Set accepts.
func CapabilityNames() []string { return append(slices.Clone(capabilityNames[:]), allName) }

// Set parses a list such as "compute,utility". An error lists the known names.
func (c *Capabilities) Set(list string) error {
	var parsed Capabilities
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		i := slices.Index(capabilityNames[:], name)
		switch {
		case name == allName:
			parsed = All
		case i >= 0:
			parsed |= 1 << i
		default:
			return fmt.Errorf("unknown capability %q; known are %s", name, strings.Join(CapabilityNames(), ", "))
		}
	}
	*c = parsed
	return nil
}

// String returns the list in the form that Set parses. All capabilities together are "all".
func (c Capabilities) String() string {
	if c&All == All {
		return allName
	}
	var names []string
	for i, name := range capabilityNames {
		if c&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

// MarshalText returns the list in the form that Set parses.
func (c Capabilities) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// Type returns the name of the value in a flag's help.
func (c *Capabilities) Type() string { return "capabilities" }

// Needs reports whether a container with the capabilities c needs a file that serves the capabilities `of`. If c is
// zero, every file is needed.
func (c Capabilities) Needs(of Capabilities) bool { return c == 0 || c&of != 0 }
