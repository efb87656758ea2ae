package hook

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/hook/rootfs"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
)

const (
	driDir = "/dev/dri"
	// profilePath is a file that the driver's EGL reads. NVIDIA's toolkit uses the same name.
	profilePath = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
	// paramsPath is the file with the driver's parameters, on the host and in each container's /proc.
	paramsPath = "/proc/driver/nvidia/params"

	maxNodes  = 10000   // in a container's /dev
	maxParams = 1 << 20 // bytes; real ones have about 1,000
)

// findNodes reports, for each of the GPUs' device nodes in /dev/dri, whether the container has it.
func findNodes(root *rootfs.Root, gpus []hookargs.DRI) map[string]bool {
	nodes := map[string]bool{}
	for _, gpu := range gpus {
		for _, node := range gpu.Nodes {
			info, err := root.Lstat(path.Join(driDir, node))
			nodes[node] = err == nil && info.Mode()&fs.ModeCharDevice != 0
		}
	}
	return nodes
}

// driLinks returns links in /dev/dri/by-path to the container's device nodes, with the names that udev uses on a host.
func driLinks(gpus []hookargs.DRI, nodes map[string]bool) []hookargs.Link {
	var links []hookargs.Link
	for _, gpu := range gpus {
		for _, node := range gpu.Nodes {
			kind := ""
			switch {
			case strings.HasPrefix(node, "card"):
				kind = "card"
			case strings.HasPrefix(node, "renderD"):
				kind = "render"
			}
			if nodes[node] && kind != "" {
				name := "pci-" + gpu.PCIBusID + "-" + kind
				links = append(links, hookargs.Link{Path: path.Join(driDir, "by-path", name), Target: "../" + node})
			}
		}
	}
	return links
}

// findMinors returns the minor numbers of the GPUs' device nodes /dev/nvidiaN in the container.
func findMinors(root *rootfs.Root) ([]uint32, error) {
	names, err := root.ReadDir("/dev", maxNodes)
	if isMissing(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var minors []uint32
	for _, name := range names {
		number, ok := strings.CutPrefix(name, "nvidia")
		if !ok || number == "" || strings.Trim(number, "0123456789") != "" {
			continue
		}
		info, err := root.Lstat(path.Join("/dev", name))
		if err != nil || info.Mode()&fs.ModeCharDevice == 0 {
			continue
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			minors = append(minors, unix.Minor(st.Rdev))
		}
	}
	return minors, nil
}

// eglProfile returns the application profile that limits EGL to GPUs with these minor numbers, or nil if no number is
// below 64: the driver reads a mask of 64 bits.
func eglProfile(minors []uint32) []byte {
	var mask uint64
	for _, m := range minors {
		if m < 64 {
			mask |= 1 << m
		}
	}
	if mask == 0 {
		return nil
	}
	return fmt.Appendf(nil, `{"profiles":[{"name":"_container_","settings":["EGLVisibleDGPUDevices",0x%x]}],`+
		`"rules":[{"pattern":[],"profile":"_container_"}]}`, mask)
}

// readParams reads the host's driver parameters. It returns nil if the container or the host has no such file.
func readParams(root *rootfs.Root, h host.Host) ([]byte, error) {
	if info, err := root.Stat(paramsPath); err != nil || !info.Mode().IsRegular() {
		return nil, nil //nolint:nilerr // nothing to mask without the file
	}
	data, err := rootfs.ReadHostFile(h.Proc("driver", "nvidia", "params"), maxParams)
	if isMissing(err) {
		return nil, nil
	}
	return data, err
}

// maskParams returns the driver's parameters with ModifyDeviceFiles off, or nil if it is already off. With it on, the
// driver's libraries would create device nodes for GPUs that the container was not given.
func maskParams(data []byte) []byte {
	const on, off = "ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0"
	lines := bytes.Split(data, []byte("\n"))
	found := false
	for i, line := range lines {
		if string(line) == on {
			lines[i] = []byte(off)
			found = true
		}
	}
	if !found {
		return nil
	}
	return bytes.Join(lines, []byte("\n"))
}
