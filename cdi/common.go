package cdi

import (
	"fmt"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/hookargs"
)

// hookProgram is what the hook is called as.
const hookProgram = "prestart-hook"

// hookTimeout is in seconds; the hook takes milliseconds, but on a machine under load.
const hookTimeout = 30

// hookEnv is the hook's whole environment. Without one, a runtime gives it the container's, and with that LD_PRELOAD
// (CVE-2025-23266).
const hookEnv = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"

// noInjection tells nvidia-container-runtime that the container has its GPUs already.
const noInjection = "NVIDIA_VISIBLE_DEVICES=void"

// fileOptions are the mount options of files, socketOptions those of sockets: connecting to one on a read-only mount
// fails.
func fileOptions() []string { return []string{"ro", "nosuid", "nodev", "rbind", "rprivate"} }

func socketOptions() []string { return []string{"nosuid", "nodev", "noexec", "rbind", "rprivate"} }

// commonEdits are what every container gets once, however many devices.
func (g *generator) commonEdits(s *gpu.Snapshot) (specs.ContainerEdits, error) {
	hook, err := g.hook(s)
	if err != nil {
		return specs.ContainerEdits{}, err
	}
	var control []Node
	for _, c := range controlNodes {
		if n, ok := g.nodes["/dev/"+c.name]; ok && g.options.Capabilities.serves(n.Capabilities) {
			control = append(control, n)
		}
	}
	return specs.ContainerEdits{
		Env:         []string{noInjection},
		DeviceNodes: deviceNodes(control),
		Mounts:      g.mounts(),
		Hooks:       []*specs.Hook{hook},
	}, nil
}

func (g *generator) libraries() []Library {
	var list []Library
	for _, l := range g.driver.Libraries {
		if g.options.Capabilities.serves(l.Capabilities) {
			list = append(list, l)
		}
	}
	return list
}

// mounts are sorted by the path in the container, each of which occurs once.
func (g *generator) mounts() []*specs.Mount {
	var list []*specs.Mount
	for _, l := range g.libraries() {
		list = append(list, &specs.Mount{HostPath: l.HostPath, ContainerPath: l.Path, Options: fileOptions()})
	}
	for _, f := range g.driver.Files {
		if !g.options.Capabilities.serves(f.Capabilities) {
			continue
		}
		options := fileOptions()
		if f.Kind == KindSocket {
			options = socketOptions()
		}
		list = append(list, &specs.Mount{HostPath: f.HostPath, ContainerPath: f.Path, Options: options})
	}
	slices.SortStableFunc(list, func(a, b *specs.Mount) int { return strings.Compare(a.ContainerPath, b.ContainerPath) })
	return slices.CompactFunc(list, func(a, b *specs.Mount) bool { return a.ContainerPath == b.ContainerPath })
}

// hook is the one hook. Its arguments must be such that the hook reads from them what was meant.
func (g *generator) hook(s *gpu.Snapshot) (*specs.Hook, error) {
	args := g.hookWork(s).Args()
	if _, err := hookargs.Parse(args); err != nil {
		return nil, fmt.Errorf("tell the hook its work: %w", err)
	}
	timeout := hookTimeout
	return &specs.Hook{
		HookName: "createContainer",
		Path:     g.options.HookPath,
		Args:     append([]string{hookProgram}, args...),
		Env:      []string{hookEnv},
		Timeout:  &timeout,
	}, nil
}

func (g *generator) hookWork(s *gpu.Snapshot) *hookargs.CreateContainer {
	c := g.options.Capabilities
	work := &hookargs.CreateContainer{Params: true, EGLProfile: c.serves(Graphics | Display)}
	if c.serves(usesCUDA) && isVersion(g.driver.Version) {
		work.DriverVersion = g.driver.Version
	}
	if c.serves(usesCUDA) && isVersion(s.CUDAVersion) {
		work.CUDAVersion = s.CUDAVersion
	}
	for _, l := range g.libraries() {
		if l.SONAME != "" {
			work.Libraries = append(work.Libraries, hookargs.Library{SONAME: l.SONAME, Path: l.Path})
		}
		for _, link := range l.Links {
			work.Links = append(work.Links, hookargs.Link{Path: link.Path, Target: link.Target})
		}
	}
	for i := range s.Devices {
		address := s.Devices[i].PCIBusID
		if !g.drm[address] {
			continue
		}
		dri := hookargs.DRI{PCIBusID: address}
		for _, n := range g.driver.DRM[address] {
			dri.Nodes = append(dri.Nodes, strings.TrimPrefix(n.Path, "/dev/dri/"))
		}
		work.DRI = append(work.DRI, dri)
	}
	return work
}
