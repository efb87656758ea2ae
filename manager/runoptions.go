package manager

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/model"
)

// merger merges the responses for several resources into one set of run options. If two differ in a setting, the first
// one counts.
type merger struct {
	model.RunOptions
	settings map[string]setting // by the name that the setting has in messages
}

type setting struct{ value, resource string }

// runOptions merges the responses for a container's allocations, in the order of the names of the resources.
func runOptions(allocations []model.Allocation) (model.RunOptions, error) {
	m := merger{settings: map[string]setting{}}
	for _, a := range slices.SortedFunc(slices.Values(allocations), byResource) {
		var response pluginapi.ContainerAllocateResponse
		if err := proto.Unmarshal(a.Response, &response); err != nil {
			return model.RunOptions{}, fmt.Errorf("decode the recorded response for %s: %w", a.Resource, err)
		}
		if err := checkResponse(a.Resource, &response); err != nil {
			return model.RunOptions{}, err
		}
		m.add(a.Resource, &response)
	}
	slices.SortFunc(m.Mounts, func(a, b model.Mount) int { return cmp.Compare(a.ContainerPath, b.ContainerPath) })
	slices.SortFunc(m.Devices, func(a, b model.DeviceNode) int { return cmp.Compare(a.ContainerPath, b.ContainerPath) })
	return m.RunOptions, nil
}

// checkResponse returns an error if a response is not valid for any container.
func checkResponse(resource string, r *pluginapi.ContainerAllocateResponse) error {
	alone := merger{settings: map[string]setting{}}
	alone.add(resource, r)
	if err := alone.Check(); err != nil {
		return fmt.Errorf("the plugin of %s %w: %w", resource, ErrBadResponse, err)
	}
	return nil
}

func byResource(a, b model.Allocation) int { return cmp.Compare(a.Resource, b.Resource) }

func (m *merger) add(resource string, r *pluginapi.ContainerAllocateResponse) {
	m.Envs = m.merge(resource, "the environment variable", m.Envs, r.Envs)
	m.Annotations = m.merge(resource, "the annotation", m.Annotations, r.Annotations)
	for _, d := range r.Devices {
		if m.first(resource, "the device node", d.ContainerPath, d.HostPath+" "+d.Permissions) {
			node := model.DeviceNode{ContainerPath: d.ContainerPath, HostPath: d.HostPath, Permissions: d.Permissions}
			m.Devices = append(m.Devices, node)
		}
	}
	for _, d := range r.Mounts {
		value := d.HostPath
		if d.ReadOnly {
			value += " ro"
		}
		if m.first(resource, "the mount", d.ContainerPath, value) {
			mount := model.Mount{ContainerPath: d.ContainerPath, HostPath: d.HostPath, ReadOnly: d.ReadOnly}
			m.Mounts = append(m.Mounts, mount)
		}
	}
	for _, d := range r.CdiDevices {
		if m.first(resource, "the CDI device", d.Name, "") {
			m.CDIDevices = append(m.CDIDevices, d.Name)
		}
	}
}

func (m *merger) merge(resource, kind string, have, more map[string]string) map[string]string {
	for _, key := range slices.Sorted(maps.Keys(more)) {
		if m.first(resource, kind, key, more[key]) {
			if have == nil {
				have = map[string]string{}
			}
			have[key] = more[key]
		}
	}
	return have
}

// first reports whether no earlier resource has made a setting. If an earlier resource has made it differently, first
// records a conflict.
func (m *merger) first(resource, kind, key, value string) bool {
	name := fmt.Sprintf("%s %q", kind, key)
	have, ok := m.settings[name]
	if !ok {
		m.settings[name] = setting{value: value, resource: resource}
		return true
	}
	if have.value != value {
		m.Conflicts = append(m.Conflicts,
			fmt.Sprintf("%s: %q from %s is used, and %q from %s is ignored", name, have.value, have.resource, value, resource))
	}
	return false
}
