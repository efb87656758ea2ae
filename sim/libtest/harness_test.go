// Package libtest tests the simulated driver library and the driver's programs as C programs use them: in a
// directory like a driver root, loaded by a program that is compiled with NVIDIA's header.
//
// It uses only the C sources of package sim, so a failure here is one of the library.
package libtest

//go:generate go test . -run TestSMI -update

import (
	"bytes"
	"debug/elf"
	"errors"
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

// build compiles the library and the programs that load it, once.
var (
	build    = sync.OnceValues(compile)
	buildDir string
)

var warnings = []string{
	"-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-fvisibility=hidden",
}

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "gpu-sim-libtest-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	buildDir = dir
	return m.Run()
}

// nvmlInclude is the directory of NVIDIA's header, in the module that go.mod pins.
var nvmlInclude = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		return "", fmt.Errorf("find go-nvml: %w", err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "pkg", "nvml"), nil
})

// programs are the driver's programs, by the source that each is compiled from.
var programs = map[string]string{
	"smi.c":         "nvidia-smi",
	"mps_control.c": "nvidia-cuda-mps-control",
	"mps_server.c":  "nvidia-cuda-mps-server",
	"mps_client.c":  "cuda-mps-client",
}

// compile makes libnvidia-ml.so, the driver's programs and the test program in a directory, which it returns.
func compile() (string, error) {
	dir := buildDir
	if err := os.Chmod(buildDir, 0o755); err != nil { // for tests that run a program as another user
		return "", err
	}
	include, err := nvmlInclude()
	if err != nil {
		return "", err
	}
	probes, err := filepath.Glob("testdata/probe/*.c")
	if err != nil {
		return "", err
	}
	library := []string{
		"-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1", "-Wl,-z,now", "-o", dir + "/libnvidia-ml.so",
	}
	library = slices.Concat(warnings, library, librarySources(), []string{"-lpthread", "-ldl"})
	probe := slices.Concat([]string{
		"-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations",
		"-DNVML_NO_UNVERSIONED_FUNC_DEFS", "-isystem", include, "-o", dir + "/probe",
	}, probes, []string{"-lpthread", "-ldl"})
	err = errors.Join(cc(library...), cc(probe...))
	for source, name := range programs {
		err = errors.Join(err,
			cc(slices.Concat(warnings,
				[]string{"-o", filepath.Join(dir, name), "../lib/" + source, "-ldl"})...))
	}
	return dir, err
}

// librarySources are the library's C files: all but those of other products.
func librarySources() []string {
	files, err := filepath.Glob("../lib/*.c")
	if err != nil {
		panic(err) // a malformed pattern
	}
	return slices.DeleteFunc(files, func(file string) bool {
		base := filepath.Base(file)
		return programs[base] != "" || base == "sandboxutils.c"
	})
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

// built returns the directory of the library and the programs.
func built(t testing.TB) string {
	t.Helper()
	testenv.Command(t, "cc")
	dir, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// node is a directory like a driver root, with regular files instead of device nodes.
type node struct {
	root, library string
}

const libDir = "usr/lib/x86_64-linux-gnu"

// newNode makes a node with a description in its library.
func newNode(t testing.TB, description string) *node {
	t.Helper()
	n := &node{root: t.TempDir()}
	if err := os.Chmod(filepath.Dir(n.root), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{libDir, "dev/nvidia-caps", "run/gpu-sim"} {
		if err := os.MkdirAll(filepath.Join(n.root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	image, err := os.ReadFile(filepath.Join(built(t), "libnvidia-ml.so"))
	if err != nil {
		t.Fatal(err)
	}
	n.library = filepath.Join(n.root, libDir, "libnvidia-ml.so.1")
	if err := os.WriteFile(n.library, describe(t, image, description), 0o755); err != nil {
		t.Fatal(err)
	}
	n.addNodes(t, "nvidiactl")
	return n
}

// describe writes a description into its section of the library.
func describe(t testing.TB, image []byte, description string) []byte {
	t.Helper()
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	section := f.Section(".gpusim")
	if section == nil || section.Size != 256<<10 || section.Type != elf.SHT_PROGBITS {
		t.Fatalf("section .gpusim is %+v, want 256 KiB in the file", section)
	}
	if len(description) > int(section.Size) {
		t.Fatalf("description of %d bytes", len(description))
	}
	copy(image[section.Offset:], description)
	return image
}

func (n *node) path(elem ...string) string {
	return filepath.Join(append([]string{n.root}, elem...)...)
}

// addNodes makes files in /dev that every user may open.
func (n *node) addNodes(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		path := n.path("dev", name)
		if err := errors.Join(os.WriteFile(path, nil, 0o666), os.Chmod(path, 0o666)); err != nil {
			t.Fatal(err)
		}
	}
}

func (n *node) removeNodes(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		if err := os.Remove(n.path("dev", name)); err != nil {
			t.Fatal(err)
		}
	}
}

func (n *node) setState(t testing.TB, state string) {
	t.Helper()
	if err := os.WriteFile(n.statePath(), []byte(state), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (n *node) statePath() string { return n.path("run/gpu-sim/state") }

// probe returns the command that runs one case of the test program.
func (n *node) probe(t testing.TB, name string, args ...string) *exec.Cmd {
	t.Helper()
	args = append([]string{n.library, n.statePath(), name}, args...)
	return exec.Command(filepath.Join(built(t), "probe"), args...)
}

// run runs a case and logs its output. If it fails, the test ends.
func run(t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	if err != nil {
		shown := cmd.Args[3:min(len(cmd.Args), 10)]
		t.Fatalf("%s: %v\n%s", strings.Join(shown, " "), err, out)
	}
	t.Logf("%s", out)
}
