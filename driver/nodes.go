package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
)

// DiscoverNodes finds the device nodes of a host's driver, and nothing else of it. Check then checks only for
// /dev/nvidiactl.
func DiscoverNodes(h host.Host) *Driver {
	d := &Driver{}
	d.addNodes(h)
	return d
}

// addNodes adds the control device nodes, with findings, and the device nodes of GPUs and MIG devices, with findings
// about those that cannot be used.
func (d *Driver) addNodes(h host.Host) {
	numbers := ReadNumbers(h)
	for _, c := range controlNodes {
		n, err := findNode(h, numbers, c.name, c.capabilities)
		f := n.finding(err)
		f.Broken = c.needed && err != nil
		d.Findings = append(d.Findings, f)
		switch {
		case err == nil:
			d.Control = append(d.Control, n)
		case c.name == controlNode:
			err := fmt.Errorf("%w: %s: %s", ErrNoControl, n.HostPath, f.Note)
			d.shortcomings = append(d.shortcomings, shortcoming{All, err})
		}
	}
	for _, name := range slices.Concat(numberedNodes(h, "nvidia"), numberedNodes(h, "nvidia-caps/nvidia-cap")) {
		n, err := findNode(h, numbers, name, All)
		if err != nil {
			d.Findings = append(d.Findings, n.finding(err))
			continue
		}
		d.Nodes = append(d.Nodes, n)
	}
	d.kernel = readKernelDevices(h)
	slices.SortStableFunc(d.Nodes, func(a, b DeviceNode) int { return strings.Compare(a.Path, b.Path) })
}

// WhyNoNode says why a path under /dev is none of the driver's usable device nodes.
func (d *Driver) WhyNoNode(path string) string {
	for _, f := range d.Findings {
		if f.Kind == KindNode && f.Name == path && !f.Used && f.Note != notFound {
			return path + " cannot be used: " + f.Note
		}
	}
	return "no device node " + path
}

// numberedNodes returns the names under /dev that consist of the prefix and a number.
func numberedNodes(h host.Host, prefix string) []string {
	dir, _ := path.Split(prefix)
	there, _ := readNames(h.Dev(dir))
	var names []string
	for _, name := range there {
		if isNumbered(dir+name, prefix) {
			names = append(names, dir+name)
		}
	}
	return names
}

func isNumbered(name, prefix string) bool {
	number, ok := strings.CutPrefix(name, prefix)
	return ok && isNumbers(number)
}

// findNode finds a character device under /dev by its name. One with a wrong number is of no use.
func findNode(h host.Host, numbers Numbers, name string, c Capabilities) (DeviceNode, error) {
	n := DeviceNode{Path: path.Join("/dev", name), HostPath: h.Dev(name), Capabilities: c}
	info, err := os.Lstat(n.HostPath) // engines do not follow links either
	if err != nil {
		return n, err
	}
	n.Mode = info.Mode().Perm()
	if info.Mode().Type() != fs.ModeDevice|fs.ModeCharDevice {
		return n, fmt.Errorf("%s, not a character device", fileio.TypeName(info.Mode()))
	}
	var st unix.Stat_t
	if err := unix.Lstat(n.HostPath, &st); err != nil {
		return n, err
	}
	return n, numbers.Check(name, st.Rdev)
}

func (n DeviceNode) finding(err error) Finding {
	f := Finding{Name: n.Path, Kind: KindNode, Capabilities: n.Capabilities, Used: err == nil}
	switch {
	case err == nil:
		f.Path = n.HostPath
	case errors.Is(err, fs.ErrNotExist):
		f.Note = notFound
	default:
		f.Path, f.Note = n.HostPath, err.Error()
		_, f.OtherNumber = errors.AsType[*NumberError](err)
	}
	return f
}

// addDRM adds the device nodes under /dev/dri of each of NVIDIA's PCI devices.
func (d *Driver) addDRM(h host.Host) {
	d.DRM = map[string][]DeviceNode{}
	addresses, _ := readNames(h.Sys("bus/pci/devices"))
	for _, address := range addresses {
		names, err := readNames(h.Sys("bus/pci/devices", address, "drm"))
		if err != nil || !isNVIDIA(h, address) {
			continue
		}
		for _, name := range names {
			if !strings.HasPrefix(name, "card") && !strings.HasPrefix(name, "renderD") {
				continue
			}
			n, err := findNode(h, Numbers{}, path.Join("dri", name), UsesDRM)
			d.Findings = append(d.Findings, n.finding(err))
			if err == nil {
				d.DRM[address] = append(d.DRM[address], n)
			}
		}
	}
}

func isNVIDIA(h host.Host, address string) bool {
	data, err := fileio.ReadFile(h.Sys("bus/pci/devices", address, "vendor"), 4096)
	return err == nil && strings.TrimSpace(string(data)) == vendorNVIDIA
}
