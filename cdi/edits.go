package cdi

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
)

const (
	// nodePermissions is what the device cgroup allows: everything except mknod, since the engine makes the device
	// nodes.
	nodePermissions = "rw"
	// hookProgram is the first argument of the hook, its own name.
	hookProgram = "prestart-hook"
	// hookTimeout is in seconds. The hook takes milliseconds, but the machine may be busy.
	hookTimeout = 30
	// hookEnv is the hook's whole environment. If it were empty, a runtime would give the hook the container's
	// environment, including LD_PRELOAD (CVE-2025-23266).
	hookEnv = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
	// noInjection keeps nvidia-container-runtime from adding GPUs.
	noInjection = "NVIDIA_VISIBLE_DEVICES=void"
)

// fileOptions returns the mount options of files.
func fileOptions() []string { return []string{"ro", "nosuid", "nodev", "rbind", "rprivate"} }

// socketOptions returns the mount options of sockets. They lack "ro": connecting to a socket on a read-only mount
// fails.
func socketOptions() []string { return []string{"nosuid", "nodev", "noexec", "rbind", "rprivate"} }

// commonEdits returns the edits that every container gets once, whatever the number of its devices.
func commonEdits(s *gpu.Snapshot, d *driver.Driver, o Options, devices []namedDevice) (specs.ContainerEdits, error) {
	var control []driver.DeviceNode
	for _, n := range d.Control {
		if o.Capabilities.Needs(n.Capabilities) {
			control = append(control, n)
		}
	}
	var mounts []*specs.Mount
	var libraries []driver.Library
	for _, l := range d.Libraries {
		if o.Capabilities.Needs(l.Capabilities) {
			libraries = append(libraries, l)
			mounts = append(mounts, &specs.Mount{HostPath: l.HostPath, ContainerPath: l.Path, Options: fileOptions()})
		}
	}
	for _, f := range d.Files {
		if !o.Capabilities.Needs(f.Capabilities) {
			continue
		}
		options := fileOptions()
		if f.Kind == driver.KindSocket {
			options = socketOptions()
		}
		mounts = append(mounts, &specs.Mount{HostPath: f.HostPath, ContainerPath: f.Path, Options: options})
	}
	if o.WithoutHooks {
		mounts = append(mounts, nameMounts(libraries)...)
	}
	byPath := func(a, b *specs.Mount) int { return strings.Compare(a.ContainerPath, b.ContainerPath) }
	slices.SortStableFunc(mounts, byPath)
	mounts = slices.CompactFunc(mounts, func(a, b *specs.Mount) bool { return byPath(a, b) == 0 })

	edits := specs.ContainerEdits{Env: []string{noInjection}, DeviceNodes: deviceNodes(control), Mounts: mounts}
	if o.WithoutHooks {
		return edits, nil
	}
	args := hookWork(s, d, o.Capabilities, libraries, devices).Args()
	if _, err := hookargs.Parse(args); err != nil { // a separator in a SONAME or path would change the meaning
		return specs.ContainerEdits{}, fmt.Errorf("write the arguments of the hook: %w", err)
	}
	edits.Hooks = []*specs.Hook{{
		HookName: "createContainer",
		Path:     o.HookPath,
		Args:     append([]string{hookProgram}, args...),
		Env:      []string{hookEnv},
		Timeout:  new(hookTimeout),
	}}
	return edits, nil
}

// nameMounts returns mounts of the libraries in place of what the hook does for dynamic loaders. A mount cannot make a
// symbolic link, so the library itself is mounted at each link's path; loaders recognise the file that they have
// already loaded under another name. Without an entry in the loader's cache a library is found only in the directories
// that the image's loader searches. Which those are depends on the image, so a library is mounted in all of them, under
// its SONAME and under the other names that programs load.
func nameMounts(libraries []driver.Library) []*specs.Mount {
	var mounts []*specs.Mount
	for _, l := range libraries {
		add := func(at string) {
			mounts = append(mounts, &specs.Mount{HostPath: l.HostPath, ContainerPath: at, Options: fileOptions()})
		}
		for _, link := range l.Links {
			add(link.Path)
		}
		if l.SONAME == "" { // it is loaded by its path
			continue
		}
		for _, dir := range host.LoaderDirs() {
			add(path.Join(dir, l.SONAME))
			for _, link := range l.Links {
				if path.Dir(link.Path) == path.Dir(l.Path) {
					add(path.Join(dir, path.Base(link.Path)))
				}
			}
		}
	}
	return mounts
}

// hookWork returns what the hook does in every container.
func hookWork(
	s *gpu.Snapshot, d *driver.Driver, c driver.Capabilities, libraries []driver.Library, devices []namedDevice,
) *hookargs.CreateContainer {
	work := &hookargs.CreateContainer{Params: true, EGLProfile: c.Needs(driver.Graphics | driver.Display)}
	if c.Needs(driver.UsesCUDA) && driver.IsVersion(d.Version) {
		work.DriverVersion = d.Version
	}
	if c.Needs(driver.UsesCUDA) && driver.IsVersion(s.CUDAVersion) {
		work.CUDAVersion = s.CUDAVersion
	}
	for _, l := range libraries {
		if l.SONAME != "" {
			work.Libraries = append(work.Libraries, hookargs.Library{SONAME: l.SONAME, Path: l.Path})
		}
		for _, link := range l.Links {
			work.Links = append(work.Links, hookargs.Link{Path: link.Path, Target: link.Target})
		}
	}
	for i := range s.Devices {
		address := s.Devices[i].PCIBusID
		if !slices.ContainsFunc(devices, func(n namedDevice) bool { return address != "" && n.drm == address }) {
			continue
		}
		dri := hookargs.DRI{PCIBusID: address}
		for _, n := range d.DRM[address] {
			dri.Nodes = append(dri.Nodes, strings.TrimPrefix(n.Path, "/dev/dri/"))
		}
		work.DRI = append(work.DRI, dri)
	}
	return work
}

// deviceNodes returns the device nodes sorted by path. They have no device numbers: those of nvidia-uvm and
// nvidia-caps are dynamic, so a spec with them would be wrong after a reboot.
func deviceNodes(nodes []driver.DeviceNode) []*specs.DeviceNode {
	nodes = slices.Clone(nodes)
	slices.SortStableFunc(nodes, func(a, b driver.DeviceNode) int { return strings.Compare(a.Path, b.Path) })
	var list []*specs.DeviceNode
	for _, n := range nodes {
		dn := &specs.DeviceNode{Path: n.Path, Permissions: nodePermissions, FileMode: containerMode(n)}
		if n.HostPath != n.Path {
			dn.HostPath = n.HostPath
		}
		list = append(list, dn)
	}
	return list
}

// containerMode returns the mode of a device node in the container, or nil for the host's mode.
//
// DRM nodes are for groups of the host ("video", "render") that a container does not have. So any user of a container
// that has the GPU may use them: the device cgroup grants or denies access. An additional group would do too, but
// engines that read only CDI 0.5.0, such as podman 4, do not know it.
func containerMode(n driver.DeviceNode) *fs.FileMode {
	const all = fs.FileMode(0o666)
	if n.Capabilities != driver.UsesDRM || n.Mode&all == all {
		return nil
	}
	return new(all)
}

// HookPaths returns the paths of a spec's hooks, each once.
func HookPaths(spec *specs.Spec) []string {
	hooks := slices.Clone(spec.ContainerEdits.Hooks)
	for i := range spec.Devices {
		hooks = append(hooks, spec.Devices[i].ContainerEdits.Hooks...)
	}
	var paths []string
	for _, h := range hooks {
		if !slices.Contains(paths, h.Path) {
			paths = append(paths, h.Path)
		}
	}
	return paths
}
