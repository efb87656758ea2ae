package hook

import (
	"fmt"
	"runtime"

	"gpu-cdi-plugin/internal/ldcache"
)

const goarch = runtime.GOARCH

// arch is what the two C libraries fix for a machine architecture.
type arch struct {
	// flags marks libraries in glibc's cache.
	flags int32
	// glibcLoader and muslLoader are the paths that every dynamic program names as its interpreter.
	glibcLoader, muslLoader string
	// muslPath is the file with musl's search path.
	muslPath string
}

func archFor(goarch string) (arch, error) {
	flags, ok := ldcache.FlagsFor(goarch)
	switch {
	case ok && goarch == "amd64":
		return arch{flags, "/lib64/ld-linux-x86-64.so.2", "/lib/ld-musl-x86_64.so.1", "/etc/ld-musl-x86_64.path"}, nil
	case ok && goarch == "arm64":
		return arch{flags, "/lib/ld-linux-aarch64.so.1", "/lib/ld-musl-aarch64.so.1", "/etc/ld-musl-aarch64.path"}, nil
	}
	return arch{}, fmt.Errorf("no driver libraries are known for %s", goarch)
}
