package nvml

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"

	"gpu-cdi-plugin/internal/host"
)

// libraryName is the SONAME of NVML's library.
const libraryName = "libnvidia-ml.so.1"

// Find returns the library to give to [Open]: explicit if it is not empty; else, where the driver is installed in "/",
// the file that the dynamic loader would load by its name; else that in the first of the usual directories of the
// driver's root that has one for this machine. Links are followed inside that root, as in the container or the image
// that it belongs to.
//
// The error wraps ErrLibraryNotFound or ErrLibraryUnusable and carries an exit status and a hint.
func Find(h host.Host, explicit string) (string, error) {
	return find(h.DriverRoot(), explicit, thisPlatform(), loaderPath)
}

func find(root, explicit string, p platform, byLoader func(string, platform) string) (string, error) {
	switch {
	case explicit != "" && !strings.Contains(explicit, "/"):
		return explicit, nil // a name for the loader, like an argument of dlopen
	case explicit != "":
		if err := checkLibrary(explicit, p); err != nil {
			return "", noDriver(hintFor(err), err)
		}
		return explicit, nil
	}
	if root == "/" {
		if path := byLoader(libraryName, p); path != "" {
			return path, nil
		}
	}
	path, err := findUnder(root, p)
	if err != nil {
		return "", noDriver(hintFor(err), err)
	}
	return path, nil
}

// findUnder looks into the directories in turn. A file that cannot be used, such as a 32-bit library in usr/lib, is
// passed over, and named if nothing better follows.
func findUnder(root string, p platform) (string, error) {
	var unusable []error
	for _, dir := range libraryDirs(p) {
		path, err := securejoin.SecureJoin(root, filepath.Join(dir, libraryName))
		if err != nil {
			continue // a link that leads nowhere
		}
		err = checkLibrary(path, p)
		if err == nil {
			return path, nil
		}
		if !errors.Is(err, ErrLibraryNotFound) {
			unusable = append(unusable, err)
		}
	}
	if len(unusable) > 0 {
		return "", errors.Join(unusable...)
	}
	return "", fmt.Errorf("%w: no %s under %s", ErrLibraryNotFound, libraryName, root)
}

// LibraryPaths are the paths under the driver's root at which Find looks for the library.
func LibraryPaths(h host.Host) []string {
	var paths []string
	for _, dir := range libraryDirs(thisPlatform()) {
		paths = append(paths, h.Driver(dir, libraryName))
	}
	return paths
}

// libraryDirs are the directories, relative to the root, in which the library may be.
func libraryDirs(p platform) []string { return host.LibraryDirs(p.multiarch) }

func hintFor(err error) string {
	if errors.Is(err, ErrLibraryNotFound) {
		return hintNotFound
	}
	return hintUnusable
}
