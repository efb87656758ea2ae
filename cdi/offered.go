package cdi

import (
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
)

// NamesGPUs reports whether the spec has devices named by the UUID of a GPU or MIG device, so that a driver can be asked
// for them.
func NamesGPUs(spec *specs.Spec) bool {
	for i := range spec.Devices {
		if isUUID(spec.Devices[i].Name) {
			return true
		}
	}
	return false
}

func isUUID(name string) bool {
	return strings.HasPrefix(name, "GPU-") || strings.HasPrefix(name, "MIG-")
}

// ValidateDevices checks that a node has the GPUs and MIG devices that a spec names by their UUID, and that containers
// can be given them. It is pure; Validate checks the rest.
func ValidateDevices(spec *specs.Spec, s *gpu.Snapshot) []Problem {
	why := unusable(s)
	var problems []Problem
	for i := range spec.Devices {
		name := spec.Devices[i].Name
		reason, known := why[name]
		if !known {
			reason = "the driver has no such device"
		}
		if isUUID(name) && reason != "" {
			problems = append(problems, Problem{deviceNamed(name), reason})
		}
	}
	return problems
}

// unusable maps the UUID of each device of a node to why containers cannot be given it, or to "".
func unusable(s *gpu.Snapshot) map[string]string {
	why := map[string]string{}
	for i := range s.Devices {
		d := &s.Devices[i]
		switch {
		case !d.Usable():
			why[d.UUID] = "the GPU cannot be read: " + d.Error
		case d.MIGEnabled:
			why[d.UUID] = "the GPU is in MIG mode: only its MIG devices can be used"
		default:
			why[d.UUID] = ""
		}
		for _, m := range d.MIG {
			why[m.UUID] = ""
		}
	}
	return why
}
