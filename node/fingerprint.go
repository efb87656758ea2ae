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

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/internal/kernel"
)

// inputFingerprint is a hash of what a reconciliation reads: what the host's files say about the GPUs, and the spec
// files of others. It is taken before the reading, so that a change meanwhile leads to another reconciliation.
func (r *Reconciler) inputFingerprint() uint64 {
	sum := fnv.New64a()
	h := r.opts.Host
	fmt.Fprintln(sum, fileid.Of(r.library), kernel.DriverVersion(h))
	for _, dir := range r.opts.Dirs {
		writeDir(sum, dir, func(name string) bool { return isJSONOrYAML(name) && !r.owns(filepath.Join(dir, name)) })
	}
	writeDir(sum, h.Dev(), func(name string) bool { return strings.HasPrefix(name, "nvidia") })
	all := func(string) bool { return true }
	for _, dir := range []string{h.Dev("nvidia-caps"), h.Dev("dri"), h.Proc("driver", "nvidia", "gpus")} {
		writeDir(sum, dir, all)
	}
	writeTree(sum, h.Proc("driver", "nvidia", "capabilities"))
	fmt.Fprintln(sum, kernel.Read(h.Proc("driver", "nvidia-caps", "mig-minors")))
	for _, e := range r.opts.Extras {
		found, _ := driver.DiscoverExtra(h, e.Extra, e.Channels)
		fmt.Fprintln(sum, e.Extra, found.Nodes, found.Files)
	}
	return sum.Sum64()
}

// descriptorFingerprint is a hash of the descriptors. It is taken after they were written.
func (r *Reconciler) descriptorFingerprint() uint64 {
	sum := fnv.New64a()
	writeDir(sum, r.opts.DescriptorDir, isJSONOrYAML)
	return sum.Sum64()
}

// owns reports whether the file is one of the reconciler's specs.
func (r *Reconciler) owns(path string) bool {
	return slices.ContainsFunc(r.files, func(f *specFile) bool { return f.path == path })
}

func isJSONOrYAML(name string) bool {
	return slices.Contains([]string{".json", ".yaml"}, filepath.Ext(name))
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
