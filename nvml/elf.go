package nvml

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"gpu-cdi-plugin/internal/elffile"
)

// platform is what depends on the machine's architecture: the number in ELF headers and Debian's directory name.
type platform struct {
	machine   elffile.Machine
	multiarch string
}

// thisPlatform is the platform of the running program. NVIDIA has drivers for these two.
func thisPlatform() platform {
	p := platform{elffile.MachineOf(runtime.GOARCH), "x86_64-linux-gnu"}
	if p.machine == elffile.AArch64 {
		p.multiarch = "aarch64-linux-gnu"
	}
	return p
}

// checkLibrary says why the file cannot be loaded, before the loader maps it: reading a mapping of a truncated file
// would kill the process.
func checkLibrary(path string, p platform) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%w: %w", ErrLibraryNotFound, err)
	case err != nil:
		return fmt.Errorf("%w: %w", ErrLibraryUnusable, err)
	case info.IsDir():
		return fmt.Errorf("%w: %s is a directory", ErrLibraryUnusable, path)
	case !info.Mode().IsRegular():
		return fmt.Errorf("%w: %s is not a regular file", ErrLibraryUnusable, path)
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrLibraryUnusable, err)
	}
	defer f.Close()
	if _, err := elffile.ReadLibrary(f, info.Size(), p.machine); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrLibraryUnusable, path, err)
	}
	return nil
}
