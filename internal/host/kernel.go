package host

import (
	"io"
	"os"
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
