package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/manager/model"
)

// bundleConfig is the name of a bundle's configuration, and maxConfig its largest size in bytes.
const (
	bundleConfig = "config.json"
	maxConfig    = 16 << 20
)

// showWithOptions has this process, and the command that it executes, see the configuration of a bundle with the run
// options. The bundle itself stays as it is: the next lease has other devices. For that the process gets a mount
// namespace of its own, which takes root. The goroutine that calls it must be the one that executes the command.
func (a *app) showWithOptions(bundle string, run model.RunOptions) error {
	if os.Geteuid() != 0 {
		return errors.New("only root can lease devices for a bundle: run it by podman, which needs no root")
	}
	path := filepath.Join(bundle, bundleConfig)
	data, err := fileio.ReadFile(path, maxConfig)
	if err != nil {
		return fmt.Errorf("read the bundle: %w", err)
	}
	dir, err := os.MkdirTemp("", "lease-")
	if err != nil {
		return fmt.Errorf("copy the bundle's configuration: %w", err)
	}
	defer os.RemoveAll(dir)
	changed := filepath.Join(dir, bundleConfig)
	if err := os.WriteFile(changed, data, 0o600); err != nil {
		return fmt.Errorf("copy the bundle's configuration: %w", err)
	}
	if err := a.injectRunOptions(dir, run); err != nil {
		return err
	}
	runtime.LockOSThread() // until it executes the command: the namespace is the thread's
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	// Mounts of the host are still seen, and this one is not seen by others.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount(changed, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount the bundle's configuration: %w", err)
	}
	return nil
}
