// Package hook prepares a container's root for the GPUs that the container gets. It is the OCI hook that CDI specs
// contain for the createContainer stage, where the process is in the container's mount namespace but still sees the
// host.
//
// [CreateContainer] works in four steps:
//
//  1. openRoot finds the root in the OCI state, opens it once, and checks that it is a container's root (root.go).
//  2. observe reads everything that the result depends on.
//  3. makePlan decides what to write. It is a pure function (loader.go, compat.go, devices.go).
//  4. apply writes: symbolic links, files, and mounts over files.
//
// A second run finds the result of the first and changes nothing.
//
// The root belongs to the image, which is hostile. Paths in it are opened only through hook/rootfs. The hook executes
// and mounts no file of the root, and every parser is bounded and fuzzed. The hook writes only data from its arguments
// or from files on the root's own mount. From those files it writes only what it could parse: valid entries of a
// loader cache, and directories of a search path. So a link in the image to a Secret, a volume or a file of /sys does
// not expose that file's content. Only the CDI spec decides which devices a container gets, never the image.
//
// Programs must find the driver's libraries:
//
//   - glibc: the libraries are merged into /etc/ld.so.cache. A link, a damaged file, a FIFO or a device in its place is
//     replaced; the loader could not use most of them either. The loader searches its default directories for libraries
//     that are not in the cache. If the root is read-only or the cache is on a volume, the new cache is mounted over
//     the old one, unless the mount would propagate to the host. A cache on a volume is not read: the new one has the
//     driver's libraries only. Directories that are not searched by default are also written to /etc/ld.so.conf.d if
//     that exists, for the next ldconfig in the container. An image without a cache and without glibc gets none.
//   - musl: the directories of the libraries are appended to musl's path file.
//
// If neither writing nor mounting is possible, the container starts with a warning; it is an error only if the
// container's programs would not find the driver's libraries.
package hook

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"gpu-cdi-plugin/hook/rootfs"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/ldcache"
)

// CreateContainer prepares the root of the container that the OCI state describes. The process must be in the
// container's mount namespace, before that is pivoted to the root; h has the host's paths.
//
// Warnings are problems with which the container can start: a damaged cache that was replaced, a link that could not
// be made. An error means that the container would not work, or that its root was not found.
func CreateContainer(args *hookargs.CreateContainer, state *State, h host.Host) (warnings []error, err error) {
	root, err := openRoot(state, h)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }()
	return Prepare(args, root, h)
}

// Prepare does what CreateContainer does, for an open root, which must be a container's root.
func Prepare(args *hookargs.CreateContainer, root *rootfs.Root, h host.Host) (warnings []error, err error) {
	arch, err := archFor(goarch)
	if err != nil {
		return nil, err
	}
	seen, observed := observe(args, root, h, arch)
	p := makePlan(args, seen, arch)
	applied, err := p.apply(root)
	warnings = slices.Concat(observed, p.warnings, applied)
	return slices.DeleteFunc(warnings, func(warning error) bool { return warning == nil }), err
}

// observation has everything besides the arguments that the plan depends on.
type observation struct {
	// libraries are the driver's libraries that exist in the root. compat are the image's own libraries, which replace
	// them.
	libraries, compat []hookargs.Library
	// glibc and musl report which dynamic loaders the image has.
	glibc, musl bool
	// cache is glibc's loader cache, muslPath the file with musl's search path.
	cache, muslPath content
	// glibcDirs are the directories of the libraries that glibc searches by default.
	glibcDirs []string
	// hasConfigDir reports whether the image has a directory for ldconfig's configuration.
	hasConfigDir bool
	// nodes are the names below /dev/dri of the container's GPUs, minors the minor numbers of /dev/nvidiaN.
	nodes  map[string]bool
	minors []uint32
	// params are the driver's parameters if the container has the file and it must be masked.
	params []byte
}

// content is a file's content, or the error of reading it.
type content struct {
	data []byte
	err  error
	// cover is the content of a file that is mounted over this one, perhaps by an earlier run of the hook. The mounted
	// file may be a Secret, so its content is only compared with what the hook would write.
	cover []byte
}

// observe reads what the arguments need. A file that cannot be read is a warning, or affects only its part of the
// plan. Some of the warnings may be nil.
func observe(args *hookargs.CreateContainer, root *rootfs.Root, h host.Host, a arch) (*observation, []error) {
	var compatErr, minorsErr, paramsErr error
	seen := &observation{nodes: findNodes(root, args.DRI)}
	for _, lib := range args.Libraries {
		if root.IsFile(lib.Path) {
			seen.libraries = append(seen.libraries, lib)
		}
	}
	if len(seen.libraries) > 0 {
		seen.compat, compatErr = findCompat(root, args)
		seen.glibc, seen.musl = root.IsFile(a.glibcLoader), root.IsFile(a.muslLoader)
		seen.cache = read(root, cachePath, ldcache.MaxSize)
		if seen.musl {
			seen.muslPath = read(root, a.muslPath, maxMuslPath)
		}
		seen.glibcDirs = glibcDirs(slices.Concat(seen.compat, seen.libraries), root.IsFile)
		info, err := root.Stat(configDir)
		seen.hasConfigDir = err == nil && info.IsDir()
	}
	if args.EGLProfile {
		seen.minors, minorsErr = findMinors(root)
	}
	if args.Params {
		seen.params, paramsErr = readParams(root, h)
	}
	return seen, []error{compatErr, minorsErr, paramsErr}
}

// read reads a file of the image. A link that dangles or leads out of the root counts as a missing file.
func read(root *rootfs.Root, name string, limit int64) content {
	data, err := root.ReadFile(name, limit)
	c := content{data: data, err: err}
	if errors.Is(err, rootfs.ErrVolume) {
		c.cover, _ = root.ReadCover(name, limit)
	}
	return c
}

// plan has all changes of the root.
type plan struct {
	links []hookargs.Link
	// loaderFiles make the dynamic loaders find the libraries. Without these files programs may not find them.
	loaderFiles []loaderFile
	// files may be missing: programs work without them.
	files []file
	// masks are files that are mounted over files of the container.
	masks    []file
	warnings []error
}

type file struct {
	path string
	data []byte
	mode fs.FileMode
}

// makePlan decides what to write. It is a pure function; its results are in the order of the arguments.
func makePlan(args *hookargs.CreateContainer, seen *observation, a arch) *plan {
	p := &plan{links: slices.Concat(args.Links, driLinks(args.DRI, seen.nodes))}
	p.addCache(args.Links, seen, a)
	p.addMusl(seen, a)
	if data := eglProfile(seen.minors); data != nil {
		p.files = append(p.files, file{profilePath, data, 0o444})
	}
	if data := maskParams(seen.params); data != nil {
		p.masks = append(p.masks, file{paramsPath, data, 0o444})
	}
	return p
}

// apply makes the plan's changes. A change that fails is a warning, and does not stop the others. Some of the warnings
// may be nil. An error means that no program in the container would find some libraries.
func (p *plan) apply(root *rootfs.Root) (warnings []error, err error) {
	warnings = append(warnings, makeLinks(p.links, root))
	var lost []error
	for _, f := range p.loaderFiles {
		writeErr := root.WriteFile(f.path, f.data, f.mode)
		if writeErr == nil {
			if f.config.path != "" {
				warnings = append(warnings, root.WriteFile(f.config.path, f.config.data, f.config.mode))
			}
			continue
		}
		// The root is read-only, or the file is on a volume.
		if mountErr := root.MountFile(f.path, f.data, f.mode); mountErr != nil {
			warnings = append(warnings, fmt.Errorf("%w; %w", writeErr, mountErr))
			lost = append(lost, f.checkOptional(root))
		}
	}
	for _, f := range p.files {
		warnings = append(warnings, root.WriteFile(f.path, f.data, f.mode))
	}
	for _, f := range p.masks {
		warnings = append(warnings, root.MountFile(f.path, f.data, f.mode))
	}
	return warnings, errors.Join(lost...)
}

// makeLinks makes as many links as possible. In a read-only root none can be made, so only the first error is
// returned.
func makeLinks(links []hookargs.Link, root *rootfs.Root) error {
	var first error
	failed := 0
	for _, l := range links {
		if err := root.Symlink(l.Target, l.Path); err != nil {
			first = cmp.Or(first, err)
			failed++
		}
	}
	if failed > 1 {
		return fmt.Errorf("%w (and %d more links)", first, failed-1)
	}
	return first
}

func isMissing(err error) bool { return errors.Is(err, os.ErrNotExist) }
