package nvml

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"

	"gpu-cdi-plugin/internal/elffile"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/ldcache"
)

// libraryName is the SONAME of NVML's library.
const libraryName = "libnvidia-ml.so.1"

// Find returns the path of the library to load. If `explicit` is a path, Find only checks that file. Otherwise it is
// the first library for this machine in the host's DriverDirs; else the file that the dynamic loader of the driver's
// root would load by name; else the first in the usual directories under that root. Links are resolved inside the root,
// like in the container or image to which it belongs.
//
// The error wraps ErrLibraryNotFound or ErrLibraryUnusable.
func Find(h host.Host, explicit string) (string, error) {
	return find(h, explicit, loaderPath)
}

func find(h host.Host, explicit string, byLoader func(name string) string) (string, error) {
	root := h.DriverRoot()
	if explicit != "" {
		if !strings.Contains(explicit, "/") {
			explicit = "./" + explicit // the loader would search its own directories for a name without a slash
		}
		if err := checkLibrary(explicit); err != nil {
			return "", err
		}
		return explicit, nil
	}
	if path, err := findUnder(root, namedDirs(h)); err == nil {
		return path, nil
	}
	if root != "/" {
		byLoader = func(name string) string { return cachedPath(root, "/etc/ld.so.cache", name) }
	}
	if path := byLoader(libraryName); path != "" {
		return path, nil
	}
	return findUnder(root, host.LibraryDirs())
}

// namedDirs returns the directories with libraries below the host's DriverDirs.
func namedDirs(h host.Host) []string {
	var list []string
	for _, dir := range h.DriverDirs() {
		for _, sub := range host.DirLibraries() {
			list = append(list, filepath.Join(dir, sub))
		}
	}
	return list
}

// findUnder searches directories under a root. It skips files that cannot be used, such as a 32-bit library in usr/lib.
// If it finds no other file, its error is about one of these.
func findUnder(root string, dirs []string) (string, error) {
	var unusable []error
	seen := map[string]bool{} // /lib can be a link to /usr/lib
	for _, dir := range dirs {
		path, err := securejoin.SecureJoin(root, filepath.Join(dir, libraryName))
		if err != nil || seen[path] {
			continue // a dangling link, or another way to the same file
		}
		seen[path] = true
		switch err := checkLibrary(path); {
		case err == nil:
			return path, nil
		case !errors.Is(err, ErrLibraryNotFound):
			unusable = append(unusable, err)
		}
	}
	if len(unusable) > 0 {
		return "", errors.Join(unusable...)
	}
	if _, err := os.Stat(root); errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%w: there is no directory %s", ErrLibraryNotFound, root)
	}
	return "", fmt.Errorf("%w: no %s under %s", ErrLibraryNotFound, libraryName, root)
}

// LibraryPaths returns the paths under the driver's root at which Find searches for the library.
func LibraryPaths(h host.Host) []string {
	var paths []string
	for _, dir := range slices.Concat(namedDirs(h), host.LibraryDirs()) {
		paths = append(paths, h.Driver(dir, libraryName))
	}
	return paths
}

// loaderPath returns the file that the dynamic loader would load by a name, or "". It is the first file in
// LD_LIBRARY_PATH that can be used, or else the one in /etc/ld.so.cache. The loader itself is not asked: it would run
// the library's constructors before the file's owner is checked.
func loaderPath(name string) string {
	return loaderPathIn(os.Getenv("LD_LIBRARY_PATH"), "/etc/ld.so.cache", name)
}

func loaderPathIn(searchPath, cacheFile, name string) string {
	for _, dir := range strings.FieldsFunc(searchPath, func(r rune) bool { return r == ':' || r == ';' }) {
		path, err := filepath.Abs(filepath.Join(dir, name))
		if err == nil && checkLibrary(path) == nil {
			return path
		}
	}
	return cachedPath("/", cacheFile, name)
}

// cachedPath returns the usable file that the loader's cache of a root has for a name, or empty. Links are resolved
// inside the root.
func cachedPath(root, cacheFile, name string) string {
	resolved, err := securejoin.SecureJoin(root, cacheFile)
	if err != nil {
		return ""
	}
	data, err := fileio.ReadFile(resolved, ldcache.MaxSize)
	if err != nil {
		return ""
	}
	cache, err := ldcache.Parse(data)
	if err != nil {
		return ""
	}
	flags, _ := ldcache.FlagsFor(runtime.GOARCH)
	path, found := cache.Lookup(name, flags)
	if !found {
		return ""
	}
	if root != "/" {
		if path, err = securejoin.SecureJoin(root, path); err != nil {
			return ""
		}
	}
	if checkLibrary(path) != nil {
		return ""
	}
	return path
}

// checkLibrary returns why a file cannot be loaded. It is called before loading, since a truncated file kills the
// process: the loader maps the file, and reading behind its end is a fault.
func checkLibrary(path string) error {
	f, info, err := fileio.OpenRegular(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%w: %w", ErrLibraryNotFound, err)
	case err != nil:
		return fmt.Errorf("%w: %w", ErrLibraryUnusable, err)
	}
	defer f.Close()
	if _, err := elffile.ReadLibrary(f, info.Size(), elffile.MachineOf(runtime.GOARCH)); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrLibraryUnusable, path, err)
	}
	return nil
}
