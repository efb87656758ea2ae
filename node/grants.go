package node

import (
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/resource"
)

// withGrants returns the resources with everything that a container gets for them: CDI names, with Options.WithoutCDI
// the same as device nodes and mounts, descriptors, and the edits for clients of MPS. If another spec file defines a
// device of an extra, so that engines do not take it from our spec, containers do not get that device.
func (r *Reconciler) withGrants(
	resources []resource.Resource, d *desired, offered func(name string) bool,
) []resource.Resource {
	common := &resource.Grant{}
	devices := map[string]*specs.ContainerEdits{}
	if spec := d.hookless; spec != nil {
		addEdits(&common.WithoutCDI, &spec.ContainerEdits)
		for i := range spec.Devices {
			devices[spec.Devices[i].Name] = &spec.Devices[i].ContainerEdits
		}
	}
	for _, f := range r.files {
		extra := d.specs[f.kind]
		if f.extra == nil || extra == nil {
			continue
		}
		addEdits(&common.WithoutCDI, &extra.ContainerEdits)
		for i := range extra.Devices {
			if name := extra.Kind + "=" + extra.Devices[i].Name; offered(name) {
				common.CDIDevices = append(common.CDIDevices, name)
				addEdits(&common.WithoutCDI, &extra.Devices[i].ContainerEdits)
			}
		}
	}
	granted := slices.Clone(resources)
	for i := range granted {
		granted[i].Grant = common
		granted[i].Devices = slices.Clone(granted[i].Devices)
		for j := range granted[i].Devices {
			dev := &granted[i].Devices[j]
			dev.Grant = &resource.Grant{CDIDevices: []string{r.cdiName(dev)}}
			if edits := devices[dev.UUID]; edits != nil {
				dev.Grant.WithoutCDI = *edits
			}
			r.descriptors.addMount(&dev.Grant.Always, dev.UUID)
			if dev.MPS != nil && r.opts.MPSClient != nil {
				edits := r.opts.MPSClient(dev.UUID)
				addEdits(&dev.Grant.Always, &edits)
			}
		}
	}
	return granted
}

// addEdits adds device nodes, mounts and variables. The other parts of a spec work only with CDI.
func addEdits(to, edits *specs.ContainerEdits) {
	to.DeviceNodes = append(to.DeviceNodes, edits.DeviceNodes...)
	to.Mounts = append(to.Mounts, edits.Mounts...)
	to.Env = append(to.Env, edits.Env...)
}
