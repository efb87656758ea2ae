package drivers

import (
	"path/filepath"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/proc"
)

// trace prints what the loader finds for each of the libraries that are its arguments.
const trace = `for library; do
	echo "$library"
	LD_TRACE_LOADED_OBJECTS=1 /lib64/ld-linux-x86-64.so.2 "$library" 2>&1 || echo "	not loaded"
done`

// testContainers starts containers with all GPUs, and has the container's loader find what each of the driver's
// libraries is linked with.
func (n *node) testContainers(t *testing.T) {
	runc := shared.Runtimes()[0]
	for name, options := range map[string][]string{"hook": nil, "no hook": {"--no-hook"}} {
		t.Run(name, func(t *testing.T) {
			cdiDir := t.TempDir()
			plugin(t, 0, n.root, append(options, "cdi", "generate", "--file", filepath.Join(cdiDir, "nvidia.json"))...)
			want := libraries(n.spec(t, options...))
			rootfs := filepath.Join(t.TempDir(), "rootfs")
			proc.Must(t, 0, proc.Cmd{Args: []string{"cp", "-a", n.base, rootfs}}) // the hook writes into it
			c := engine.Container{
				Args:   append([]string{"/bin/sh", "-c", trace, "sh"}, want...),
				CDIDir: cdiDir, Devices: []string{"nvidia.com/gpu=all"},
			}
			res := runc.Start(t, runc.Bundle(t, rootfs, c))
			if res.Code != 0 {
				t.Fatalf("runc: %v", res)
			}
			t.Logf("%d libraries", len(want))
			checkTrace(t, res.Stdout, want)
		})
	}
}

// libraries are the libraries that a spec mounts, by their paths in the container.
func libraries(spec *specs.Spec) (paths []string) {
	for _, m := range spec.ContainerEdits.Mounts {
		if strings.Contains(filepath.Base(m.ContainerPath), ".so") {
			paths = append(paths, m.ContainerPath)
		}
	}
	return paths
}

// checkTrace reports the libraries that the loader did not find.
func checkTrace(t *testing.T, output string, want []string) {
	t.Helper()
	library, traced := "", map[string]int{}
	for line := range strings.Lines(output) {
		line = strings.TrimRight(line, "\n")
		dependency, isDependency := strings.CutPrefix(line, "\t")
		switch {
		case !isDependency:
			library = line
		case strings.Contains(dependency, "=> not found"), strings.Contains(dependency, "not loaded"):
			t.Errorf("%s: %s", library, dependency)
		default:
			traced[library]++
		}
	}
	for _, path := range want {
		if traced[path] == 0 {
			t.Errorf("the loader printed nothing about %s", path)
		}
	}
	if t.Failed() {
		t.Log(output)
	}
}
