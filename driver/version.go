package driver

import (
	"path"
	"slices"
	"strconv"
	"strings"
)

// splitLibrary splits "libcuda.so.580.126.09" into "libcuda" and "580.126.09".
func splitLibrary(file string) (name, suffix string, ok bool) {
	name, suffix, ok = strings.Cut(file, ".so.")
	if !ok {
		name, ok = strings.CutSuffix(file, ".so")
	}
	return name, suffix, ok && strings.HasPrefix(name, "lib")
}

// IsVersion reports whether s is a version: at least two numbers with dots between.
func IsVersion(s string) bool { return strings.Contains(s, ".") && isNumbers(s) }

// VersionOf is the driver's version in the file name of one of its core libraries, or empty.
func VersionOf(library string) string {
	name, version, _ := splitLibrary(path.Base(library))
	if slices.Contains(coreLibraries, name) && IsVersion(version) {
		return version
	}
	return ""
}

// isNumbers reports whether s is one or more numbers with dots between.
func isNumbers(s string) bool {
	for part := range strings.SplitSeq(s, ".") {
		if part == "" || len(part) > 9 || strings.Trim(part, "0123456789") != "" {
			return false
		}
	}
	return true
}

// compareVersions compares versions number by number.
func compareVersions(a, b string) int {
	return slices.CompareFunc(strings.Split(a, "."), strings.Split(b, "."), func(x, y string) int {
		m, _ := strconv.ParseUint(x, 10, 32)
		n, _ := strconv.ParseUint(y, 10, 32)
		return int(m) - int(n)
	})
}
