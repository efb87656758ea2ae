package hook

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode"

	"gpu-cdi-plugin/hook/rootfs"
	"gpu-cdi-plugin/internal/elffile"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
)

// compatDir is the directory in CUDA images with the user-mode driver of the image's CUDA version.
const compatDir = "/usr/local/cuda/compat"

// maxCompatFiles bounds the listing of compatDir. Real directories have about 10 files.
const maxCompatFiles = 1000

// findCompat returns the libraries of the image's own user-mode driver, if it is newer than the host's and works with
// the host's kernel driver. Otherwise it returns none.
func findCompat(root *rootfs.Root, args *hookargs.CreateContainer) ([]hookargs.Library, error) {
	driver := parseVersion(args.DriverVersion)
	if driver == nil {
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
	var versions []string // of the files libcuda.so.VERSION
	for _, name := range names {
		v, ok := strings.CutPrefix(name, "libcuda.so.")
		if !ok || parseVersion(v) == nil {
			continue
		}
		if info, err := root.Lstat(path.Join(compatDir, name)); err == nil && info.Mode().IsRegular() {
			versions = append(versions, v)
		}
	}
	if len(versions) == 0 {
		return nil, nil
	}
	if len(versions) > 1 {
		return nil, fmt.Errorf("%s: more than one libcuda, none is used: %.200q", compatDir, versions)
	}
	own := versions[0]
	if slices.Compare(parseVersion(own), driver) <= 0 {
		return nil, nil
	}
	libcuda := path.Join(compatDir, "libcuda.so."+own)
	ok, err := isCompatible(root, libcuda, parseVersion(own), driver)
	if err != nil {
		return nil, fmt.Errorf("%s is not used: %w", libcuda, err)
	}
	if !ok {
		return nil, nil
	}
	return compatLibraries(root, names, own, args), nil
}

// isCompatible reports whether a libcuda works with the host's driver. Since CUDA 12.9 libcuda has a note with the
// branches of the kernel driver that it supports. Without the note, libcuda's branch must be newer than the driver's,
// which is the rule of NVIDIA's toolkit.
func isCompatible(root *rootfs.Root, libcuda string, own, driver []int) (bool, error) {
	const section, owner = ".note.cuda.fwd_compatibility", "NVIDIA Corporation"
	f, err := root.OpenFile(libcuda)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	elf, err := elffile.ReadLibrary(f, info.Size(), elffile.MachineOf(goarch))
	if err != nil {
		return false, err
	}
	data, err := elf.Note(section, owner)
	if err != nil {
		return false, err
	}
	if data == nil {
		return own[0] > driver[0], nil
	}
	var note struct {
		Format int
		Driver []int
	}
	if err := json.Unmarshal(data, &note); err != nil {
		return false, fmt.Errorf("%s: %w", section, err)
	}
	return note.Format == 1 && slices.Contains(note.Driver, driver[0]), nil
}

// compatLibraries returns the libraries of compatDir under their own names, and under the names of the driver's
// libraries that they replace, since the image may lack those links.
func compatLibraries(
	root *rootfs.Root, names []string, version string, args *hookargs.CreateContainer,
) []hookargs.Library {
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

// parseVersion splits a driver's version, such as "580.126.09", into its two or three numbers, which may have leading
// zeros. The first is the driver's branch. The result is nil if s is not such a version.
func parseVersion(s string) []int {
	v, err := host.ParseVersion(s)
	if err != nil || len(v) < 2 {
		return nil
	}
	return v
}
