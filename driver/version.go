package driver

import (
	"path"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/host"
)

// splitLibrary splits "libcuda.so.580.126.09" into "libcuda" and "580.126.09".
func splitLibrary(file string) (name, suffix string, ok bool) {
	name, suffix, ok = strings.Cut(file, ".so.")
	if !ok {
		name, ok = strings.CutSuffix(file, ".so")
	}
	return name, suffix, ok && strings.HasPrefix(name, "lib")
}

// IsVersion reports whether s is a version: at least two numbers separated by dots.
func IsVersion(s string) bool { return strings.Contains(s, ".") && isNumbers(s) }

// VersionOf returns the driver's version in the file name of one of its core libraries, or "".
func VersionOf(library string) string {
	name, suffix, _ := splitLibrary(path.Base(library))
	if slices.Contains(coreLibraries, name) && IsVersion(suffix) {
		return suffix
	}
	return ""
}

// isNumbers reports whether s is one or more numbers separated by dots.
func isNumbers(s string) bool {
	_, err := host.ParseVersion(s)
	return err == nil
}

// compareVersions compares versions number by number. A text that is not a version comes before all versions.
func compareVersions(a, b string) int {
	x, _ := host.ParseVersion(a)
	y, _ := host.ParseVersion(b)
	return slices.Compare(x, y)
}
