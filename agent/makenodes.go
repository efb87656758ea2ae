package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/host"
)

// MakeNodes makes the device nodes that the host lacks with the driver's nvidia-modprobe, which loads the kernel
// modules too, and returns their paths. On a host without a display server nothing else makes them after a boot. A node
// with another number than its device is made anew, or only removed if its device is gone or programs make it
// themselves. An error does not prevent the nodes after it, except that without the control device there are none.
func MakeNodes(
	ctx context.Context, h host.Host, modprobe prepare.Program, check func(path string) error,
) ([]string, error) {
	var made []string
	tried := map[string]bool{}
	ensure := func(node string, args ...string) error {
		path := h.Dev(node)
		tried[path] = true
		if checkDeviceNode(h, node) == nil {
			return nil
		}
		modprobe.Args = args
		err := runModprobe(ctx, modprobe, check)
		if err == nil && isWrong(h, node) {
			// The driver's own program has replaced it; another one may not. Before, its module may not have been loaded.
			if err = os.Remove(path); err == nil {
				err = runModprobe(ctx, modprobe, check)
			}
		}
		if err == nil && checkDeviceNode(h, node) != nil {
			err = errors.New("it did not make the node")
		}
		if err != nil {
			return fmt.Errorf("make %s with %s: %w", path, modprobe.Path, err)
		}
		made = append(made, path)
		return nil
	}
	const control = "255" // the minor number of nvidiactl
	if err := ensure("nvidiactl", "-c", control); err != nil {
		return nil, err
	}
	errs := []error{ensure("nvidia-uvm", "-u", "-c", "0")}
	// The driver numbers its GPUs from 0. The list of GPUs cannot hang with one of them, unlike what each reports.
	for i := range host.ModuleGPUs(h) {
		errs = append(errs, ensure("nvidia"+strconv.Itoa(i), "-c", strconv.Itoa(i)))
	}
	for _, c := range driver.MIGCapabilities(h) {
		errs = append(errs, ensure(c.Node, "-f", filepath.Join("/", c.File)))
	}
	_ = ensure("nvidia-modeset", "-m") // only graphics needs it, and some hosts do not have its module
	if isWrong(h, uvmTools) {
		errs = append(errs, ensure(uvmTools, "-u", "-c", "0"))
	}
	for _, f := range driver.DiscoverNodes(h).Findings { // of GPUs and MIG instances that are gone, and of MIG's settings
		if f.OtherNumber && !tried[f.Path] {
			errs = append(errs, os.Remove(f.Path))
		}
	}
	return made, errors.Join(errs...)
}

// runModprobe runs nvidia-modprobe. The error has its output.
func runModprobe(ctx context.Context, modprobe prepare.Program, check func(path string) error) error {
	output, status, err := modprobe.Run(ctx, check)
	if err == nil && status != 0 {
		err = fmt.Errorf("exit status %d", status)
	}
	if output = strings.TrimSpace(output); err != nil && output != "" {
		err = fmt.Errorf("%w: %s", err, output)
	}
	return err
}

// uvmTools is a node of nvidia-uvm that only some tools use.
const uvmTools = "nvidia-uvm-tools"

func isWrong(h host.Host, node string) bool {
	_, wrong := errors.AsType[*driver.NumberError](checkDeviceNode(h, node))
	return wrong
}

// checkDeviceNode returns an error unless a device node exists, and a *driver.NumberError if it has a wrong number.
func checkDeviceNode(h host.Host, node string) error {
	var st unix.Stat_t
	if err := unix.Lstat(h.Dev(node), &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return errors.New("not a character device")
	}
	return driver.ReadNumbers(h).Check(node, st.Rdev)
}
