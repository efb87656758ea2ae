package host

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// ReadLine returns the first 4 KiB of a file of /sys or /proc, trimmed, or "" if it cannot be read.
func ReadLine(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// DriverVersion returns the version of the loaded NVIDIA kernel module, or "" if the host does not report it.
func DriverVersion(h Host) string {
	for _, path := range []string{h.Sys("module", "nvidia", "version"), h.Proc("driver", "nvidia", "version")} {
		line, _, _ := strings.Cut(ReadLine(path), "\n")
		for word := range strings.FieldsSeq(line) {
			version := word[:len(word)-len(strings.TrimLeft(word, "0123456789."))] // without a suffix, as in 580.65-custom
			if isVersion(version) {
				return version
			}
		}
	}
	return ""
}

// isVersion reports whether a word is two or three numbers with dots between them.
func isVersion(word string) bool {
	numbers := strings.Split(word, ".")
	return (len(numbers) == 2 || len(numbers) == 3) && !slices.ContainsFunc(numbers, func(n string) bool {
		return n == "" || strings.Trim(n, "0123456789") != ""
	})
}

// KernelDriver identifies one load of the NVIDIA kernel module. It changes when the module is loaded again.
type KernelDriver struct {
	Version string // see DriverVersion
	// Inode is the inode of the module's directory in /sys, or 0. It changes when the module is loaded again. (The
	// times of the directory do not serve: they also change when the kernel drops the inode from its cache.)
	Inode uint64
}

// LoadedDriver returns the loaded NVIDIA kernel module. Fields that the host does not report are zero.
func LoadedDriver(h Host) KernelDriver {
	d := KernelDriver{Version: DriverVersion(h)}
	var st unix.Stat_t
	if err := unix.Stat(h.Sys("module", "nvidia"), &st); err == nil {
		d.Inode = st.Ino
	}
	return d
}

// MaySuspend reports whether the kernel suspends the device at a PCI address while nothing uses it: runtime power
// management is on.
func MaySuspend(h Host, address string) bool {
	return ReadLine(h.Sys("bus", "pci", "devices", address, "power", "control")) == "auto"
}

// ModuleGPUs returns the PCI addresses of the GPUs that the kernel module has, sorted. Without the module there are
// none. Listing a directory of procfs does not call the module, so it cannot hang.
func ModuleGPUs(h Host) []string {
	entries, err := os.ReadDir(h.Proc("driver", "nvidia", "gpus"))
	if err != nil {
		return nil
	}
	var addresses []string
	for _, e := range entries {
		addresses = append(addresses, e.Name())
	}
	return addresses
}

// WithoutDriver returns the PCI devices that have no driver in sysfs. When a driver is unbound, the kernel first
// removes it from sysfs; then the driver waits for programs that have the device open.
func WithoutDriver(h Host, addresses []string) (without []string) {
	for _, address := range addresses {
		dir := h.Sys("bus", "pci", "devices", address)
		if _, err := os.Stat(dir); err != nil {
			continue
		}
		if _, err := os.Lstat(filepath.Join(dir, "driver")); errors.Is(err, fs.ErrNotExist) {
			without = append(without, address)
		}
	}
	return without
}

// BoundGPUs returns those of ModuleGPUs that are not being unbound. NVML has these when it is initialised.
func BoundGPUs(h Host) []string {
	all := ModuleGPUs(h)
	leaving := WithoutDriver(h, all)
	return slices.DeleteFunc(all, func(address string) bool { return slices.Contains(leaving, address) })
}
