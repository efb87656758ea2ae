package nvml

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"gpu-cdi-plugin/internal/ldcache"
)

// loaderPath is the file that the dynamic loader would load by a name, or empty: the first usable one in
// LD_LIBRARY_PATH, or else that in /etc/ld.so.cache. To ask the loader would be to run the library's constructors, before
// anybody could see whose the file is.
func loaderPath(name string, p platform) string {
	return loaderPathIn(os.Getenv("LD_LIBRARY_PATH"), "/etc/ld.so.cache", name, p)
}

func loaderPathIn(searchPath, cacheFile, name string, p platform) string {
	for _, dir := range strings.FieldsFunc(searchPath, func(r rune) bool { return r == ':' || r == ';' }) {
		path, err := filepath.Abs(filepath.Join(dir, name))
		if err == nil && checkLibrary(path, p) == nil {
			return path
		}
	}
	data, err := os.ReadFile(cacheFile)
	if err != nil {
		return ""
	}
	cache, err := ldcache.Parse(data)
	if err != nil {
		return ""
	}
	flags, _ := ldcache.FlagsFor(runtime.GOARCH)
	path, found := cache.Lookup(name, flags)
	if !found || checkLibrary(path, p) != nil {
		return ""
	}
	return path
}
