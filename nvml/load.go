package nvml

import (
	"fmt"
	"strings"
)

// load loads the library and makes sure that it is NVML: a call of a function that it lacks would end the process.
func load(name string) (sharedLibrary, error) {
	if strings.Contains(name, "/") {
		if err := checkLibrary(name, thisPlatform()); err != nil {
			return sharedLibrary{}, err
		}
	}
	library, err := dlopen(name)
	if err != nil {
		return sharedLibrary{}, fmt.Errorf("%w: %w", classOfLoadError(name, err), err)
	}
	for _, function := range requiredFunctions() {
		if !library.hasVersion(function) {
			library.close()
			return sharedLibrary{}, fmt.Errorf("%w: it has no function %s", ErrLibraryUnusable, function)
		}
	}
	return library, nil
}

// classOfLoadError tells a library that is not there from one that cannot be loaded, for instance because a library
// that it needs is not there.
func classOfLoadError(name string, err error) error {
	if strings.HasPrefix(err.Error(), name+": cannot open shared object file: No such file") {
		return ErrLibraryNotFound
	}
	return ErrLibraryUnusable
}

// requiredFunctions are those without which nothing can be said about a GPU. Any other may be missing in the library
// of an old driver.
func requiredFunctions() []string {
	return []string{
		"nvmlInit", "nvmlShutdown", "nvmlErrorString", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount",
		"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetPciInfo",
	}
}

// hasVersion reports whether the library has the function in any of its versions; go-nvml calls the newest that is
// there.
func (l sharedLibrary) hasVersion(function string) bool {
	for _, suffix := range []string{"", "_v2", "_v3"} {
		if l.has(function + suffix) {
			return true
		}
	}
	return false
}
