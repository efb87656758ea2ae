// Package libtest compares the simulated driver library with NVIDIA's header: what it declares, and what it exports.
package libtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

var warnings = []string{
	"-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-fvisibility=hidden",
}

// nvmlInclude is the directory of NVIDIA's header, in the module that go.mod pins.
var nvmlInclude = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		return "", fmt.Errorf("find go-nvml: %w", err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "pkg", "nvml"), nil
})

// others are C files that are not the library's.
var others = []string{"smi.c", "mps_control.c", "mps_server.c", "mps_client.c", "sandboxutils.c"}

// librarySources are the library's C files.
func librarySources() []string {
	files, err := filepath.Glob("../lib/*.c")
	if err != nil {
		panic(err) // a malformed pattern
	}
	return slices.DeleteFunc(files, func(file string) bool { return slices.Contains(others, filepath.Base(file)) })
}

// compileLibrary compiles the library, and returns its path.
func compileLibrary(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "libnvidia-ml.so")
	args := []string{"-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1", "-Wl,-z,now", "-o", path}
	testenv.Must(t, cc(slices.Concat(warnings, args, librarySources(), []string{"-lpthread", "-ldl"})...))
	return path
}

// cc runs the C compiler.
func cc(args ...string) error {
	name := "cc"
	if env := os.Getenv("CC"); env != "" {
		name = env
	}
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	return nil
}
