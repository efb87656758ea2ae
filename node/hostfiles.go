package node

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/lazy"
)

// checkDriver tells whether the driver is still the one whose library this process has loaded. ErrDriverChanged is
// returned only when a new process would work: the new libraries are complete, and the kernel module is theirs.
func (i *Inventory) checkDriver() error {
	now := fileid.Of(i.library)
	if i.loaded.IsZero() || now == i.loaded {
		return nil
	}
	driver, err := cdi.Discover(i.opts.Host, "")
	if err == nil {
		err = driver.Check(i.opts.Spec.Capabilities)
	}
	if err != nil {
		return fmt.Errorf("the driver is being replaced: %w", err)
	}
	kernel := kernelVersion(i.opts.Host)
	if kernel != "" && kernel != driver.Version {
		return fmt.Errorf("the driver's libraries are %s now, the loaded kernel module is %s: reload the module, or reboot",
			driver.Version, kernel)
	}
	return fmt.Errorf("%w: the libraries are %s now", ErrDriverChanged, driver.Version)
}

var versionNumber = lazy.Regexp(`\b[0-9]+\.[0-9]+(\.[0-9]+)?\b`)

// kernelVersion is the version of the loaded kernel module, or empty if the host does not say it.
func kernelVersion(h host.Host) string {
	for _, path := range []string{h.Sys("module", "nvidia", "version"), h.Proc("driver", "nvidia", "version")} {
		line, _, _ := strings.Cut(readShort(path), "\n")
		if v := versionNumber().FindString(line); v != "" {
			return v
		}
	}
	return ""
}

// readShort is the beginning of a file that should be small, or empty.
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

// fingerprint is a hash of what can be seen of the GPUs without asking the driver, and of the spec files other than
// ours: it changes when a reconcile may have something to do.
func (i *Inventory) fingerprint() uint64 {
	sum := fnv.New64a()
	h := i.opts.Host
	fmt.Fprintln(sum, fileid.Of(i.library), kernelVersion(h))
	for _, dir := range i.opts.Dirs {
		printDir(sum, dir, func(name string) bool {
			return slices.Contains([]string{".json", ".yaml"}, filepath.Ext(name)) && !i.keeps(filepath.Join(dir, name))
		})
	}
	printDir(sum, h.Dev(), func(name string) bool { return strings.HasPrefix(name, "nvidia") })
	for _, dir := range []string{h.Dev("nvidia-caps"), h.Dev("dri"), h.Proc("driver", "nvidia", "gpus")} {
		printDir(sum, dir, func(string) bool { return true })
	}
	printTree(sum, h.Proc("driver", "nvidia", "capabilities"))
	fmt.Fprintln(sum, readShort(h.Proc("driver", "nvidia-caps", "mig-minors")))
	i.printExtras(sum)
	return sum.Sum64()
}

// printDir adds the entries of a directory: regular files, and what links to them, with their content's identity,
// others with their numbers only, since device nodes are touched by use.
func printDir(w io.Writer, dir string, wanted func(name string) bool) {
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

// printTree adds the names of a tree; those below capabilities come and go with MIG instances.
func printTree(w io.Writer, dir string) {
	_ = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it went while it was walked
		}
		fmt.Fprintln(w, path, err)
		return nil
	})
}
