package plugin

import (
	"strings"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// imexClass is the class of IMEX channels, of which NVIDIA's container toolkit wants to know the numbers.
const (
	imexClass    = "imex-channel"
	imexChannels = "NVIDIA_IMEX_CHANNELS"
)

// extraVariables are what NVIDIA's container toolkit reads, by the class of the extra.
var extraVariables = map[string]string{
	"gds":      "NVIDIA_GDS",
	"gdrcopy":  "NVIDIA_GDRCOPY",
	"mofed":    "NVIDIA_MOFED",
	"nvswitch": "NVIDIA_NVSWITCH",
}

func (a *Answers) extras() []*specs.Spec {
	if a.Extras == nil {
		return nil
	}
	return a.Extras()
}

// spec is what device nodes are taken from, or nil.
func (a *Answers) spec() *specs.Spec {
	if a.Spec == nil {
		return nil
	}
	return a.Spec()
}

// extraNames are the qualified names of all devices of the extras.
func extraNames(extras []*specs.Spec) []string {
	var names []string
	for _, spec := range extras {
		for i := range spec.Devices {
			names = append(names, spec.Kind+"="+spec.Devices[i].Name)
		}
	}
	return names
}

// addExtras adds the device nodes and mounts of the extras.
func addExtras(resp *v1beta1.ContainerAllocateResponse, extras []*specs.Spec) {
	for _, spec := range extras {
		addEdits(resp, &spec.ContainerEdits)
		for i := range spec.Devices {
			addEdits(resp, &spec.Devices[i].ContainerEdits)
		}
	}
}

// setExtras sets the variables for the extras.
func setExtras(resp *v1beta1.ContainerAllocateResponse, extras []*specs.Spec) {
	for _, spec := range extras {
		_, class, _ := strings.Cut(spec.Kind, "/")
		if class == imexClass {
			var numbers []string
			for i := range spec.Devices {
				numbers = append(numbers, spec.Devices[i].Name)
			}
			setEnv(resp, imexChannels, strings.Join(numbers, ","))
		} else if name := extraVariables[class]; name != "" {
			setEnv(resp, name, "enabled")
		}
	}
}
