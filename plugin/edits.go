package plugin

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// visibleDevices is the variable that NVIDIA's container toolkit reads.
const visibleDevices = "NVIDIA_VISIBLE_DEVICES"

// cdiPrefix begins the keys of CDI annotations, and pluginName what follows it in ours.
const (
	cdiPrefix  = "cdi.k8s.io/"
	pluginName = "gpu-cdi-plugin"
)

// answer adds to resp what one strategy says about the devices.
func (s *server) answer(resp *v1beta1.ContainerAllocateResponse, strategy Strategy, devices []*device, p *prepared) error {
	switch strategy {
	case CDICRI:
		resp.CdiDevices = make([]*v1beta1.CDIDevice, len(devices))
		for i, d := range devices {
			resp.CdiDevices[i] = d.cdiName
		}
		for _, name := range extraNames(p.extras) {
			resp.CdiDevices = append(resp.CdiDevices, &v1beta1.CDIDevice{Name: name})
		}
	case CDIAnnotations:
		key, value := s.annotation(namesOf(devices, p.extras))
		resp.Annotations = map[string]string{key: value}
	case DeviceSpecs:
		addExtras(resp, p.extras)
		return s.fromSpec(resp, devices, p.spec)
	case Envvar:
		setExtras(resp, p.extras)
		setEnv(resp, visibleDevices, strings.Join(namesIn(devices), ","))
	}
	return nil
}

// annotation names the devices for the runtime. A container that has devices of several resources gets an annotation for
// each, so the key is the resource's own. The same devices always have the same one.
func (s *server) annotation(names []string) (key, value string) {
	value = strings.Join(names, ",")
	sum := sha256.Sum256([]byte(s.name() + "\n" + value))
	return cmp.Or(s.answers.AnnotationPrefix, cdiPrefix) + pluginName + "_" + hex.EncodeToString(sum[:8]), value
}

// namesOf are the qualified CDI names of the devices and then of the extras.
func namesOf(devices []*device, extras []*specs.Spec) []string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.cdiName.Name
	}
	return append(names, extraNames(extras)...)
}

func namesIn(devices []*device) []string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.name
	}
	return names
}

func uuids(devices []*device) []string {
	all := make([]string, len(devices))
	for i, d := range devices {
		all[i] = d.UUID
	}
	return all
}

func setEnv(resp *v1beta1.ContainerAllocateResponse, name, value string) {
	if resp.Envs == nil {
		resp.Envs = map[string]string{}
	}
	resp.Envs[name] = value
}

// fromSpec adds the device nodes, mounts and variables that the CDI spec has for the devices.
func (s *server) fromSpec(resp *v1beta1.ContainerAllocateResponse, devices []*device, spec *specs.Spec) error {
	if spec == nil {
		return status.Errorf(codes.Unavailable, "allocate %s: there is no CDI spec to take device nodes from", s.name())
	}
	missing := uuids(devices)
	addEdits(resp, &spec.ContainerEdits)
	for i := range spec.Devices {
		if at := slices.Index(missing, spec.Devices[i].Name); at >= 0 {
			missing = slices.Delete(missing, at, at+1)
			addEdits(resp, &spec.Devices[i].ContainerEdits)
		}
	}
	if len(missing) > 0 {
		return status.Errorf(codes.Unavailable, "allocate %s: the CDI spec has no device %s", s.name(), strings.Join(missing, ", "))
	}
	return nil
}

// addEdits adds edits without what is there already.
func addEdits(resp *v1beta1.ContainerAllocateResponse, edits *specs.ContainerEdits) {
	for _, n := range edits.DeviceNodes {
		if !slices.ContainsFunc(resp.Devices, func(d *v1beta1.DeviceSpec) bool { return d.ContainerPath == n.Path }) {
			resp.Devices = append(resp.Devices, deviceSpec(n))
		}
	}
	for _, m := range edits.Mounts {
		if !slices.ContainsFunc(resp.Mounts, func(o *v1beta1.Mount) bool { return o.ContainerPath == m.ContainerPath }) {
			resp.Mounts = append(resp.Mounts, &v1beta1.Mount{
				ContainerPath: m.ContainerPath, HostPath: m.HostPath, ReadOnly: slices.Contains(m.Options, "ro"),
			})
		}
	}
	for _, e := range edits.Env {
		// "void" tells NVIDIA's own runtime to keep off; envvar, asked for beside this, wants it to work.
		name, value, _ := strings.Cut(e, "=")
		if _, set := resp.Envs[name]; !set {
			setEnv(resp, name, value)
		}
	}
}

// deviceSpec is a device node of a CDI spec. What the spec leaves out has CDI's own default.
func deviceSpec(n *specs.DeviceNode) *v1beta1.DeviceSpec {
	d := &v1beta1.DeviceSpec{ContainerPath: n.Path, HostPath: n.HostPath, Permissions: n.Permissions}
	if d.HostPath == "" {
		d.HostPath = n.Path
	}
	if d.Permissions == "" {
		d.Permissions = "rwm"
	}
	return d
}
