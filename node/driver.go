package node

import (
	"errors"
	"fmt"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
)

// ErrDriverChanged means that the driver's library on disk is not the one that this process has loaded, and that the
// new library fits the loaded kernel module. A process cannot load a second NVML library, so it must restart.
var ErrDriverChanged = errors.New("the NVIDIA driver was replaced")

// findLibrary finds the driver's library. The first library that is found is the one that this process will load.
func (r *Reconciler) findLibrary() {
	r.library = r.opts.Source.Library()
	if r.loaded.IsZero() {
		r.loaded = fileio.IDOf(r.library)
	}
}

// checkDriver returns an error if the driver's library is not the file that this process has loaded. The error is
// ErrDriverChanged only if a new process would work: the new libraries are complete and fit the kernel module.
func (r *Reconciler) checkDriver() error {
	now := fileio.IDOf(r.library)
	switch {
	case r.loaded.IsZero(), now == r.loaded:
		return nil
	case now.IsZero():
		return errors.New("the driver is being replaced: its library was removed")
	}
	d, err := driver.Discover(r.opts.Host, "")
	if err != nil {
		return fmt.Errorf("the driver is being replaced: %w", err)
	}
	if err := d.Check(r.opts.Spec.Capabilities); err != nil {
		return fmt.Errorf("the driver is being replaced: %w", err)
	}
	module := host.DriverVersion(r.opts.Host)
	if module != "" && module != d.Version {
		return fmt.Errorf("the driver's libraries have version %s, but the loaded kernel module has %s: "+
			"reload the module, or reboot", d.Version, module)
	}
	return fmt.Errorf("%w: its libraries now have version %s", ErrDriverChanged, d.Version)
}
