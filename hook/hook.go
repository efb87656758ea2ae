// Package hook applies a GPU's part of a container to the container's root, from an OCI hook at createContainer: links,
// the dynamic loader's cache, CUDA forward compatibility, and what else the driver's files need at their new place.
//
// The root belongs to the image, which is hostile. The package never opens a path in it but through internal/rootfs,
// executes nothing, mounts nothing from it, and believes nothing it reads there: each reader is bounded and fuzzed.
// What it writes comes from the hook's arguments, from files on the root's own mount, and of these only what parses:
// valid entries of a loader cache, directories of a search path. So a link of the image to a Secret, a volume or a file
// of /sys makes nothing of it readable. The CDI spec alone decides what a container gets, in the hook's arguments.
//
// The work has three steps. observe reads what the result depends on, makePlan decides (a pure function), and apply
// makes the changes. A second run finds everything as the first left it and changes nothing.
//
// The loader's cache is merged and renamed over /etc/ld.so.cache, whatever is there: a link is replaced and not
// followed, and so is a file that is damaged, too large, a FIFO or a device, which the loader could not use either.
// glibc still searches its default directories for what is not in the cache. In a read-only root, or on a volume, the
// new cache is mounted over the old one, if nobody outside the container would see that mount. A cache on a volume is
// not read: the new one has the driver's libraries alone. Where neither writing nor mounting is
// possible the container starts all the same, with a message, if its loader finds the driver's libraries without a
// cache; if it does not, that is an error. An image with neither a cache nor glibc's loader gets none. Directories that
// glibc does not search by default are also written to /etc/ld.so.conf.d, where there is one, since installing a
// package in the container makes a new cache. musl has no cache; its path file gets the driver's directories.
package hook

import (
	"errors"
	"fmt"
	"os"

	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/rootfs"
)

// CreateContainer does the hook's work for the container of that state. The process must be in the container's mount
// namespace, before it pivots into its root; h is what it still sees of the host.
//
// notes are what a person should know although the container can start: an unusable cache that was replaced, a link
// that could not be made. The error is for a container that would not work, or whose root was not found.
func CreateContainer(args *hookargs.CreateContainer, state *State, h host.Host) (notes []error, err error) {
	path, err := state.findRoot()
	if err != nil {
		return nil, fmt.Errorf("find the container's root: %w", err)
	}
	root, err := rootfs.Open(path, h.Dev())
	if err != nil {
		return nil, fmt.Errorf("open the container's root: %w", err)
	}
	defer func() { _ = root.Close() }()
	if err := root.CheckContainer(); err != nil {
		return nil, fmt.Errorf("%s is no container's root at the stage createContainer, and was not changed: %w", path, err)
	}
	arch, err := archFor(goarch)
	if err != nil {
		return nil, err
	}
	img, problems := observe(args, root, h, arch)
	p := makePlan(args, img, arch)
	more, err := apply(p, root)
	return append(append(problems, p.notes...), more...), err
}

// isMissing reports whether err says that a file is not there.
func isMissing(err error) bool { return errors.Is(err, os.ErrNotExist) }
