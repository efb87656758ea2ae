package hook

import (
	"fmt"
	"io/fs"
	"path"
	"strings"

	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/rootfs"
)

const (
	driDir = "/dev/dri"
	// profilePath is read by the driver's EGL; the name says whose file it is, and is the one NVIDIA's toolkit uses.
	profilePath = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
)

// maxNodes bounds the listing of a container's /dev.
const maxNodes = 10000

// driLinks are the links under by-path for those nodes that the container was given, as udev makes them on a host.
func driLinks(gpus []hookargs.DRI, given map[string]bool) []hookargs.Link {
	var links []hookargs.Link
	for _, gpu := range gpus {
		for _, node := range gpu.Nodes {
			if kind := driKind(node); given[node] && kind != "" {
				name := "pci-" + gpu.PCIBusID + "-" + kind
				links = append(links, hookargs.Link{Path: path.Join(driDir, "by-path", name), Target: "../" + node})
			}
		}
	}
	return links
}

func driKind(node string) string {
	switch {
	case strings.HasPrefix(node, "card"):
		return "card"
	case strings.HasPrefix(node, "renderD"):
		return "render"
	}
	return ""
}

// findNodes returns those of the GPUs' /dev/dri nodes that are in the container.
func findNodes(root *rootfs.Root, gpus []hookargs.DRI) map[string]bool {
	given := map[string]bool{}
	for _, gpu := range gpus {
		for _, node := range gpu.Nodes {
			i, err := root.Lstat(path.Join(driDir, node))
			given[node] = err == nil && i.Mode&fs.ModeCharDevice != 0
		}
	}
	return given
}

// findMinors returns the minor numbers of the GPUs' nodes /dev/nvidiaN in the container.
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
		if i, err := root.Lstat(path.Join("/dev", name)); err == nil && i.Mode&fs.ModeCharDevice != 0 {
			minors = append(minors, i.Minor)
		}
	}
	return minors, nil
}

// eglProfile is the application profile that limits EGL to GPUs with these minor numbers, nil if there is none. The
// driver takes a mask of 64 bits.
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
