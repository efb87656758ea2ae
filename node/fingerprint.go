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

	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/internal/kernel"
)

// hostFingerprint is a hash of what the host's files say about the GPUs, of the other spec files, and of the
// descriptors. It changes when a reconciliation may have something to do.
func (r *Reconciler) hostFingerprint() uint64 {
	sum := fnv.New64a()
	h := r.opts.Host
	fmt.Fprintln(sum, fileid.Of(r.library), kernel.DriverVersion(h))
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
	fmt.Fprintln(sum, kernel.Read(h.Proc("driver", "nvidia-caps", "mig-minors")))
	r.writeExtras(sum)
	return sum.Sum64()
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
