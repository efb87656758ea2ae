package prepare

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// byPCI resets a GPU through the file "reset" of its PCI device. The kernel does not check who uses the device, so no
// process may have the GPU open, and it may not be the machine's display. The kernel waits up to a minute for the
// device.
func (r *DriverReset) byPCI(d *Device) (Outcome, error) {
	dir := r.Host.Sys("bus/pci/devices", d.PCIBusID)
	display, err := os.ReadFile(filepath.Join(dir, "boot_vga"))
	if err == nil && strings.TrimSpace(string(display)) == "1" {
		return ResetRefused, errors.New("it is the machine's primary GPU")
	}
	if len(d.Nodes) == 0 {
		return ResetFailed, errors.New("the device nodes of the GPU are unknown, so it may be in use: reload the driver")
	}
	switch users, err := openers(context.Background(), r.Host, d.Nodes, skipNone); {
	case err != nil:
		return ResetFailed, fmt.Errorf("find the processes that use the GPU: %w", err)
	case len(users) > 0:
		return ResetBusy, errors.New("the GPU is in use")
	}
	switch err := writeReset(filepath.Join(dir, "reset")); {
	case err == nil:
		return ResetDone, nil
	case errors.Is(err, os.ErrNotExist):
		return ResetNotSupported, errors.New("the driver has no nvidia-smi, and the PCI device has no reset")
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EAGAIN):
		return ResetBusy, err
	case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EOPNOTSUPP):
		return ResetNotSupported, err
	default:
		return ResetFailed, err
	}
}

func writeReset(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("1")
	return errors.Join(err, f.Close())
}
