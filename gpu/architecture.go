package gpu

import "strings"

// architectures are the names of NVIDIA's architectures by compute capability, or by its major part.
var architectures = map[string]string{
	"1": "Tesla", "2": "Fermi", "3": "Kepler", "5": "Maxwell", "6": "Pascal", "7": "Volta", "7.5": "Turing",
	"8": "Ampere", "8.9": "Ada Lovelace", "9": "Hopper", "10": "Blackwell", "12": "Blackwell", "13": "Rubin",
}

// Architecture returns the name of the GPU's architecture, such as "Hopper". It is empty if unknown.
func (d *Device) Architecture() string {
	if name, known := architectures[d.ComputeCapability]; known {
		return name
	}
	major, _, _ := strings.Cut(d.ComputeCapability, ".")
	return architectures[major]
}
