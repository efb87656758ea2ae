package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/host"
)

// MakeNodes makes the device nodes that the host lacks with the driver's nvidia-modprobe, which loads the kernel
// modules too, and returns their paths. On a host without a display server nothing else makes them after a boot. An
// error does not prevent the nodes after it, except that without the control device there are none.
func MakeNodes(
	ctx context.Context, h host.Host, modprobe prepare.Program, check func(path string) error,
) ([]string, error) {
	var made []string
	ensure := func(node string, args ...string) error {
		path := h.Dev(node)
		if isCharDevice(path) {
			return nil
		}
		modprobe.Args = args
		output, status, err := modprobe.Run(ctx, check)
		switch {
		case err == nil && status != 0:
			err = fmt.Errorf("exit status %d", status)
		case err == nil && !isCharDevice(path):
			err = errors.New("it did not make the node")
		}
		if err == nil {
			made = append(made, path)
			return nil
		}
		err = fmt.Errorf("make %s with %s: %w", path, modprobe.Path, err)
		if output = strings.TrimSpace(output); output != "" {
			err = fmt.Errorf("%w: %s", err, output)
		}
		return err
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
	return made, errors.Join(errs...)
}

func isCharDevice(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
