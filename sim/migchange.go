package sim

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"gpu-cdi-plugin/internal/fileio"
)

// SetMIG turns on a GPU's MIG mode and replaces its instances by instances of the profiles ("1g.10gb", "1c.3g.40gb",
// "3g.40gb@4"), in the library, in /dev and in /proc. Without profiles the GPU has no usable device.
func (n *Node) SetMIG(gpu int, profiles []string) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	g := n.machine.GPUs[gpu]
	devices, err := partition(&g, profiles)
	if err != nil {
		return &InvalidError{err}
	}
	g.MIGMode, g.MIG = MIGEnabled, devices
	return n.changeMIG(&g)
}

// DisableMIG turns a GPU's MIG mode off.
func (n *Node) DisableMIG(gpu int) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	g := n.machine.GPUs[gpu]
	if g.MIGMode == MIGUnsupported {
		return invalid("GPU %d (%s) has no MIG", gpu, g.Name)
	}
	g.MIGMode, g.MIG = MIGDisabled, nil
	return n.changeMIG(&g)
}

func (n *Node) changeMIG(g *GPU) error {
	err := n.updateState(func(records []record) ([]record, error) {
		records = without(records, func(r record) bool { return isMIG(r, g.Index) })
		records = append(records, newRecord("gpu", "index", g.Index, "mig", g.MIGMode),
			newRecord("clearmig", "gpu", g.Index))
		records = append(records, describeMIG(g.Index, g.MIG)...)
		return addEvent(records, Event{GPU: g.Index, Type: EventMIGChange}.record()), nil
	})
	if err != nil {
		return err
	}
	return n.replaceMIGNodes(g)
}

// applyMIG applies the MIG mode and MIG devices in the state to a GPU.
func applyMIG(g *GPU, records []record) error {
	for _, r := range records {
		if !isMIG(r, g.Index) {
			continue
		}
		switch r.name {
		case "gpu":
			mode, _ := r.get("mig")
			g.MIGMode = MIGMode(mode)
		case "clearmig":
			g.MIG = nil
		case "mig":
			d, err := migDevice(r)
			if err != nil {
				return err
			}
			g.MIG = append(g.MIG, d)
		}
	}
	return nil
}

// migDevice reads what a snapshot needs from a record that describeMIG wrote.
func migDevice(r record) (MIGDevice, error) {
	var d MIGDevice
	d.UUID, _ = r.get("uuid")
	d.Profile, _ = r.get("profile")
	for key, to := range map[string]*int{
		"index": &d.Index, "gi": &d.GPUInstance, "ci": &d.ComputeInstance,
		"gicap": &d.GPUInstanceCap, "cicap": &d.ComputeInstanceCap,
		"gislices": &d.GPUSlices, "cislices": &d.ComputeSlices, "sms": &d.SMs, "copy": &d.Engines.Copy,
		"decoder": &d.Engines.Decoder, "encoder": &d.Engines.Encoder, "jpeg": &d.Engines.JPEG, "ofa": &d.Engines.OFA,
	} {
		value, err := r.number(key)
		if err != nil {
			return d, err
		}
		*to = value
	}
	text, _ := r.get("memory")
	memory, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return d, fmt.Errorf("record %q: memory: %w", r, err)
	}
	d.MemoryBytes = memory
	return d, nil
}

// replaceMIGNodes replaces the GPU's device files in /dev/nvidia-caps and its files in /proc to match its MIG devices.
func (n *Node) replaceMIGNodes(g *GPU) error {
	want := migNodes(g)
	if err := n.removeStaleMIG(g, want); err != nil {
		return fmt.Errorf("remove the nodes of GPU %d's MIG devices: %w", g.Index, err)
	}
	maps.DeleteFunc(want, func(file string, _ entry) bool {
		_, err := os.Lstat(filepath.Join(n.root, file))
		return err == nil
	})
	w := &writer{root: n.root, plainNodes: n.plain}
	if err := w.write(want); err != nil {
		return fmt.Errorf("add the nodes of GPU %d's MIG devices: %w", g.Index, err)
	}
	return nil
}

// removeStaleMIG removes the GPU's device files in /dev/nvidia-caps and its files in /proc that are not in want.
func (n *Node) removeStaleMIG(g *GPU, want plan) error {
	caps := filepath.Join(n.root, "dev/nvidia-caps")
	nodes, err := os.ReadDir(caps)
	if err != nil {
		return err
	}
	for _, node := range nodes {
		minor, err := strconv.Atoi(strings.TrimPrefix(node.Name(), "nvidia-cap"))
		ours := err == nil && minor >= gpuInstanceCap(g.Minor, 0) && minor < gpuInstanceCap(g.Minor+1, 0)
		if _, ok := want[capPath(minor)]; ok || !ours {
			continue
		}
		if err := os.Remove(filepath.Join(caps, node.Name())); err != nil {
			return err
		}
	}
	return n.removeStaleInstances(path.Join("proc/driver/nvidia/capabilities", "gpu"+strconv.Itoa(g.Minor)), want)
}

// removeStaleInstances removes the files in dir that are not in want, and directories without a file in want.
func (n *Node) removeStaleInstances(dir string, want plan) error {
	keep := map[string]bool{}
	for file := range want {
		for at := file; at != "."; at = path.Dir(at) {
			keep[at] = true
		}
	}
	var stale []string
	err := fs.WalkDir(os.DirFS(n.root), dir, func(file string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || keep[file] {
			return err
		}
		stale = append(stale, file)
		if d.IsDir() {
			return fs.SkipDir
		}
		return nil
	})
	for _, file := range stale {
		err = errors.Join(err, os.RemoveAll(filepath.Join(n.root, file)))
	}
	return err
}

// SetKernelVersion changes the version of the loaded kernel module, like an upgrade without a reboot.
func (n *Node) SetKernelVersion(version string) error {
	if !driverPattern.MatchString(version) {
		return invalid("driver version %q: want a version such as %s", version, DefaultDriver)
	}
	err := n.updateState(func(records []record) ([]record, error) {
		records = without(records, func(r record) bool { return r.name == "machine" })
		return append(records, newRecord("machine", "kernel", version)), nil
	})
	if err != nil {
		return err
	}
	return n.writeKernelVersion(version)
}

func (n *Node) writeKernelVersion(version string) error {
	p := plan{}
	p.addKernelVersion(version, runtime.GOARCH)
	for file, e := range p {
		if err := fileio.Replace(filepath.Join(n.root, file), e.data, e.mode); err != nil {
			return err
		}
	}
	return nil
}
