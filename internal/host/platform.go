package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// ErrUnsupported means that the host is one whose GPUs this program does not know how to give to containers.
var ErrUnsupported = errors.New("this kind of host is not supported")

// OnPlatform returns an error of using the driver, which wraps ErrUnsupported too where CheckPlatform returns that.
func OnPlatform(h Host, err error) error {
	if platform := CheckPlatform(h); err != nil && platform != nil {
		return fmt.Errorf("%w: %w", platform, err)
	}
	return err
}

// CheckPlatform returns an error that wraps ErrUnsupported in WSL2 and on Tegra (Jetson). Their drivers are not those
// for Linux on servers and workstations, and installing that one breaks theirs.
func CheckPlatform(h Host) error {
	exists := func(path string) bool {
		_, err := os.Stat(path)
		return err == nil
	}
	switch {
	case exists(h.Dev("dxg")), strings.Contains(ReadLine(h.Proc("sys", "kernel", "osrelease")), "WSL2"):
		return fmt.Errorf("%w: WSL2", ErrUnsupported)
	case exists(filepath.Join(h.Root(), "etc", "nv_tegra_release")),
		strings.Contains(ReadLine(h.Proc("device-tree", "compatible")), "nvidia,tegra"):
		return fmt.Errorf("%w: Tegra (Jetson)", ErrUnsupported)
	}
	return nil
}
