package launch

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"

	"tags.cncf.io/container-device-interface/pkg/parser"
)

// gpuNode matches the device nodes of single GPUs and MIG devices, and the directories that have them.
var gpuNode = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(/|/dev|/dev/nvidia[0-9]+|/dev/nvidia-caps(/.*)?|/dev/dri(/.*)?)$`)
})

// conflicts looks for options of the user by which the container can get other GPUs than the leased ones. It returns an
// error for those that ask for GPUs, and notes for those that open devices for another purpose.
func (l lease) conflicts(name string, e *engine, given []option) (notes []string, err error) {
	for _, o := range given {
		switch {
		// podman, docker and nerdctl give a privileged container all of the host's devices, and their cgroup allows all. A
		// lease promises a container that keeps to its GPUs, so who wants both must say it by a placeholder.
		case o.name == "privileged" && isTrue(o.value):
			return nil, fmt.Errorf("%s %s: the container could use all devices of the host: remove the option, or "+
				"pass the devices with a placeholder (%s), which allows it", name, o, e.placeholders())
		case l.asks(o):
			return nil, fmt.Errorf("%s %s: the container would get other GPUs than the leased ones: remove the "+
				"option, since options for the leased devices are added, or replace it by a placeholder (%s)",
				name, o, e.placeholders())
		case opens(o):
			notes = append(notes, fmt.Sprintf("%s may let the container use other devices than the leased ones", o))
		}
	}
	return notes, nil
}

// asks reports whether an option asks for GPUs.
func (l lease) asks(o option) bool {
	switch o.name {
	case "gpus":
		return true
	case "device":
		return slices.ContainsFunc(strings.Split(o.value, ","), func(device string) bool {
			node, _, _ := strings.Cut(device, ":")
			return l.isGPU(device) || gpuNode().MatchString(path.Clean(node))
		})
	case "env": // NVIDIA's runtime reads this variable
		variable, value, set := strings.Cut(o.value, "=")
		none := set && slices.Contains([]string{"", "none", "void"}, value)
		return variable == "NVIDIA_VISIBLE_DEVICES" && !none
	case "annotation": // the OCI hook reads these annotations
		return strings.HasPrefix(strings.TrimLeft(o.value, `"`), "cdi.k8s.io/")
	}
	return false
}

// isGPU reports whether a CDI name has a kind of the leased devices, or the class that vendors give their GPUs.
func (l lease) isGPU(name string) bool {
	vendor, class, _, err := parser.ParseQualifiedName(name)
	return err == nil && (class == "gpu" || slices.ContainsFunc(l.CDIDevices, func(leased string) bool {
		v, c, _ := parser.ParseDevice(leased)
		return v == vendor && c == class
	}))
}

// opens reports whether an option can open devices: the device cgroup, which rootless engines do not have, may be all
// that keeps a container from a node in its file system.
func opens(o option) bool {
	switch o.name {
	case "device-cgroup-rule":
		return true
	case "cgroups": // of podman
		return o.value == "disabled"
	case "volume":
		source, _, _ := strings.Cut(o.value, ":")
		return gpuNode().MatchString(path.Clean(source))
	case "mount":
		return slices.ContainsFunc(strings.Split(o.value, ","), func(field string) bool {
			key, source, _ := strings.Cut(field, "=")
			return (key == "source" || key == "src") && gpuNode().MatchString(path.Clean(source))
		})
	}
	return false
}
