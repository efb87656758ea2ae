package hook

import (
	"errors"
	"path"
	"slices"

	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/ldcache"
	"gpu-cdi-plugin/internal/rootfs"
)

const cachePath = "/etc/ld.so.cache"

const maxMuslPath = 1 << 16 // bytes

// configDir has ldconfig's configuration. The first directory in it counts, and so does the first file by name.
const configDir, configName = "/etc/ld.so.conf.d", "00-gpu-cdi-plugin.conf"

// image is what the plan depends on.
type image struct {
	// libraries are those of the driver that are files in the root; compat are the image's own, to come before them.
	libraries, compat []hookargs.Library
	// glibc and musl tell which loaders the image has.
	glibc, musl     bool
	cache, muslPath content
	// configDirs are the directories that ldconfig in the container would not know.
	configDirs []string
	// nodes are the names under /dev/dri, minors the numbers of /dev/nvidiaN.
	nodes  map[string]bool
	minors []uint32
	// params is the host's parameter file, if the container has one to be masked.
	params []byte
}

// content is a file's content or why there is none.
type content struct {
	data []byte
	err  error
	// cover is what is mounted over the file, by an earlier run of the hook or by anybody else. It is compared with what
	// is wanted there, and never written: it may be a Secret.
	cover []byte
}

// observe looks at everything that the arguments ask for. Its problems cost only that part of the work.
func observe(args *hookargs.CreateContainer, root *rootfs.Root, h host.Host, a arch) (*image, []error) {
	var problems []error
	note := func(err error) {
		if err != nil {
			problems = append(problems, err)
		}
	}
	img := &image{nodes: findNodes(root, args.DRI)}
	for _, lib := range args.Libraries {
		if root.IsFile(lib.Path) {
			img.libraries = append(img.libraries, lib)
		}
	}
	if len(img.libraries) > 0 {
		note(img.observeLoaders(args, root, a))
	}
	var err error
	if args.EGLProfile {
		img.minors, err = findMinors(root)
		note(err)
	}
	if args.Params && hasParams(root) {
		img.params, err = readParams(h)
		note(err)
	}
	return img, problems
}

func (img *image) observeLoaders(args *hookargs.CreateContainer, root *rootfs.Root, a arch) error {
	img.glibc, img.musl = root.IsFile(a.glibcLoader), root.IsFile(a.muslLoader)
	img.cache = read(root, cachePath, ldcache.MaxSize)
	if img.musl {
		img.muslPath = read(root, a.muslPath, maxMuslPath)
	}
	var err error
	img.compat, err = findCompat(root, args)
	if i, statErr := root.Stat(configDir); statErr == nil && i.Mode.IsDir() {
		img.configDirs = findConfigDirs(slices.Concat(img.compat, img.libraries), root.IsFile)
	}
	return err
}

// findConfigDirs are the directories of libraries that glibc does not search by default, in the order of the libraries.
func findConfigDirs(libs []hookargs.Library, has func(string) bool) []string {
	var dirs []string
	for _, lib := range libs {
		dir := path.Dir(lib.Path)
		if !slices.Contains(dirs, dir) && !isBelowAnother(dir, libs) && !isGlibcDefault(dir, has) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// hasParams reports whether the container shows the driver's parameters. Files in /proc have no size.
func hasParams(root *rootfs.Root) bool {
	i, err := root.Stat(paramsPath)
	return err == nil && i.Mode.IsRegular()
}

// read reads a file that may be anything. A dangling link, or one that leads out of the root, is no file.
func read(root *rootfs.Root, name string, limit int64) content {
	data, err := root.ReadFile(name, limit)
	c := content{data: data, err: err}
	if errors.Is(err, rootfs.ErrVolume) {
		c.cover, _ = root.ReadCover(name, limit)
	}
	return c
}
