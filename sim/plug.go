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
	"slices"
	"strings"
	"time"

	"gpu-cdi-plugin/internal/fileio"
)

// Kinds of faults of a GPU that the driver does not see.
const (
	kindGone      = "gone"
	kindUnbound   = "unbound"
	kindUnplugged = "unplugged"
)

// Unbind unbinds the driver from a GPU: the driver no longer enumerates it, and sysfs shows it without a driver.
func (n *Node) Unbind(gpu int) error { return n.detach(gpu, kindUnbound) }

// Bind undoes Unbind.
func (n *Node) Bind(gpu int) error { return n.attach(gpu, kindUnbound) }

// Unplug removes a GPU from the PCI bus. Its /dev/nvidiaN stays, as on a real host.
func (n *Node) Unplug(gpu int) error { return n.detach(gpu, kindUnplugged) }

// Plug undoes Unplug.
func (n *Node) Plug(gpu int) error { return n.attach(gpu, kindUnplugged) }

// unbindWait is how long unbinding waits for programs that have the GPU open, unbindPoll how often it checks. The real
// driver waits for ever and checks as often.
const (
	unbindWait = 10 * time.Second
	unbindPoll = 500 * time.Millisecond
)

// detach changes the state, reports a system event, waits until no program has the GPU open, then changes the files.
func (n *Node) detach(gpu int, kind string) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	g := &n.machine.GPUs[gpu]
	err := n.updateState(func(records []record) ([]record, error) {
		if now := kindOf(records, gpu); now == kindUnbound || now == kindUnplugged {
			return nil, invalid("GPU %d is %s already", gpu, now)
		}
		records = without(records, func(r record) bool { return isKind(r, gpu) })
		records = append(records, newRecord("fault", "gpu", gpu, "kind", kind))
		return addEvent(records, systemEvent(gpu, systemUnbind)), nil
	})
	if err != nil {
		return err
	}
	link := filepath.Join(n.root, g.sysDir(), "driver") // the kernel removes it before the driver waits
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unbind GPU %d: %w", gpu, err)
	}
	for end := time.Now().Add(unbindWait); n.isOpen(g) && time.Now().Before(end); {
		time.Sleep(unbindPoll)
	}
	if err := n.removeFiles(g, kind); err != nil {
		return fmt.Errorf("remove the files of GPU %d: %w", gpu, err)
	}
	return nil
}

// isOpen reports whether another program has the GPU's device node open.
func (n *Node) isOpen(g *GPU) bool {
	node, err := os.Stat(filepath.Join(n.root, "dev", fmt.Sprintf("nvidia%d", g.Minor)))
	if err != nil {
		return false
	}
	files, _ := filepath.Glob("/proc/[1-9]*/fd/*")
	own := fmt.Sprintf("/proc/%d/", os.Getpid())
	return slices.ContainsFunc(files, func(file string) bool {
		open, err := os.Stat(file)
		return err == nil && !strings.HasPrefix(file, own) && os.SameFile(open, node)
	})
}

func (n *Node) attach(gpu int, kind string) error {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	err := n.updateState(func(records []record) ([]record, error) {
		if kindOf(records, gpu) != kind {
			return nil, invalid("GPU %d is not %s", gpu, kind)
		}
		records = without(records, func(r record) bool { return isKind(r, gpu) })
		return addEvent(records, systemEvent(gpu, systemBind)), nil
	})
	if err != nil {
		return err
	}
	g := &n.machine.GPUs[gpu]
	if err := n.restore(g); err != nil {
		return err
	}
	values, err := n.Values(gpu)
	if err != nil {
		return err
	}
	return n.makeResetFile(g, resetResults[values["reset-result"]%uint64(len(resetResults))])
}

// restore restores the files of a GPU that was unbound or unplugged.
func (n *Node) restore(g *GPU) error {
	if err := n.addFiles(g); err != nil {
		return fmt.Errorf("add the files of GPU %d: %w", g.Index, err)
	}
	return nil
}

func systemEvent(gpu int, t EventType) record {
	return newRecord("event", "gpu", gpu, "type", uint64(t), "system", 1)
}

// isKind reports whether a record says that a GPU is lost, removed or detached.
func isKind(r record, gpu int) bool {
	_, ok := r.get("kind")
	return ok && r.name == "fault" && r.has("gpu", gpu)
}

func kindOf(records []record, gpu int) string {
	for _, r := range records {
		if isKind(r, gpu) {
			kind, _ := r.get("kind")
			return kind
		}
	}
	return ""
}

// detached returns the unbound and unplugged GPUs with the kind of their fault.
func detached(records []record) map[int]string {
	found := map[int]string{}
	for _, r := range records {
		kind, _ := r.get("kind")
		if gpu, err := r.number("gpu"); err == nil && (kind == kindUnbound || kind == kindUnplugged) {
			found[gpu] = kind
		}
	}
	return found
}

// sysDir returns the directory of the GPU's PCI device, relative to the node's root.
func (g *GPU) sysDir() string { return path.Join("sys/devices", path.Join(g.Upstream...), g.Bus) }

// gpuFiles returns the files of a GPU's PCI device and the files that its driver creates.
func (n *Node) gpuFiles(g *GPU) (device, driver plan) {
	device, driver = plan{}, plan{}
	all := sysFiles(n.machine)
	maps.Copy(all, procFiles(n.machine, n.driver, runtime.GOARCH))
	maps.Copy(all, deviceNodes(n.machine))
	dir := g.sysDir()
	for file, e := range all {
		switch {
		case slices.Contains([]string{
			dir + "/driver", "sys/bus/pci/drivers/nvidia/" + g.Bus, "sys/class/drm/" + g.Card,
			"sys/class/drm/" + g.Render, "dev/dri/" + g.Card, "dev/dri/" + g.Render,
			"dev/dri/by-path/pci-" + g.Bus + "-card", "dev/dri/by-path/pci-" + g.Bus + "-render",
			"proc/driver/nvidia/gpus/" + g.Bus + "/information",
		}, file) || strings.HasPrefix(file, dir+"/drm/"):
			driver[file] = e
		case file == "sys/bus/pci/devices/"+g.Bus || strings.HasPrefix(file, dir+"/"):
			device[file] = e
		}
	}
	return device, driver
}

func (n *Node) removeFiles(g *GPU, kind string) error {
	device, driver := n.gpuFiles(g)
	files := slices.Collect(maps.Keys(driver))
	dirs := []string{g.sysDir() + "/drm", "proc/driver/nvidia/gpus/" + g.Bus}
	if kind == kindUnplugged {
		files = slices.AppendSeq(files, maps.Keys(device))
		dirs = append(dirs, g.sysDir())
	} else if err := n.writeUevent(g, false); err != nil {
		return err
	}
	for _, file := range files {
		if err := os.Remove(filepath.Join(n.root, file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, dir := range dirs {
		if err := os.RemoveAll(filepath.Join(n.root, dir)); err != nil {
			return err
		}
	}
	return nil
}

func (n *Node) addFiles(g *GPU) error {
	device, driver := n.gpuFiles(g)
	maps.Copy(device, driver)
	maps.DeleteFunc(device, func(file string, _ entry) bool {
		_, err := os.Lstat(filepath.Join(n.root, file))
		return err == nil
	})
	w := &writer{root: n.root, plainNodes: n.plain}
	if err := w.write(device); err != nil {
		return err
	}
	return n.writeUevent(g, true)
}

// writeUevent replaces the uevent file of the PCI device. The file names the driver while it is bound.
func (n *Node) writeUevent(g *GPU, bound bool) error {
	device, _ := n.gpuFiles(g)
	file := g.sysDir() + "/uevent"
	text := device[file].data
	if _, rest, ok := strings.Cut(string(text), "\n"); ok && !bound {
		text = []byte(rest)
	}
	return fileio.Replace(filepath.Join(n.root, file), text, 0o644)
}
