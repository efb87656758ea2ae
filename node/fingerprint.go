package node

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/internal/host"
)

// ErrDriverChanged is that the driver's library on disk is not the one that the process has loaded, and that the loaded
// kernel module fits the new one. A process cannot load a second NVML library, so it has to start again.
var ErrDriverChanged = errors.New("the NVIDIA driver was replaced")

// checkDriver returns an error if the driver's library is not the file that this process has loaded. It is
// ErrDriverChanged only when a new process would work: the new libraries are complete, and the kernel module fits them.
func (r *Reconciler) checkDriver() error {
	if r.loaded.IsZero() || fileid.Of(r.library) == r.loaded {
		return nil
	}
	d, err := driver.Discover(r.opts.Host, "")
	if err == nil {
		err = d.Check(r.opts.Spec.Capabilities)
	}
	if err != nil {
		return fmt.Errorf("the driver is being replaced: %w", err)
	}
	kernel := kernelVersion(r.opts.Host)
	if kernel != "" && kernel != d.Version {
		return fmt.Errorf("the driver's libraries are %s now, the loaded kernel module is %s: "+
			"reload the module, or reboot", d.Version, kernel)
	}
	return fmt.Errorf("%w: the libraries are %s now", ErrDriverChanged, d.Version)
}

var versionPattern = regexp.MustCompile(`\b[0-9]+\.[0-9]+(\.[0-9]+)?\b`)

// kernelVersion is the version of the loaded kernel module, or empty if the host does not report it.
func kernelVersion(h host.Host) string {
	for _, path := range []string{h.Sys("module", "nvidia", "version"), h.Proc("driver", "nvidia", "version")} {
		line, _, _ := strings.Cut(readShort(path), "\n")
		if v := versionPattern.FindString(line); v != "" {
			return v
		}
	}
	return ""
}

// readShort returns the first 4 KiB of a file, or nothing.
func readShort(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return ""
	}
	return string(data)
}

// hostFingerprint is a hash of what the host's files say about the GPUs, of the other spec files, and of the
// descriptors. It changes when a reconciliation may have something to do.
func (r *Reconciler) hostFingerprint() uint64 {
	sum := fnv.New64a()
	h := r.opts.Host
	fmt.Fprintln(sum, fileid.Of(r.library), kernelVersion(h))
	for _, dir := range r.opts.Dirs {
		writeDir(sum, dir, func(name string) bool {
			return slices.Contains([]string{".json", ".yaml"}, filepath.Ext(name)) && !r.owns(filepath.Join(dir, name))
		})
	}
	writeDir(sum, h.Dev(), func(name string) bool { return strings.HasPrefix(name, "nvidia") })
	all := func(string) bool { return true }
	for _, dir := range []string{h.Dev("nvidia-caps"), h.Dev("dri"), h.Proc("driver", "nvidia", "gpus")} {
		writeDir(sum, dir, all)
	}
	writeTree(sum, h.Proc("driver", "nvidia", "capabilities"))
	fmt.Fprintln(sum, readShort(h.Proc("driver", "nvidia-caps", "mig-minors")))
	r.writeExtras(sum)
	return sum.Sum64()
}

// changed reports whether something is not as it was at the last reconciliation.
func (r *Reconciler) changed() bool {
	return slices.ContainsFunc(r.specFiles(), (*specFile).changed) || r.descriptors.changed() ||
		r.hostFingerprint() != r.fingerprint
}

// writeDir adds the entries of a directory: of regular files, and of links to them, the identity of their content; of
// others their numbers alone, since the use of a device node changes its times.
func writeDir(w io.Writer, dir string, wanted func(name string) bool) {
	entries, err := os.ReadDir(dir)
	fmt.Fprintln(w, dir, err != nil)
	for _, e := range entries {
		if !wanted(e.Name()) {
			continue
		}
		id := fileid.Of(filepath.Join(dir, e.Name()))
		if id.Mode&unix.S_IFMT != unix.S_IFREG {
			id = fileid.ID{Rdev: id.Rdev}
		}
		fmt.Fprintln(w, e.Name(), id)
	}
}

// writeTree adds the names of a tree. Those below capabilities come and go with MIG instances.
func writeTree(w io.Writer, dir string) {
	_ = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it went while it was walked
		}
		fmt.Fprintln(w, path, err)
		return nil
	})
}
