package hook

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode"

	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/rootfs"
)

// compatDir is where CUDA images have the user-mode driver of their own CUDA version.
const compatDir = "/usr/local/cuda/compat"

// maxCompatFiles bounds the listing of compatDir; real ones have about 10.
const maxCompatFiles = 1000

// findCompat returns the libraries of the image's own newer user-mode driver, if the host's kernel driver can work with
// them, or none.
func findCompat(root *rootfs.Root, args *hookargs.CreateContainer) ([]hookargs.Library, error) {
	driver, ok := parseVersion(args.DriverVersion)
	if !ok {
		return nil, nil
	}
	names, err := root.ReadDir(compatDir, maxCompatFiles)
	if isMissing(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	libcuda, err := findLibcuda(root, names)
	if libcuda == "" || err != nil {
		return nil, err
	}
	text := strings.TrimPrefix(libcuda, "libcuda.so.")
	if v, _ := parseVersion(text); v.compare(driver) <= 0 {
		return nil, nil
	} else if ok, err := isAdmitted(root, libcuda, v, driver); !ok || err != nil {
		return nil, err
	}
	return compatLibraries(root, names, text, args), nil
}

// findLibcuda is the only libcuda with a version in its name. Two of them leave open which one is meant.
func findLibcuda(root *rootfs.Root, names []string) (string, error) {
	var found []string
	for _, name := range names {
		v, ok := strings.CutPrefix(name, "libcuda.so.")
		if _, isVersion := parseVersion(v); ok && isVersion && isPlainFile(root, path.Join(compatDir, name)) {
			found = append(found, name)
		}
	}
	if len(found) > 1 {
		return "", fmt.Errorf("%s: more than one libcuda: %.200q", compatDir, found)
	}
	return strings.Join(found, ""), nil
}

func isPlainFile(root *rootfs.Root, name string) bool {
	i, err := root.Lstat(name)
	return err == nil && i.Mode.IsRegular()
}

// isAdmitted reports whether a libcuda of version v works with the host's driver. Its note says so. Libraries without
// one are from before CUDA 12.9; for those the rule is that of NVIDIA's toolkit, a newer branch.
func isAdmitted(root *rootfs.Root, libcuda string, v, driver version) (bool, error) {
	f, err := root.OpenFile(path.Join(compatDir, libcuda))
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	note, err := readCompatNote(f)
	if errors.Is(err, errNoNote) {
		return v.major() > driver.major(), nil
	}
	if err != nil {
		return false, fmt.Errorf("%s/%s: %w", compatDir, libcuda, err)
	}
	return note.admits(driver), nil
}

// compatLibraries are the libraries of compatDir: under the names they have there, and under the names of the driver's
// libraries that they replace, in case the image lacks the links.
func compatLibraries(root *rootfs.Root, names []string, version string, args *hookargs.CreateContainer) []hookargs.Library {
	var libs []hookargs.Library
	for _, name := range names {
		isLibrary := strings.HasPrefix(name, "libcuda") || strings.HasPrefix(name, "libnvidia-")
		isLibrary = isLibrary && strings.Contains(name, ".so.") && !strings.ContainsFunc(name, unicode.IsControl)
		if file := path.Join(compatDir, name); isLibrary && root.IsFile(file) {
			libs = append(libs, hookargs.Library{SONAME: name, Path: file})
		}
	}
	for _, lib := range args.Libraries {
		stem, ok := strings.CutSuffix(path.Base(lib.Path), args.DriverVersion)
		if name := stem + version; ok && slices.Contains(names, name) && root.IsFile(path.Join(compatDir, name)) {
			libs = append(libs, hookargs.Library{SONAME: lib.SONAME, Path: path.Join(compatDir, name)})
		}
	}
	return libs
}
